"""How `--help` looks: beside a flag, which takes no value, stands no type of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


def _plain(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_bool_flag:
            parameter.metavar = ""
    return parameters


class PlainCommand(TyperCommand):
    """A command whose flags stand alone."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All that it takes, `--help` included."""
        return _plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same, with commands below it."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All that it takes, `--help` included."""
        return _plain(super().get_params(ctx))


class PlainTyper(typer.Typer):
    """A program made of such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=PlainGroup, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """See `typer.Typer.command`."""
        return super().command(name, cls=PlainCommand, **options)
