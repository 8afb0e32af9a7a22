"""``zmqgrad store salvage``: what is whole of a damaged journal, as a new one."""

from __future__ import annotations

import argparse
import sys

from zmqgrad.errors import JournalError
from zmqgrad.store.journal import salvage

HELP = "Write what is whole of a store's damaged journal to a new one."

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("journal", metavar="PATH", help="the damaged journal; it is not changed")
    parser.add_argument("into", metavar="NEW", help="the new one; must not exist")
    parser.add_argument(
        "--beyond",
        action="store_true",
        help="also keep what is whole behind the first damage, though it may build on what was lost: a "
        "sum may lack what was added, a deleted key be there again",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Salvage, and return the exit code for the shell."""
    try:
        saved = salvage(arguments.journal, arguments.into, beyond=arguments.beyond)
    except JournalError as error:
        print(f"zmqgrad store salvage: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(
        f"saved {saved.entries} changes in {arguments.into}; lost {saved.lost} bytes at {saved.gaps} places"
    )
    return 0
