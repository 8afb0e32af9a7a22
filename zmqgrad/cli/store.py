"""``zmqgrad store``: serves a key-value store, and looks into one that runs."""

from __future__ import annotations

import argparse
from typing import Protocol

from zmqgrad.cli import store_ask, store_serve


class Subcommand(Protocol):
    """What a module ``store_<name>``, or a question of :mod:`store_ask`, has to offer."""

    @property
    def HELP(self) -> str: ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


_SUBCOMMANDS: dict[str, Subcommand] = {
    "serve": store_serve,
    **store_ask.QUESTIONS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and what they take."""
    commands = parser.add_subparsers(dest="store_command", required=True, title="commands", metavar="COMMAND")
    for name, module in _SUBCOMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        )


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code for the shell."""
    return _SUBCOMMANDS[arguments.store_command].execute(arguments)
