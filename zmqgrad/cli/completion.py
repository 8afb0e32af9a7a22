"""``zmqgrad completion``: prints a script that completes the command's words in a shell.

shtab writes the script from the parsers, once: completing starts no Python, and the command starts no slower.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from zmqgrad.cli.parser import CommandParser, describe
from zmqgrad.errors import ConfigurationError

SHELLS = ("bash", "zsh", "tcsh", "fish")

_FILES = ("PATH", "FILE", "SCRIPT", "ARGS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``zmqgrad completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    examples = (
        "zmqgrad completion bash > ~/.local/share/bash-completion/completions/zmqgrad",
        "zmqgrad completion zsh > ~/.zfunc/_zmqgrad  # with fpath+=~/.zfunc before compinit in ~/.zshrc",
        "zmqgrad completion fish > ~/.config/fish/completions/zmqgrad.fish",
        "zmqgrad completion tcsh > ~/.zmqgrad.csh  # with source ~/.zmqgrad.csh in ~/.tcshrc",
    )
    describe(parser, examples)


def execute(arguments: argparse.Namespace) -> int:
    """Print the script, and return the exit code.

    Raises:
        ConfigurationError: if shtab is not installed, or too old for the shell.
    """
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        raise ConfigurationError("completion needs shtab: pip install 'zmqgrad[completion]'") from None
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigurationError(f"this shtab does not know {arguments.shell}: pip install --upgrade shtab")
    from zmqgrad.cli.commands import command_parser  # which may load this module

    parser = command_parser()
    _complete_paths(parser, shtab)
    text = shtab.complete(parser, shell=arguments.shell)
    print(text)
    return 0


def _complete_paths(parser: CommandParser, shtab: Any) -> None:
    parser.declare()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _complete_paths(child, shtab)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR" or action.dest == "directory":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
