"""The code blocks of a Markdown page, and the comments that say how to run them.

A comment directly above a block is invisible to readers:

    <!-- not run: REASON -->   the block is not run
    <!-- file: NAME -->        the block is saved under this name, for commands that follow
    <!-- launch: N -->         the block is a program of N workers
    <!-- background -->        the command runs until the end of the page
    <!-- exits: CODE -->       the command is repeated until it exits with this code, because it observes one
                               that runs in the background
    <!-- setup                 Python code that runs before the next block, as if it stood in the page
    CODE
    -->

All other Python blocks of a page run in one process, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<how>not run|file|launch|background|exits)(?:: (?P<what>[^\n]*))? -->\n+ *)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^ *```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One block.

    Attributes:
        line: number of the line in the page before its first line.
        language: as the page names it.
        text: the code.
        how: the kind of the comment above it; "setup" for hidden code.
        what: the argument of that comment.
    """

    line: int
    language: str
    text: str
    how: str
    what: str


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of ``page`` in order."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        hidden = found["setup"] is not None
        code = (
            found["setup"] if hidden else re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        )
        line = text[: found.start("setup" if hidden else "text")].count("\n")
        how = "setup" if hidden else found["how"] or ""
        yield Block(line, "python" if hidden else found["language"], code, how, found["what"] or "")
