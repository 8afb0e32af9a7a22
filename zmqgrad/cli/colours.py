"""Colours of terminals: where they are wanted (see no-color.org), and text in one of them; text of others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

from zmqgrad import environment

_CONTROL_IN_JSON = re.compile(r"[\x7f-\x9f]")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")

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


def escaped_json(text: str) -> str:
    """``text``, which is JSON, with the control characters escaped that it lets stand: those from 0x7f on.

    What the encoding of stdout may lack is escaped as well.
    """
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    characters = _CONTROL_IN_JSON if is_unicode else _BEYOND_ASCII
    return characters.sub(lambda match: json.dumps(match[0])[1:-1], text)
