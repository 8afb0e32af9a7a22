"""The ``zmqgrad`` command, also as ``python -m zmqgrad``: finds the subcommand and executes it.

Loads only the module of the requested command, so that the launcher starts fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from zmqgrad import __version__
from zmqgrad.errors import ConfigurationError


class Command(Protocol):
    """Interface of a module of :mod:`zmqgrad.cli` that implements a command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


_COMMANDS = {
    "doctor": "Check whether this host, or two hosts, can run workers, and which transports they would use.",
    "run": "Start a script as several workers on this host.",
    "secret": "Make a secret for a job, which its processes need between hosts.",
    "store": "Serve a key-value store, or access a running one.",
    "trace": "Show the recorded messages, calls and waits of a job.",
}
"""Commands with their help texts; ``zmqgrad.cli.<name>`` is the module."""

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: that of the process) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name = argv[0] if argv else ""
    command = cast("Command", importlib.import_module(f"zmqgrad.cli.{name}")) if name in _COMMANDS else None
    parser = _parser(name, command)
    if not argv:
        parser.print_help()
        return EXIT_USAGE
    if not name.startswith("-") and command is None:
        parser.error(_unknown(name))
    arguments = parser.parse_args(argv)
    if command is None:
        parser.error("a command is missing")  # only options were given
    try:
        return command.execute(arguments)
    except ConfigurationError as error:
        print(f"zmqgrad {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser(chosen: str, command: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zmqgrad", description="PyTorch RPC and distributed autograd over ZeroMQ.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"zmqgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
    for name, purpose in _COMMANDS.items():
        its_parser = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if command is not None and name == chosen:
            command.add_arguments(its_parser)
    return parser


def _unknown(word: str) -> str:
    close = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there is: {', '.join(_COMMANDS)}"
    return f"there is no command '{word}'; {hint}"


if __name__ == "__main__":
    sys.exit(main())
