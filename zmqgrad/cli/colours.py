"""Colours of terminals: where they are wanted (see no-color.org), and text in one of them; text of others."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from zmqgrad import environment

RED, GREEN, YELLOW, MAGENTA, BLUE, CYAN = 31, 32, 33, 35, 34, 36


def wants_colour(environ: Mapping[str, str]) -> bool:
    """Whether to use colours on a terminal."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def paint(text: str, colour: int | None) -> str:
    """``text`` in ``colour``, if stdout is a terminal that should show colours."""
    if colour is None or not sys.stdout.isatty() or not wants_colour(environment.inherited()):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def escaped(text: str, kept: str = "") -> str:
    """``text`` of others; control characters but those in ``kept``, which command a terminal, are escaped."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
