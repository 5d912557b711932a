"""Typed access to the JSON files of a model folder: a wrong value is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from headrace.engine.errors import ModelLoadError
from headrace.engine.tokenizer import JsonObject


class JsonFields:
    """The fields of one JSON object, read with their types checked. A field that is null is missing."""

    def __init__(self, fields: JsonObject, source: str) -> None:
        """Wrap an object.

        Args:
            fields: the object.
            source: where it stands, for messages: "config.json", "config.json: rope_scaling".
        """
        self._fields = fields
        self._source = source

    @classmethod
    def of_file(cls, path: Path) -> JsonFields:
        """Read a file that must hold one object.

        Raises:
            ModelLoadError: the file is missing, is no JSON, holds something else, or names a key twice.
        """
        return cls(read_json_object(path), str(path))

    @property
    def source(self) -> str:
        """Where the object stands, for messages."""
        return self._source

    @property
    def keys(self) -> frozenset[str]:
        """Names of the fields that are not null."""
        return frozenset(key for key, value in self._fields.items() if value is not None)

    def raw(self, key: str) -> object:
        """The value as it stands; None where it is missing."""
        return self._fields.get(key)

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number."""
        value = self._fields.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(f"{key} is {value!r}: it must be a whole number of {at_least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._fields.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.error(f"{key} is {value!r}: it must be a number")
        return float(value)

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A whole number, None where the field is written as null, the default where it is left out."""
        return (
            self.integer(key)
            if self._fields.get(key) is not None
            else None
            if key in self._fields
            else default
        )

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A finite number, None where the field is written as null, the default where it is left out."""
        return (
            self.number(key)
            if self._fields.get(key) is not None
            else None
            if key in self._fields
            else default
        )

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}: it must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._fields.get(key)
        if value is None:
            if default is None:
                raise self.error(f"{key} is missing")
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}: it must be a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where it is missing."""
        value = self._fields.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(f"{key} is {value!r}: it must be a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """One whole number or a list of them; empty where it is missing."""
        value = self._fields.get(key)
        entries = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            raise self.error(f"{key} is {value!r}: it must be a whole number or a list of them")
        return tuple(entries)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; empty where it is missing."""
        value = self._fields.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.error(f"{key} is {value!r}: it must be a list of numbers")
        for place, entry in enumerate(value):
            if isinstance(entry, bool) or not isinstance(entry, int | float) or not _is_finite(entry):
                raise self.error(f"{key}[{place}] is {entry!r}: it must be a number")
        return tuple(map(float, value))

    def object(self, key: str) -> JsonFields | None:
        """An object inside this one; None where it is missing."""
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is {value!r}: it must be an object")
        return JsonFields(value, f"{self._source}: {key}")

    def error(self, what: str) -> ModelLoadError:
        """An error to raise that says where it is."""
        return ModelLoadError(f"{self._source}: {what}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number may be greater than any float.
        return False


def read_json_object(path: Path) -> JsonObject:
    """Read a file that must hold one JSON object in which no key occurs twice.

    Raises:
        ModelLoadError: it doesn't, or it can't be read.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ModelLoadError(f"{path}: {', '.join(twice)} occurs twice in one object")
        return fields

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value
