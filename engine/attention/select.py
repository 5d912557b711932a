"""Which backend computes attention, and why; a combination that can't work is refused at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from headrace.engine.attention import cpu, flash, reference, torch_varlen
from headrace.engine.attention.backend import AttentionBackend, Capabilities
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.native import backend as native
from headrace.engine.native.library import NativeUnavailable, load_default

logger = logging.getLogger(__name__)

AUTO = "auto"
_AS_CONFIGURED = "as configured"


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """What a backend would have to do.

    Args:
        device: where K and V lie.
        compute_capability: of the device, if it is a GPU.
        dtype: of query, key, value and cache; None where it is not known yet.
        block_size: tokens per block.
        head_dim: width of a head; None where it is not known yet.
        has_soft_cap: whether a layer caps its scores.
        may_split: whether a row's KV may be cut into parts, so that bits depend on the batch.
    """

    device: torch.device
    compute_capability: tuple[int, int] | None
    dtype: torch.dtype | None
    block_size: int
    head_dim: int | None
    has_soft_cap: bool = False
    may_split: bool = True


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend that suits, to be built over as many caches as are wanted.

    Args:
        reason: why it was taken.
        build: makes it over a cache.
    """

    capabilities: Capabilities
    reason: str
    build: Callable[[KVStorage], AttentionBackend]


@dataclass(frozen=True, slots=True)
class _Entry:
    capabilities: Capabilities
    device_types: frozenset[str]
    build: Callable[[KVStorage, AttentionTask], AttentionBackend]
    missing: Callable[[], str | None] = lambda: None
    """What this installation lacks for it; None when nothing does."""


def _build_native(storage: KVStorage, _: AttentionTask) -> AttentionBackend:
    library = load_default()
    logger.info("compiled kernels for %s from %s", library.variant, library.path)
    return native.NativeCpuBackend(storage, library)


def _native_missing() -> str | None:
    try:
        load_default()
    except NativeUnavailable as error:
        return str(error)
    return None


_CPU, _CUDA = frozenset({"cpu"}), frozenset({"cuda"})
# The fastest first.
_BACKENDS: Mapping[str, _Entry] = {
    "native": _Entry(native.CAPABILITIES, _CPU, _build_native, _native_missing),
    "cpu": _Entry(cpu.CAPABILITIES, _CPU, lambda storage, _: cpu.CpuBackend(storage)),
    "flash": _Entry(
        flash.CAPABILITIES,
        _CUDA,
        lambda storage, task: flash.FlashBackend(
            storage, flash.load_kernels(), num_splits=0 if task.may_split else 1
        ),
        flash.missing,
    ),
    "torch_varlen": _Entry(
        torch_varlen.CAPABILITIES,
        _CUDA,
        lambda storage, task: torch_varlen.TorchVarlenBackend(
            storage, torch_varlen.load_kernel(), num_splits=None if task.may_split else 1
        ),
        torch_varlen.missing,
    ),
    "reference": _Entry(
        reference.CAPABILITIES, _CPU | _CUDA, lambda storage, _: reference.ReferenceBackend(storage)
    ),
}


def select_backend(name: str, storage: KVStorage, *, has_soft_cap: bool = False) -> AttentionBackend:
    """Build the backend of that name over `storage`; "auto" takes the fastest one that suits.

    Raises:
        ConfigError: see `choose_backend`.
    """
    task = AttentionTask(
        device=storage.device,
        compute_capability=compute_capability(storage.device),
        dtype=storage.shape.dtype,
        block_size=storage.layout.block_size,
        head_dim=storage.shape.head_dim,
        has_soft_cap=has_soft_cap,
    )
    return choose_backend(name, task).build(storage)


def choose_backend(name: str, task: AttentionTask) -> BackendChoice:
    """Find the backend of that name; "auto" takes the fastest one that suits. The log says why.

    Raises:
        ConfigError: there is no such backend, or it doesn't suit the device, the type, the block size, the
            head width or the model; it says what would.
    """
    found, entry, reason = _find(name, task)
    logger.info("attention backend %s chosen: %s", found, reason)
    if found == "reference" and reason != _AS_CONFIGURED:
        logger.warning("the reference backend is right, not fast: %s", reason)
    return BackendChoice(entry.capabilities, reason, lambda storage: entry.build(storage, task))


def check_backend(name: str, task: AttentionTask) -> None:
    """Refuse what `choose_backend` would refuse, as far as the task is known; the log says nothing.

    Raises:
        ConfigError: see `choose_backend`.
    """
    _find(name, task)


def check_capabilities(capabilities: Capabilities, task: AttentionTask) -> tuple[str, ...]:
    """What of a task a backend can't take, with the fix; empty when it suits."""
    problems = []
    if task.dtype is not None and task.dtype not in capabilities.dtypes:
        known = ", ".join(sorted(str(known).removeprefix("torch.") for known in capabilities.dtypes))
        problems.append(f"dtype={str(task.dtype).removeprefix('torch.')}: use one of {known} (--dtype)")
    multiple = capabilities.block_size_multiple
    if task.block_size % multiple:
        problems.append(
            f"block_size={task.block_size}: use a multiple of {multiple} (--block-size {multiple})"
        )
    width = task.head_dim
    if width is not None and (width > capabilities.max_head_dim or width % capabilities.head_dim_multiple):
        problems.append(
            f"the model's head width {width}: at most {capabilities.max_head_dim}, "
            f"a multiple of {capabilities.head_dim_multiple}"
        )
    if task.has_soft_cap and not capabilities.supports_soft_cap:
        problems.append("the model caps attention scores, which it can't (--attention-backend flash can)")
    least = capabilities.min_compute_capability
    if least is not None and task.compute_capability is not None and task.compute_capability < least:
        problems.append(
            f"the GPU's compute capability {_dotted(task.compute_capability)}: {_dotted(least)} or newer"
        )
    return tuple(problems)


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a GPU; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _find(name: str, task: AttentionTask) -> tuple[str, _Entry, str]:
    """A backend's name, itself, and why it was taken."""
    if name == AUTO:
        return _find_automatically(task)
    entry = _BACKENDS.get(name)
    if entry is None:
        raise ConfigError(f"attention backend {name!r} is not known: use one of {_names()}")
    problems = _problems(entry, task)
    if problems:
        raise ConfigError(f"attention backend {name!r} does not suit: {'; '.join(problems)}")
    return name, entry, _AS_CONFIGURED


def _find_automatically(task: AttentionTask) -> tuple[str, _Entry, str]:
    refused: list[str] = []
    for name, entry in _BACKENDS.items():
        if task.device.type not in entry.device_types:
            continue
        problems = _problems(entry, task)
        if not problems:
            return name, entry, "; ".join(refused) or "the fastest for this device"
        refused.append(f"{name} does not suit ({', '.join(problems)})")
    raise ConfigError(f"no attention backend suits {task.device}: {'; '.join(refused)}")


def _problems(entry: _Entry, task: AttentionTask) -> tuple[str, ...]:
    problems = check_capabilities(entry.capabilities, task)
    if task.device.type not in entry.device_types:
        types = " and ".join(sorted(entry.device_types))
        return (f"it runs on {types}, not on {task.device} (--device)", *problems)
    missing = entry.missing()
    return problems if missing is None else (missing, *problems)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _names() -> str:
    return ", ".join((AUTO, *_BACKENDS))
