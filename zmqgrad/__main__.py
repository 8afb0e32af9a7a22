"""The ``zmqgrad`` command, also as ``python -m zmqgrad``: finds the subcommand and hands over to it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Protocol

from zmqgrad import __version__
from zmqgrad.cli import run, store
from zmqgrad.errors import ConfigurationError


class Command(Protocol):
    """What a module of :mod:`zmqgrad.cli` has to offer to be a command."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


_COMMANDS: dict[str, Command] = {"run": run, "store": store}

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: that of the process) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not argv:
        parser.print_help()
        return EXIT_USAGE
    if not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        parser.error(_unknown(argv[0]))
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command].execute(arguments)
    except ConfigurationError as error:
        print(f"zmqgrad {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zmqgrad", description="PyTorch RPC and distributed autograd over ZeroMQ.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"zmqgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_arguments(
            commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        )
    return parser


def _unknown(word: str) -> str:
    close = difflib.get_close_matches(word, _COMMANDS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there is: {', '.join(_COMMANDS)}"
    return f"there is no command '{word}'; {hint}"


if __name__ == "__main__":
    sys.exit(main())
