"""Which backend computes attention, and why; a combination that can't work is refused at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from headrace.engine.attention import cpu, reference
from headrace.engine.attention.backend import AttentionBackend, Capabilities
from headrace.engine.errors import ConfigError
from headrace.engine.kv.storage import KVStorage
from headrace.engine.native import backend as native
from headrace.engine.native.library import NativeUnavailable, load_default

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class _Entry:
    capabilities: Capabilities
    device_types: frozenset[str]
    build: Callable[[KVStorage], AttentionBackend]
    missing: Callable[[], str | None] = lambda: None
    """What this installation lacks for it; None when nothing does."""


def _build_native(storage: KVStorage) -> AttentionBackend:
    library = load_default()
    logger.info("compiled kernels for %s from %s", library.variant, library.path)
    return native.NativeCpuBackend(storage, library)


def _native_missing() -> str | None:
    try:
        load_default()
    except NativeUnavailable as error:
        return str(error)
    return None


_BACKENDS: Mapping[str, _Entry] = {
    "native": _Entry(native.CAPABILITIES, frozenset({"cpu"}), _build_native, _native_missing),
    "cpu": _Entry(cpu.CAPABILITIES, frozenset({"cpu"}), cpu.CpuBackend),
    "reference": _Entry(reference.CAPABILITIES, frozenset({"cpu", "cuda"}), reference.ReferenceBackend),
}
_NOT_IN_THIS_BUILD = ("flash", "torch_varlen")


def select_backend(name: str, storage: KVStorage) -> AttentionBackend:
    """Build the backend of that name over `storage`; "auto" takes the fastest one that suits.

    Raises:
        ConfigError: there is no such backend, or it doesn't suit the device, the type, the block size or
            the head width; it says what would.
    """
    if name == AUTO:
        return _select_automatically(storage)
    if name in _NOT_IN_THIS_BUILD:
        raise ConfigError(f"attention backend {name!r} is not in this build: use one of {_names()}")
    entry = _BACKENDS.get(name)
    if entry is None:
        raise ConfigError(f"attention backend {name!r} is not known: use one of {_names()}")
    problems = _problems(entry, storage)
    if problems:
        raise ConfigError(f"attention backend {name!r} does not suit: {'; '.join(problems)}")
    logger.info("attention backend %s, as configured", name)
    return entry.build(storage)


def check_capabilities(
    capabilities: Capabilities, *, dtype: torch.dtype, block_size: int, head_dim: int
) -> tuple[str, ...]:
    """What of a configuration a backend can't take, with the fix; empty when it suits."""
    problems = []
    if dtype not in capabilities.dtypes:
        known = ", ".join(sorted(str(known).removeprefix("torch.") for known in capabilities.dtypes))
        problems.append(f"dtype={str(dtype).removeprefix('torch.')}: use one of {known}")
    if block_size % capabilities.block_size_multiple:
        problems.append(f"block_size={block_size}: use a multiple of {capabilities.block_size_multiple}")
    if head_dim > capabilities.max_head_dim or head_dim % capabilities.head_dim_multiple:
        problems.append(
            f"the model's head width {head_dim}: at most {capabilities.max_head_dim}, "
            f"a multiple of {capabilities.head_dim_multiple}"
        )
    return tuple(problems)


def _select_automatically(storage: KVStorage) -> AttentionBackend:
    refused: list[str] = []
    for name, entry in _BACKENDS.items():
        problems = _problems(entry, storage)
        if not problems:
            reason = "; ".join(refused) or "the fastest for this device"
            logger.info("attention backend %s chosen: %s", name, reason)
            return entry.build(storage)
        refused.append(f"{name} does not suit ({', '.join(problems)})")
    raise ConfigError(f"no attention backend suits: {'; '.join(refused)}")


def _problems(entry: _Entry, storage: KVStorage) -> tuple[str, ...]:
    problems = check_capabilities(
        entry.capabilities,
        dtype=storage.shape.dtype,
        block_size=storage.layout.block_size,
        head_dim=storage.shape.head_dim,
    )
    if storage.device.type not in entry.device_types:
        return (f"it runs on {' and '.join(sorted(entry.device_types))}, not on {storage.device}", *problems)
    missing = entry.missing()
    return problems if missing is None else (missing, *problems)


def _names() -> str:
    return ", ".join((AUTO, *_BACKENDS))
