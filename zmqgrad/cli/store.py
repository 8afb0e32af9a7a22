"""``zmqgrad store``: serves a key-value store, or accesses a running one."""

from __future__ import annotations

import argparse
from typing import Protocol

from zmqgrad.cli import store_client, store_serve


class Subcommand(Protocol):
    """Interface of a module ``store_<name>``, or of a subcommand in :mod:`store_client`."""

    @property
    def HELP(self) -> str: ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


_SUBCOMMANDS: dict[str, Subcommand] = {
    "serve": store_serve,
    **store_client.SUBCOMMANDS,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands and their arguments."""
    commands = parser.add_subparsers(dest="store_command", required=True, title="commands", metavar="COMMAND")
    for name, module in _SUBCOMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        )


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    return _SUBCOMMANDS[arguments.store_command].execute(arguments)
