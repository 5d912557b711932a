"""Containers: what the files in docker/ tell to run is what the server takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from headrace.service.config import ServiceConfig, load_config
from tests.support.dockerfiles import variables_of
from tests.support.repository import ROOT, pyproject_value

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServiceConfig.model_fields:
        monkeypatch.delenv(f"HEADRACE_{name.upper()}", raising=False)


def run_lines(dockerfile: Path) -> Iterator[list[str]]:
    """The arguments of each `docker run` of its head that is told whole."""
    head = re.sub(r"(?m)^#", "", dockerfile.read_text()).partition("\n\n\n")[0].replace("\\\n", " ")
    for line in re.findall(r"(?m)^ +docker run (.*)$", head):
        if not line.startswith("…"):
            yield shlex.split(line)


def set_all(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def published(ports: list[str]) -> set[str]:
    return {port.rpartition(":50051:50051")[0] for port in ports}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_every_run_that_a_dockerfile_tells_of_starts(
    dockerfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list(run_lines(dockerfile))
    insecure = []
    for arguments in runs:
        given = {option: [] for option in ("-e", "-p")}
        for option, value in pairwise(arguments):
            if option in given:
                given[option].append(value)
        with monkeypatch.context() as patch:
            set_all(variables_of(dockerfile), patch)
            set_all(dict(pair.split("=", 1) for pair in given["-e"]), patch)
            config = load_config(())
        insecure.append(config.insecure)
        assert published(given["-p"]) == ({"127.0.0.1"} if config.insecure else {""})
    assert sorted(insecure) == [False, True]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_user_without_rights_and_needs_nothing_of_roots(dockerfile: Path) -> None:
    *_, image = re.split(r"(?m)^FROM ", dockerfile.read_text())
    instructions = re.sub(r"(?m)^#.*$", "", image)
    user = re.findall(r"(?m)^USER (.*)$", instructions)[-1]
    # A number, so that Kubernetes can tell that it is not root's.
    assert user.isdecimal()
    assert int(user) > 0
    assert "/root" not in instructions


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_whatever_number_its_user_has_the_cache_can_be_written_to(dockerfile: Path) -> None:
    """Clusters choose a number by themselves, and put it into root's group."""
    made = re.search(r"install --directory (.*) (\S+)\n", dockerfile.read_text())
    assert made is not None
    assert made[2] == variables_of(dockerfile)["HEADRACE_CACHE"]
    assert {"--group=root", "--mode=0775"} <= set(made[1].split())


def test_the_composed_service_starts_and_is_open_to_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["headrace"]
    dockerfile = DOCKER / service["build"]["context"] / service["build"]["dockerfile"]
    set_all(variables_of(dockerfile) | service["environment"], monkeypatch)
    assert load_config(()).insecure
    assert published(service["ports"]) == {"127.0.0.1"}


def test_flash_attn_is_compiled_at_the_version_that_is_pinned() -> None:
    """For the torch that was installed before it, and never fetched as somebody else has compiled it."""
    text = (DOCKER / "Dockerfile.cuda").read_text()
    pattern = re.search(r"grep -o '(flash-attn==[^']*)' pyproject.toml", text)
    extra = pyproject_value("project", "optional-dependencies", "cuda")

    assert pattern is not None
    assert [pin for pin in extra if re.fullmatch(pattern[1], str(pin))] == ["flash-attn==2.8.3.post2"]  # type: ignore[attr-defined]
    installing = re.search(r"FLASH_ATTENTION_FORCE_BUILD=TRUE.*?install (.*?);", text, flags=re.DOTALL)
    assert installing is not None
    assert {"--no-build-isolation", "--no-binary"} <= set(installing[1].split())
    assert text.index('pip install ${TORCH_PIP_ARGS} "${torch}"') < installing.start()


def test_the_builder_gets_what_the_images_copy_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    for dockerfile in DOCKERFILES:
        copied = {
            source
            for line in re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", dockerfile.read_text())
            for source in line.split()
        }
        assert copied == sent
