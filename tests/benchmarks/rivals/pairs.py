"""Which rival stands beside which Headrace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.rivals import environments as env
from tests.benchmarks.rivals.contender import Contender
from tests.benchmarks.rivals.in_process import in_process
from tests.benchmarks.rivals.served import headrace, llamacpp, llamacpp_program, vllm

SLOTS = 16
MANY_SLOTS = 64


@dataclass(frozen=True)
class Place:
    """Where things are.

    Args:
        cache: environments, converted weights, logs.
        model: folder of the weights, safetensors.
        gguf: the file that those came from.
    """

    cache: Path
    model: Path
    gguf: Path

    def log(self, name: str) -> Path:
        """Where a contender's messages go."""
        return self.cache / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Pair:
    """Both sides of a comparison."""

    rival: Contender
    headrace: Contender


def _openvino(place: Place) -> Pair:
    return Pair(_openvino_worker(place, SLOTS), headrace(place.model, SLOTS))


def _openvino_many(place: Place) -> Pair:
    return Pair(_openvino_worker(place, 0), headrace(place.model, MANY_SLOTS))


def _openvino_fp32(place: Place) -> Pair:
    return Pair(_openvino_worker(place, SLOTS, precision="f32"), headrace(place.model, SLOTS, "float32"))


def _openvino_fp32_kv(place: Place) -> Pair:
    worker = _openvino_worker(place, SLOTS, precision="f32", kv_precision="f32")
    return Pair(worker, headrace(place.model, SLOTS, "float32"))


def _openvino_int8(place: Place) -> Pair:
    return Pair(
        _openvino_worker(place, SLOTS, weights="int8"),
        headrace(place.model, SLOTS, flags=("--weight-dtype", "int8")),
    )


def _openvino_worker(
    place: Place,
    num_slots: int,
    weights: str = "fp32",
    precision: str = "bf16",
    kv_precision: str = "default",
) -> Contender:
    """Its KV cache is in 8 bits, as it comes on a CPU, unless told otherwise."""
    venv = env.make(env.OPENVINO, place.cache)
    export = [str(venv / "bin" / "optimum-cli"), "export", "openvino", "-m", str(place.model)]
    export += ["--task", "text-generation-with-past", "--weight-format", weights, "{out}"]
    folder = env.converted(place.cache / "models" / f"openvino-{weights}", export)
    slots = f"{num_slots} slots" if num_slots else "no limit of slots"
    arguments = [str(folder), precision, kv_precision, f"{num_slots}"]
    kept = "" if weights == "fp32" else f", {weights} weights"
    kept += "" if kv_precision == "default" else f", KV {kv_precision}"
    name = f"OpenVINO GenAI {precision}{kept}, in process, {slots}"
    return in_process(name, venv, "openvino_worker.py", arguments, place.log("openvino"))


def _llamacpp(place: Place) -> Pair:
    return Pair(_llamacpp_server(place, "BF16"), headrace(place.model, SLOTS))


def _llamacpp_fp32(place: Place) -> Pair:
    return Pair(_llamacpp_server(place, "F32"), headrace(place.model, SLOTS, "float32"))


def _llamacpp_q8(place: Place) -> Pair:
    return Pair(
        _llamacpp_server(place, "Q8_0"), headrace(place.model, SLOTS, flags=("--weight-dtype", "int8"))
    )


def _llamacpp_q4(place: Place) -> Pair:
    return Pair(
        _llamacpp_server(place, "Q4_0"), headrace(place.model, SLOTS, flags=("--weight-dtype", "int4"))
    )


def _llamacpp_server(place: Place, kind: str) -> Contender:
    venv = env.make(env.LLAMACPP, place.cache)
    weights = env.converted(
        place.cache / "models" / f"model-{kind}.gguf",
        [*llamacpp_program(venv, "llama-quantize"), "--allow-requantize", str(place.gguf), "{out}", kind],
    )
    return llamacpp(venv, weights, SLOTS, place.log("llamacpp"))


def _vllm(place: Place) -> Pair:
    venv = env.make(env.VLLM, place.cache)
    return Pair(vllm(venv, place.model, SLOTS, place.log("vllm")), headrace(place.model, SLOTS))


def _vllm_fp32(place: Place) -> Pair:
    venv = env.make(env.VLLM, place.cache)
    rival = vllm(venv, place.model, SLOTS, place.log("vllm"), "float32")
    return Pair(rival, headrace(place.model, SLOTS, "float32"))


def _transformers(place: Place) -> Pair:
    return _transformers_in(place, "bfloat16")


def _transformers_fp32(place: Place) -> Pair:
    return _transformers_in(place, "float32")


def _transformers_in(place: Place, dtype: str) -> Pair:
    venv = env.make(env.TRANSFORMERS, place.cache)
    worker = in_process(
        f"transformers {dtype}, in process, batches of {SLOTS}",
        venv,
        "transformers_worker.py",
        [str(place.model), f"{SLOTS}", dtype],
        place.log("transformers"),
    )
    return Pair(worker, headrace(place.model, SLOTS, dtype))


PAIRS: dict[str, Callable[[Place], Pair]] = {
    "openvino": _openvino,
    "openvino-many": _openvino_many,
    "openvino-fp32": _openvino_fp32,
    "openvino-fp32-kv": _openvino_fp32_kv,
    "openvino-int8": _openvino_int8,
    "llamacpp": _llamacpp,
    "llamacpp-fp32": _llamacpp_fp32,
    "llamacpp-q8": _llamacpp_q8,
    "llamacpp-q4": _llamacpp_q4,
    "vllm": _vllm,
    "vllm-fp32": _vllm_fp32,
    "transformers": _transformers,
    "transformers-fp32": _transformers_fp32,
}
"""By the name that `--only` takes; each makes what its rival needs."""
