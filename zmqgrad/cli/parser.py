"""The parsers of the command: each declares its arguments when it is used, and reports its own mistakes.

argparse would build all subcommands at each start, and report a wrong option with the usage of the command.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol, cast

EXIT_FAILED, EXIT_USAGE = 1, 2
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141
"""The exit codes that shells use for a program killed by SIGINT, and by SIGPIPE."""

_MISSING = "the following arguments are required: "
_UNKNOWN_COMMAND = re.compile(r"argument (\w+): invalid choice: '(.*?)' ")  # as argparse says it

EXIT_CODES = {"0": "success", "2": "an invalid option or setting; nothing was done"}
"""The exit codes of every command."""


class Command(Protocol):
    """A command, a view or a subcommand: mostly a module of :mod:`zmqgrad.cli`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, arguments: argparse.Namespace) -> int: ...


class CommandParser(argparse.ArgumentParser):
    """A parser whose arguments are declared by ``declare``, before it parses for the first time."""

    def __init__(
        self, *args: Any, declare: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options["allow_abbrev"] = False
        super().__init__(*args, **options)
        self._declare = declare
        self.complete: Callable[[Any], Any] = lambda words: words
        """Returns the arguments to parse, given those of the command line."""

    def declare(self) -> None:
        """Declare the arguments, unless that is done."""
        declare, self._declare = self._declare, None
        if declare is not None:
            declare(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; but unknown arguments are an error, reported with the usage of this parser."""
        self.declare()
        found, unknown = super().parse_known_args(self.complete(args), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Report ``message`` last, after one line of usage: the whole usage can be longer than the screen."""
        if message.startswith(_MISSING):
            names = message.removeprefix(_MISSING).replace(", ARGS", "").replace(", ...", "")
            message = f"{names} is missing{self._choices()}"
            lines = (line.strip() for line in (self.epilog or "").splitlines())
            if example := next((line for line in lines if line.startswith(self.prog)), ""):
                message += f"; for example: {example}"
        elif self._subcommands() and (found := _UNKNOWN_COMMAND.match(message)):
            message = f"there is no {found[1].lower()} '{found[2]}'{self._hint(found[2])}"
        self.exit(
            EXIT_USAGE, f"usage: {self.prog} ... (see {self.prog} --help)\n{self.prog}: error: {message}\n"
        )

    def _subcommands(self) -> Mapping[str, argparse.ArgumentParser]:
        found = (action.choices for action in self._actions if action.nargs == argparse.PARSER)
        return cast("Mapping[str, argparse.ArgumentParser]", next(found, {}))

    def _choices(self) -> str:
        commands = self._subcommands()
        return f": it is one of {', '.join(commands)}" if commands else ""

    def _hint(self, word: str) -> str:
        import difflib  # only now: most starts need none

        if commands := self._subcommands():
            close = difflib.get_close_matches(word, commands, n=1)
            # By its purpose: who types "list" means "keys", which lists the keys.
            close = close or [
                n for n, each in commands.items() if word in (each.description or "").lower().split()
            ]
            return f"; did you mean '{close[0]}'?" if close else f"; there is: {', '.join(commands)}"
        shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
        if not word.startswith("-"):
            expected = [str(action.metavar or action.dest) for action in shown if not action.option_strings]
            return f"; it takes {', '.join(expected) or 'options only'}"
        names = [name for action in shown for name in action.option_strings]
        option = word.partition("=")[0]
        close = [name for name in names if len(option) > 3 and name.startswith(option.rstrip("s"))]
        close = close or difflib.get_close_matches(option, names, n=1)
        return f"; did you mean {' or '.join(close)}?" if close else ""


def discard_output() -> None:
    """Write nothing more to stdout, whose reader has gone: otherwise Python reports that at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(
    parser: argparse.ArgumentParser, examples: Iterable[str], exit_codes: Mapping[str, str] | None = None
) -> None:
    """Show, below the options, ``examples`` and the exit codes: the common ones and ``exit_codes``."""
    codes = dict(sorted((EXIT_CODES | dict(exit_codes or {})).items(), key=lambda item: int(item[0])))
    lines = [
        *([parser.epilog, ""] if parser.epilog else []),
        "examples:",
        *(f"  {each}" for each in examples),
    ]
    lines += ["", "exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in codes.items())]
    parser.epilog = "\n".join(lines)
