"""The wheel: what lies in it, what it asks for, and that it works without the server's dependencies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.repository import PACKAGE_FOLDERS, ROOT, repository_files, source_modules

CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
HEAVY = {"accelerate", "flash-attn", "numpy", "safetensors", "tokenizers", "torch", "transformers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the repository's files: leftovers in build/ must not get into it."""
    source = tmp_path_factory.mktemp("source")
    for path in repository_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=100,
    )
    (built,) = target.glob("*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def requirements_of(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def asked_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_the_wheel_holds_only_the_namespace(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}
    assert "headrace/__init__.py" not in names_in(wheel)


def test_the_wheel_holds_every_module_and_no_other(wheel: Path) -> None:
    expected = {
        module.name.replace(".", "/") + ("/__init__.py" if module.is_package else ".py")
        for module in source_modules()
    }
    assert {name for name in names_in(wheel) if name.endswith(".py")} == expected


def test_the_wheel_is_typed(wheel: Path) -> None:
    markers = {package.replace(".", "/") + "/py.typed" for package in PACKAGE_FOLDERS}
    assert markers | {"headrace/v1/generation_pb2.pyi"} <= names_in(wheel)


def test_the_client_asks_for_nothing_heavy(wheel: Path) -> None:
    light = {requirement.name for requirement in requirements_of(wheel) if asked_for(requirement, extra="")}
    assert {"grpcio", "protobuf"} <= light
    assert not light & HEAVY


def test_the_server_extra_brings_the_model_libraries(wheel: Path) -> None:
    full = {
        requirement.name for requirement in requirements_of(wheel) if asked_for(requirement, extra="server")
    }
    assert {"torch", "transformers", "pydantic-settings"} <= full
    assert "flash-attn" not in full


def test_every_dependency_is_pinned_for_the_checks(wheel: Path) -> None:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if not line.startswith("#")}
    wanted = {
        requirement.name.lower()
        for requirement in requirements_of(wheel)
        if asked_for(requirement, extra="server") or asked_for(requirement, extra="dev")
    }
    assert wanted - pinned == set(), "run `make pins`"


@dataclass(frozen=True, slots=True)
class ClientInstall:
    """A fresh virtual environment that holds the wheel without any extra."""

    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, away from the repository and from this shell's PYTHONPATH."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def client_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> ClientInstall:
    install = ClientInstall(tmp_path_factory.mktemp("client"))
    venv.create(install.folder, with_pip=True)
    outcome = install.run("python", "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), str(wheel))
    assert outcome.returncode == 0, outcome.stderr
    return install


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_client_works_without_torch(client_install: ClientInstall) -> None:
    code = """
import importlib.util
from headrace.clients import InferenceClient
from headrace.v1 import generation_pb2
assert importlib.util.find_spec("torch") is None
print(InferenceClient.__name__, generation_pb2.DESCRIPTOR.package)
"""
    outcome = client_install.run("python", "-W", "error", "-c", code)
    assert outcome.stdout.split() == ["InferenceClient", "headrace.v1"], outcome.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_line_explains_itself_without_the_server(client_install: ClientInstall) -> None:
    outcome = client_install.run("headrace", "--help")
    assert outcome.returncode == 0, outcome.stderr
    assert "serve" in outcome.stdout
    assert "generate" in outcome.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_serve_without_the_server_extra_says_what_to_install(client_install: ClientInstall) -> None:
    outcome = client_install.run("headrace", "serve")
    assert outcome.returncode != 0
    assert "pip install 'headrace[server]'" in outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stderr
