r"""Output of the workers: split into lines, labelled, and merged into one terminal.

Whole lines get a label. A program that draws a progress bar writes ``\r`` and escape sequences, and no
newline for minutes. Its bytes pass through (:meth:`Screen.live`) with a label at the start of each line; a
line from another worker is written above the unterminated one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

_MAX_LINE = 64 * 1024
"""An unterminated line of this length is printed as a line."""

_TOKEN = re.compile(rb"\n|\r|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[]|[^\n\r\x1b]+")
_UNFINISHED_ESCAPE = re.compile(rb"\x1b(\[[0-?]*[ -/]*)?\Z")
_ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")

_CLEAR_LINE = b"\r\x1b[2K"
_SHOW_CURSOR = b"\x1b[0m\x1b[?25h"


class LineSplitter:
    r"""Splits bytes into lines without terminators. Of a line redrawn with ``\r`` only the last state
    counts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that ``chunk`` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            self._rest = _as_shown(self._rest)
        if len(self._rest) > _MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [_as_shown(line) for line in lines]

    def finish(self) -> list[bytes]:
        """The unterminated rest: one line or none."""
        rest, self._rest = _as_shown(self._rest), b""
        return [rest] if rest else []


def _as_shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def without_escapes(line: bytes) -> bytes:
    """``line`` without colours and cursor movements."""
    return _ESCAPE.sub(b"", line)


class Screen:
    """Writes the output of all workers to file descriptors 1 and 2, which may be the same terminal.

    Args:
        write: writes all of some bytes to a descriptor.
        terminals: the descriptors that are terminals.
    """

    def __init__(self, write: Callable[[int, bytes], None], terminals: Collection[int] = ()) -> None:
        self._write = write
        self._terminals = frozenset(terminals)
        self._unfinished = b""
        """Contents of the terminal's last row, with its label, if the line is not terminated."""
        self._owner = 1
        self._held: dict[int, bytes] = {}
        self._was_live = False

    def lines(self, fd: int, label: bytes, lines: Sequence[bytes]) -> None:
        """Write complete lines."""
        if not lines:
            return
        text = b"".join(label + line + b"\n" for line in lines)
        if self._unfinished and fd in self._terminals:
            self._write(fd, _CLEAR_LINE + text)
            self._write(self._owner, self._unfinished)
        else:
            self._write(fd, text)

    def live(self, fd: int, label: bytes, chunk: bytes) -> None:
        """Pass on output of a program that controls the terminal."""
        self._was_live = True
        chunk = self._held.pop(fd, b"") + chunk
        if cut := _UNFINISHED_ESCAPE.search(chunk):
            self._held[fd] = cut.group()
            chunk = chunk[: cut.start()]
        out = bytearray()
        for token in _TOKEN.findall(chunk):
            if token in (b"\n", b"\r"):
                self._unfinished = b""
            elif self._unfinished:
                self._unfinished += token
            elif not _moves_cursor(token):
                out += label
                self._unfinished = label + token
            out += token
        self._owner = fd
        self._write(fd, bytes(out))

    def end_line(self) -> None:
        """End an unterminated line on the terminal, before something else is written there."""
        if self._unfinished:
            self._write(self._owner, b"\n")
            self._unfinished = b""

    def close(self) -> None:
        """Restore the terminal, whose modes a killed program may have left changed."""
        if self._was_live:
            self.end_line()
            self._write(self._owner, _SHOW_CURSOR)


def _moves_cursor(token: bytes) -> bool:
    """Whether this escape sequence moves the cursor or erases, so that the label must follow it."""
    return token.startswith(b"\x1b") and not token.endswith(b"m")
