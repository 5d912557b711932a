"""From a model folder to a decoder that is ready to compute, or to an error that names the fault."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.config import ModelConfig, ModelInfo
from headrace.engine.errors import ConfigError, ModelLoadError
from headrace.engine.models.checkpoint import Checkpoint, read_config
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.generation_defaults import (
    check_token_ids,
    declared_eos_token_ids,
    suggested_sampling,
)
from headrace.engine.models.json_file import JsonFields
from headrace.engine.models.reduced_head import ReducedHead
from headrace.engine.models.registry import spec_of
from headrace.engine.models.spec import EMBEDDING, HEAD, DecoderSpec
from headrace.engine.native.kit import native_kit
from headrace.engine.native.quantised import KEPT_KINDS, WITH_NUMBERS, WeightKind
from headrace.engine.runner.protocol import LoadProgress

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types by their names; "auto" names none."""
_WEIGHT_KINDS = {"same": WeightKind.SAME, "int8": WeightKind.INT8, "int4": WeightKind.INT4}
_KEPT_AS = {
    WeightKind.KEPT_BF16: "bfloat16 and stay so",
    WeightKind.WITH_INT4: "whole numbers of 4 bits, or of 8, with scales, which steps of few tokens read",
    WeightKind.WITH_INT8: "whole numbers of 8 bits with scales, which steps of few tokens read",
}
_NUM_PROBED_ROWS = 8
_STAGE = "reading weights"


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """A decoder, and what its folder says about it."""

    decoder: Decoder
    info: ModelInfo


def load_decoder(
    config: ModelConfig,
    device: torch.device,
    progress: LoadProgress | None = None,
    *,
    tokenizer_eos_token_ids: Callable[[], Collection[int]] = tuple,
    reduced_head: ReducedHead | None = None,
) -> LoadedDecoder:
    """Read a model folder.

    Args:
        config: `config.path` is a folder with config.json and safetensors.
        device: where to compute.
        progress: told the bytes read.
        tokenizer_eos_token_ids: gives the end ids that the tokenizer declares, joined with those of the other
            files; asked when the weights are read.
        reduced_head: in the place of the model's own head.

    Raises:
        ModelLoadError: the files can't be served as they are.
        ConfigError: the configuration asks for something that this model or device can't give.
    """
    folder = config.path
    config_file, spec = read_spec(folder)
    max_len = choose_max_len(config.max_model_len, spec)
    dtype = choose_dtype(config.dtype, device)
    weight_kind = choose_weight_kind(config.weight_dtype, device)
    sampling_defaults = suggested_sampling(folder)
    with Checkpoint(folder) as checkpoint:
        spec = _settle_head(spec, checkpoint)
        checkpoint.require(spec.tensors(), redundant={HEAD} if spec.tied_head else set())
        weight_kind = settle_weight_kind(weight_kind, checkpoint, spec, dtype, device)
        if weight_kind in KEPT_KINDS:
            _log.info(
                "the checkpoint's weights are %s, computed with in %s: nothing is lost",
                _KEPT_AS[weight_kind],
                dtype,
            )
        source = _ConvertedWeights(checkpoint, spec, dtype, device, progress)
        decoder = Decoder(spec, source, max_len=max_len, weight_kind=weight_kind, reduced_head=reduced_head)
    bos = config_file.integers("bos_token_id")
    info = ModelInfo(
        name=config.name or folder.resolve().name,
        family=spec.family,
        max_model_len=max_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=declared_eos_token_ids(folder, tokenizer_eos_token_ids(), spec.vocab_size),
        bos_token_id=bos[0] if bos else None,
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=sum(math.prod(shape) for shape in spec.tensors().values()),
        sampling_defaults=sampling_defaults,
    )
    return LoadedDecoder(decoder, info)


def check_folder(folder: Path) -> None:
    """Check what a model folder declares, and that it holds the tensors for it; reads no weights.

    Raises:
        ModelLoadError: it can't be served as it is.
    """
    _, spec = read_spec(folder)
    with Checkpoint(folder) as checkpoint:
        spec = _settle_head(spec, checkpoint)
        checkpoint.require(spec.tensors(), redundant={HEAD} if spec.tied_head else set())


def read_spec(folder: Path) -> tuple[JsonFields, DecoderSpec]:
    """Read what the config.json of a model folder declares; no weights.

    Raises:
        ModelLoadError: the file can't be served as it is, whatever the reason.
    """
    config = read_config(folder)
    try:
        spec = spec_of(config)
    except (ArithmeticError, ValueError, MemoryError, RuntimeError) as error:
        # The last net: a number that no check foresaw is still the file's fault.
        raise config.error(f"it can't be served: {error}") from error
    for field in ("bos_token_id", "eos_token_id"):
        check_token_ids(config, field, spec.vocab_size)
    return config, spec


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The type to compute in. "auto" takes bfloat16 where the device multiplies it in hardware, else float32.

    Args:
        wanted: one of `headrace.engine.config.DTYPES`.

    Raises:
        ConfigError: the device can't compute in that type at a useful speed.
    """
    check_dtype(wanted, device)
    if device.type == "cpu":
        return _choose_cpu_dtype(wanted)
    if wanted != "auto":
        return DTYPES[wanted]
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    _log.info("dtype auto: %s on %s", dtype, torch.cuda.get_device_name(device))
    return dtype


def check_dtype(wanted: str, device: torch.device) -> None:
    """Refuse a type that `choose_dtype` would refuse.

    Raises:
        ConfigError: the device can't compute in that type at a useful speed.
    """
    if device.type == "cpu" and wanted == "float16":
        raise ConfigError("float16 has no fast kernels on a CPU: use dtype bfloat16, float32 or auto")


def _choose_cpu_dtype(wanted: str) -> torch.dtype:
    abilities = torch.cpu.get_capabilities()
    has_bf16 = bool(abilities.get("avx512_bf16") or abilities.get("amx_bf16"))
    if wanted == "auto":
        dtype = torch.bfloat16 if has_bf16 else torch.float32
        reason = (
            "the processor multiplies bfloat16" if has_bf16 else "the processor does not multiply bfloat16"
        )
        _log.info("dtype auto: %s, since %s", dtype, reason)
        return dtype
    if wanted == "bfloat16" and not has_bf16 and not _widens_bfloat16():
        _log.warning(
            "dtype bfloat16: this processor does not multiply it, so it may be much slower than float32"
        )
    return DTYPES[wanted]


def _widens_bfloat16() -> bool:
    """Whether the compiled kernels multiply bfloat16 weights as float32, which takes half the memory."""
    kit = native_kit()
    return kit is not None and kit.linears.suits(torch.empty((1, 2), dtype=torch.bfloat16))


def choose_weight_kind(wanted: str, device: torch.device) -> WeightKind:
    """How the weights of linear layers are kept.

    Args:
        wanted: one of `headrace.engine.config.WEIGHT_DTYPES`.

    Raises:
        ConfigError: nothing here computes with such weights at a useful speed.
    """
    kind = _WEIGHT_KINDS[wanted]
    if kind is WeightKind.SAME:
        return kind
    if device.type != "cpu":
        raise ConfigError(f"weight dtype {wanted} is for CPUs: on {device.type} use weight dtype same")
    kit = native_kit()
    if kit is None:
        raise ConfigError(
            f"weight dtype {wanted} needs the compiled kernels: run python -m headrace.engine.native.build, "
            "or use weight dtype same"
        )
    if not kit.linears.suits_quantised():
        raise ConfigError(
            f"weight dtype {wanted} needs an x86 processor with AVX2, FMA and F16C: use weight dtype same"
        )
    return kind


def settle_weight_kind(
    kind: WeightKind, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> WeightKind:
    """How a checkpoint's weights are going to be kept.

    Args:
        kind: what was chosen; weights of the same type as is computed in stay bfloat16, or are read as the
            whole numbers that they are, where nothing is lost by it. Tensors that the files lack, or hold in
            another shape, don't count.

    Returns:
        Of whole numbers the fewest bits that any weight takes; others take more, or are none.
    """
    kit = native_kit()
    if kit is None or kind is not WeightKind.SAME or not suits_kept(dtype, device):
        return kind
    # Gains and biases, which a file may hold in another type, are few.
    matrices = {
        name
        for name, shape in spec.tensors().items()
        if len(shape) > 1 and name in checkpoint.names and checkpoint.shape(name) == shape
    }
    if all(checkpoint.dtype(name) == "BF16" for name in matrices):
        return WeightKind.KEPT_BF16
    begins = (checkpoint.first_rows(name, _NUM_PROBED_ROWS).float() for name in sorted(matrices))
    held = {found.kind for found in map(kit.linears.hold_exactly, begins) if found is not None}
    return next((kept for few, kept in WITH_NUMBERS.items() if few in held), kind)


def suits_kept(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether what is computed in `dtype` may take weights that are kept in fewer bits."""
    kit = native_kit()
    return dtype is torch.float32 and device.type == "cpu" and kit is not None and kit.linears.suits_kept()


def choose_max_len(wanted: int | None, spec: DecoderSpec) -> int:
    """The longest sequence to serve, tokens.

    Args:
        wanted: None takes the model's own limit.

    Raises:
        ConfigError: the model can't do so much.
    """
    if wanted is not None and wanted > spec.max_len:
        raise ConfigError(
            f"max_model_len={wanted} is beyond what the model can do: use {spec.max_len} or less"
        )
    if wanted is None and spec.default_len < spec.max_position_embeddings:
        _log.warning(
            "serving %d tokens, the length up to which longrope's short factors hold: max_model_len up to %d "
            "serves more, with the long factors for every sequence, short ones too",
            spec.default_len,
            spec.max_len,
        )
    return wanted or spec.default_len


def _settle_head(spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderSpec:
    """A tied head may be stored all the same: where it differs it is used, as in the reference."""
    if not spec.tied_head or HEAD not in checkpoint.names or EMBEDDING not in checkpoint.names:
        return spec
    if torch.equal(checkpoint.read(HEAD), checkpoint.read(EMBEDDING)):
        return spec
    _log.warning(
        "config.json ties the head to the embedding, but %s differs from it: the stored head is used",
        checkpoint.describe(HEAD),
    )
    return dataclasses.replace(spec, tied_head=False)


class _ConvertedWeights:
    """A `WeightSource` over a checkpoint: converts, checks that all is finite, tells how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype, self._device = dtype, device
        self._progress = progress
        self._num_read = 0
        self._num_total = sum(math.prod(shape) for shape in spec.tensors().values()) * dtype.itemsize

    def read(self, name: str) -> Tensor:
        """The tensor in the wanted type on the wanted device."""
        # The file stays mapped only while it is read: what is kept is always a copy.
        tensor = self._checkpoint.read(name).to(dtype=self._dtype, device=self._device, copy=True)
        lowest, highest = torch.aminmax(tensor)
        # NaN comes through as both, and a value too large for the type as an infinity.
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            where = self._checkpoint.describe(name)
            raise ModelLoadError(f"{where} holds a value that is not finite as {self._dtype}")
        self._num_read += tensor.nbytes
        if self._progress is not None:
            self._progress(_STAGE, self._num_read, self._num_total)
        return tensor
