"""How the service's small commands read their arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from headrace.service.exit_codes import EXIT_REFUSED


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong with a command line in a box, as the commands do that talk to a server."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        console = Console(stderr=True, highlight=False)
        wanted = "".join(f" {{{action.dest.upper()}}}" for action in self._get_positional_actions())
        console.print(Text(f"Usage: {self.prog} [OPTIONS]{wanted}", style="bold"))
        console.print(Text(f"Try '{self.prog} -h' for help.", style="dim"))
        told = Text(f"{message[0].upper()}{message[1:]}.")
        console.print(Panel(told, title="Error", title_align="left", border_style="red"))
        self.exit(EXIT_REFUSED)
