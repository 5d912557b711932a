"""The weight files of a model folder: safetensors, one file or several with an index. The index is the truth.

Everything that can be wrong with the files is found here, before a tensor is computed with: a server that
starts with a missing shard looks healthy and answers garbage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.json_file import JsonFields, read_json_object
from headrace.engine.models.reduced_head import REDUCED_HEAD_FILE

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_log = logging.getLogger(__name__)

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Tables that some older files carry; the decoder computes its own.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq",)
_MOST_NAMES_IN_A_MESSAGE = 8


def read_config(folder: Path) -> JsonFields:
    """Read the config.json of a model folder.

    Raises:
        ModelLoadError: it is no model folder, or the file can't be read.
    """
    if not folder.exists():
        raise ModelLoadError(f"the model folder {folder} does not exist")
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is a file, and a model folder is wanted: resolve it first")
    if not any(folder.iterdir()):
        raise ModelLoadError(
            f"the model folder {folder} is empty: it must hold {CONFIG_FILE} and the weights"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise ModelLoadError(f"{folder / CONFIG_FILE} is missing: {folder} is not a model folder")
    return JsonFields.of_file(folder / CONFIG_FILE)


class Checkpoint:
    """The open weight files of one folder: a context manager that gives tensors by name."""

    def __init__(self, folder: Path) -> None:
        """Open every file and check that the files hold what the index says.

        Raises:
            ModelLoadError: a file is missing, cut short or of a refused kind; a tensor is missing or doubled.
        """
        self._folder = folder
        self._open_files = ExitStack()
        self._handles: dict[str, safe_open] = {}
        try:
            self._locations = self._locate()
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_files.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, the harmless ones left out."""
        return frozenset(name for name in self._locations if not name.endswith(_HARMLESS_SUFFIXES))

    def require(self, shapes: Mapping[str, tuple[int, ...]], redundant: Set[str] = frozenset()) -> None:
        """Check that the files hold these tensors, in these shapes, and no others.

        Args:
            shapes: what must be there.
            redundant: names that may be there although nobody reads them.

        Raises:
            ModelLoadError: they don't; every tensor at fault is named, up to a handful of each kind.
        """
        faults = []
        if missing := sorted(shapes.keys() - self.names):
            faults.append(f"missing: {_listed(missing)}")
        if unused := sorted(self.names - shapes.keys() - redundant):
            faults.append(f"not known to this architecture: {_listed(unused)}")
        wrong = [
            f"{name} is {list(found)}, should be {list(shapes[name])}"
            for name in sorted(shapes.keys() & self.names)
            if (found := self.shape(name)) != shapes[name]
        ]
        if wrong:
            faults.append(f"of the wrong shape: {_listed(wrong)}")
        if faults:
            raise ModelLoadError(
                f"the tensors in {self._folder} don't fit its {CONFIG_FILE}: {'; '.join(faults)}"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._handle(name).get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def dtype(self, name: str) -> str:
        """Type of a tensor as safetensors calls it (F32, BF16, ...), without reading it."""
        return str(self._handle(name).get_slice(name).get_dtype())  # type: ignore[no-untyped-call]

    def read(self, name: str) -> Tensor:
        """Read a tensor as it is stored, onto the CPU.

        Raises:
            ModelLoadError: its type is not one of the plain floating-point types.
        """
        tensor: Tensor = self._handle(name).get_tensor(name)  # type: ignore[no-untyped-call]
        if tensor.dtype not in _STORED_DTYPES:
            raise ModelLoadError(
                f"{self._folder / self._locations[name]}: {name} is stored as {tensor.dtype}; "
                "supported: float32, bfloat16, float16, float64"
            )
        return tensor

    def first_rows(self, name: str, num_rows: int) -> Tensor:
        """The begin of a tensor's first axis, at most so much of it, as it is stored; no more is read."""
        rows: Tensor = self._handle(name).get_slice(name)[:num_rows]  # type: ignore[no-untyped-call]
        return rows

    def describe(self, name: str) -> str:
        """A tensor's name and file, for messages."""
        return f"{name} in {self._folder / self._locations[name]}"

    def _handle(self, name: str) -> safe_open:
        return self._handles[self._locations[name]]

    def _locate(self) -> dict[str, str]:
        """Open the files; give the file of each tensor."""
        if (self._folder / INDEX_FILE).is_file():
            listed = _read_index(self._folder / INDEX_FILE)
        elif (self._folder / SINGLE_FILE).is_file():
            listed = None
        else:
            raise _no_weights(self._folder)
        files = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
        if absent := [file for file in files if not (self._folder / file).is_file()]:
            raise ModelLoadError(
                f"{INDEX_FILE} lists files that {self._folder} does not hold: {_listed(absent)}"
            )
        _warn_of_extra_files(self._folder, files)

        locations: dict[str, str] = {}
        for file in files:
            for name in self._open(file):
                if name in locations:
                    raise ModelLoadError(
                        f"{self._folder}: both {locations[name]} and {file} hold the tensor {name}"
                    )
                locations[name] = file
        if listed is not None:
            self._compare_with_index(listed, locations)
        return locations

    def _open(self, file: str) -> list[str]:
        path = self._folder / file
        try:
            handle = self._open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is damaged or cut short: {error}") from error
        self._handles[file] = handle
        return list(handle.keys())

    def _compare_with_index(self, listed: Mapping[str, str], found: Mapping[str, str]) -> None:
        for name, file in listed.items():
            if found.get(name) != file:
                where = f"; {found[name]} does" if name in found else ""
                raise ModelLoadError(
                    f"{self._folder / file} does not hold {name}, which {INDEX_FILE} says it does{where}"
                )
        if unlisted := sorted(found.keys() - listed.keys()):
            raise ModelLoadError(
                f"{self._folder / INDEX_FILE} does not list tensors of its files: {_listed(unlisted)}"
            )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        # A name with a folder in it could point outside the model.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: {name} is said to be in {file!r}, which is no safetensors file of this folder"
            )
    return weight_map


def _no_weights(folder: Path) -> ModelLoadError:
    names = sorted(path.name for path in folder.iterdir())
    if pickles := [name for name in names if name.endswith(_PICKLE_SUFFIXES)]:
        return ModelLoadError(
            f"{folder} holds its weights in {_listed(pickles)}: loading these can run code from the file, so "
            "they are refused; convert them to safetensors"
        )
    if strays := [name for name in names if name.endswith(".safetensors")]:
        return ModelLoadError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, so which of {_listed(strays)} belong to "
            "the model is unknown"
        )
    return ModelLoadError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _warn_of_extra_files(folder: Path, files: Iterable[str]) -> None:
    suffixes = (".safetensors", *_PICKLE_SUFFIXES)
    extras = {path.name for path in folder.iterdir() if path.name.endswith(suffixes)} - set(files)
    # Trainers leave pickled arguments beside the weights, and a draft model's head has a file of its own.
    if extras := extras - {"training_args.bin", REDUCED_HEAD_FILE}:
        _log.warning(
            "%s: these files are not part of the model and are ignored: %s", folder, _listed(sorted(extras))
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES_IN_A_MESSAGE])
    rest = len(names) - _MOST_NAMES_IN_A_MESSAGE
    return f"{shown} and {rest} more" if rest > 0 else shown
