"""What `headrace serve --help` looks like."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType

from pydantic import ByteSize


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Says what a value is in a user's words, not in Python's. A subclass sets where models are kept."""

    cache_dir = Path()

    _METAVARS = MappingProxyType(
        {
            "ByteSize": "SIZE",
            "Path": "PATH",
            "dict[str,float]": "NAME=SHARE",
            "dict[int,float]": "PRIORITY=MS",
            "float": "SECONDS",
            "int": "N",
            "str": "TEXT",
        }
    )

    def _metavar_formatter(
        self, action: argparse.Action, default_metavar: str
    ) -> Callable[[int], tuple[str, ...]]:
        written = super()._metavar_formatter(action, default_metavar)
        words = dict(self._METAVARS)
        if not action.dest.endswith("_s"):
            words["float"] = "MS" if action.dest.endswith("_ms") else "SHARE"
        return lambda size: tuple(words.get(word, word) for word in written(size))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(cleandoc(text), width, indent)

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        for unset in ("(default: null)", "(default: )", "(default factory: dict)"):
            text = text.replace(unset, "")
        text = text.replace("default factory: default_cache_dir", f"default: {self.cache_dir}")
        if action.metavar == "ByteSize":
            text = re.sub(r"(?<=default: )\d+", lambda number: ByteSize(number[0]).human_readable(), text)
        return text.rstrip()
