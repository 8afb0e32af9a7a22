"""The commands: their names and help texts, and a parser that loads only the module of the requested one."""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from typing import cast

from zmqgrad import __version__
from zmqgrad.cli.parser import Command, CommandParser, describe

COMMANDS = {
    "completion": "Print a script that completes this command's words in bash, zsh, fish or tcsh.",
    "doctor": "Check whether this host, or two hosts, can run workers, and which transports they would use.",
    "examples": "Copy the example programs of the documentation into a directory.",
    "run": "Start a script as several workers, on this host or on each of several hosts.",
    "secret": "Make a secret for a job, which its processes need between hosts.",
    "store": "Serve a key-value store, or access a running one.",
    "trace": "Show the recorded messages, calls and waits of a job.",
}
"""Commands with their help texts; ``zmqgrad.cli.<name>`` is the module."""


def command_parser() -> CommandParser:
    """The parser of the command; those of its subcommands load their modules when they are used."""
    parser = CommandParser(prog="zmqgrad", description="PyTorch RPC and distributed autograd over ZeroMQ.")
    parser.add_argument("--version", action="version", version=f"zmqgrad {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, description=purpose, declare=partial(_declare, name))
    describe(
        parser,
        ("zmqgrad doctor", "zmqgrad run --nproc-per-node 4 train.py", "zmqgrad run --help"),
        {"1": "the command failed; run: the exit code of the first worker that failed"},
    )
    return parser


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    module(name).add_arguments(parser)


def module(name: str) -> Command:
    """The module of the command ``name``."""
    return cast("Command", importlib.import_module(f"zmqgrad.cli.{name}"))
