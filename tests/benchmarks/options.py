"""Options that benchmarks share: which model, how it is computed, lists with commas."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.engine import resolve_model
from tests.support.default_model import DEFAULT_MODEL


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be told which model it takes; see `model_path`."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a known name, a folder, a GGUF file or hf:org/name"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "headrace", help="folder for fetched models"
    )


def model_path(options: argparse.Namespace) -> Path:
    """The folder of the model that was asked for, fetched and converted if need be."""
    return resolve_model(options.model, options.cache)


def add_compute_options(
    parser: argparse.ArgumentParser, *, has_weight_dtype: bool = True, has_several: bool = False
) -> None:
    """Let a benchmark be told how the model is computed.

    Args:
        has_weight_dtype: whether `--weight-dtype` is one of the options.
        has_several: whether it is a list: each of them is measured.
    """
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    if has_several:
        parser.add_argument(
            "--weight-dtype", type=words, default=["same"], help="same, int8 or int4; several with commas"
        )
    elif has_weight_dtype:
        parser.add_argument("--weight-dtype", default="same", help="same, int8 or int4")
    parser.add_argument("--threads", type=int, default=None, help="compute threads; unset: as a server has")


def numbers(text: str) -> list[int]:
    """A list such as 1,8,16; nothing is an empty one."""
    return [int(number) for number in words(text)]


def reals(text: str) -> list[float]:
    """A list such as 0.5,1."""
    return [float(number) for number in words(text)]


def words(text: str) -> list[str]:
    """A list with commas."""
    return [word for word in text.split(",") if word]
