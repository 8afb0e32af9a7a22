"""``zmqgrad store``: serves a key-value store, or accesses a running one."""

from __future__ import annotations

import argparse
import importlib
from functools import partial
from typing import cast

from zmqgrad.cli.parser import Command, describe

_SUBCOMMANDS = {
    "serve": (
        "Serve a key-value store until interrupted.",
        "zmqgrad store serve",
        "zmqgrad store serve --host host0 --port 29500 --journal store.log --secret-file ~/job7.secret",
    ),
    "get": (
        "Print the value of a key.",
        "zmqgrad store get step --endpoint host0:29500",
        "zmqgrad store get model --raw > model.pt",
    ),
    "set": ("Set a key.", "zmqgrad store set rate 0.1", "zmqgrad store set model - < model.pt"),
    "add": (
        "Add to the number at a key, and print the sum.",
        "zmqgrad store add step",
        "zmqgrad store add step 10",
    ),
    "delete": ("Delete keys.", "zmqgrad store delete rate step"),
    "keys": ("List the keys.", "zmqgrad store keys", "zmqgrad store keys config/ --values --json"),
    "wait": ("Wait until all given keys exist.", "zmqgrad store wait ready/0 ready/1 --timeout 60"),
    "watch": (
        "Print each change of the given keys.",
        "zmqgrad store watch rate",
        "zmqgrad store watch --prefix config/ --count 1 --json",
    ),
}
"""Subcommands with their help texts and examples."""

_FAILED = {"1": "the store cannot be reached, or refuses"}
_MISSING = {"3": "the key does not exist"}
_EXIT_CODES = {
    "serve": {"1": "the server cannot start, or failed"},
    "get": _FAILED | _MISSING,
    "delete": _FAILED | _MISSING,
    "wait": _FAILED | {"3": "a key did not exist within --timeout"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands; their own arguments are declared when they are used."""
    commands = parser.add_subparsers(dest="store_command", required=True, title="commands", metavar="COMMAND")
    for name, (purpose, *_) in _SUBCOMMANDS.items():
        commands.add_parser(name, help=purpose, description=purpose, declare=partial(_declare, name))
    describe(parser, ("zmqgrad store serve", "zmqgrad store get step", "zmqgrad store get --help"), _FAILED)


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code."""
    return _subcommand(arguments.store_command).execute(arguments)


def _declare(name: str, parser: argparse.ArgumentParser) -> None:
    _subcommand(name).add_arguments(parser)
    describe(parser, _SUBCOMMANDS[name][1:], _EXIT_CODES.get(name, _FAILED))


def _subcommand(name: str) -> Command:
    if name == "serve":
        return cast("Command", importlib.import_module("zmqgrad.cli.store_serve"))
    client = importlib.import_module("zmqgrad.cli.store_client")
    return cast("Command", client.SUBCOMMANDS[name])
