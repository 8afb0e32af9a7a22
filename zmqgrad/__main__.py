"""The ``zmqgrad`` command, also as ``python -m zmqgrad``: finds the subcommand and executes it.

Loads only the module of the requested command, so that the launcher starts fast.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from zmqgrad.cli.commands import command_parser, module
from zmqgrad.cli.parser import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE, discard_output
from zmqgrad.environment import replaces_torch_rpc
from zmqgrad.errors import ConfigurationError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: that of the process) and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_parser()
    if not argv:
        parser.print_help()
        return EXIT_USAGE
    try:
        return _execute(parser.parse_args(argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _execute(arguments: argparse.Namespace) -> int:
    _open_closed_streams()
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):  # a locale may lack what names are made of
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        replaces_torch_rpc()
        code = module(arguments.command).execute(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`: the reader has all it wants
        discard_output()
        return EXIT_PIPE
    except ConfigurationError as error:
        print(f"zmqgrad {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        discard_output()
        print(f"zmqgrad {arguments.command}: cannot write: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


def _open_closed_streams() -> None:
    """Open what whoever started us has closed: what is opened next must not take its place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number, which is fd
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
