"""Runs every GPU check, then the benchmark, and says what came of each: `tests/gpu/run.sh`.

Needs torch and transformers, no test runner: a machine with a GPU may have nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
import traceback
import types

import torch
import transformers


def import_without_psutil() -> None:
    """Let the engine find a stand-in, which is gone again before anybody else looks for the package.

    The engine asks it for the free memory of a CPU, which nothing here depends on.
    """
    if importlib.util.find_spec("psutil") is not None:
        return
    module = types.ModuleType("psutil")
    vars(module)["virtual_memory"] = lambda: types.SimpleNamespace(available=2**34)
    sys.modules["psutil"] = module
    importlib.import_module("headrace.engine.kv.storage")
    del sys.modules["psutil"]


def main() -> None:
    """Read the arguments and run; exits with 1 if a check failed, with 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs the bodies, kernels emulated"
    )
    parser.add_argument("--no-benchmark", action="store_true", help="checks alone")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        raise SystemExit(2)
    import_without_psutil()
    from headrace.engine.attention import flash, torch_varlen  # noqa: PLC0415  after the stand-in
    from tests.benchmarks import gpu as benchmark  # noqa: PLC0415
    from tests.gpu.checks import CHECKS  # noqa: PLC0415
    from tests.gpu.sampling_checks import SAMPLING_CHECKS  # noqa: PLC0415

    checks = {**CHECKS, **SAMPLING_CHECKS}
    device = torch.device(options.device)
    versions = (f"Python {platform.python_version()}", f"torch {torch.__version__}")
    print(*versions, f"transformers {transformers.__version__}", sep=", ")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        print(f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    for name, missing in (("flash", flash.missing()), ("torch_varlen", torch_varlen.missing())):
        print(f"attention backend {name}: {missing or 'there'}")
    failed = []
    for name, check in checks.items():
        started_s = time.monotonic()
        try:
            outcome = check(device)
        except Exception:  # a check may fail in any way; the others still run
            traceback.print_exc()
            failed.append(name)
            outcome = "FAILED"
        print(f"{name:26s} {time.monotonic() - started_s:6.1f} s  {outcome}", flush=True)
    if not options.no_benchmark:
        benchmark.run(benchmark.Options.quick(options.device))
    if failed:
        print(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)
    print(f"all {len(checks)} checks hold")


if __name__ == "__main__":
    main()
