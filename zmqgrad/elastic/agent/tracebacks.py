"""Shows each traceback of a job once: what was shown before, or follows from a failure, takes one line.

A function that raises is logged by its worker and raised at its caller; when a worker fails, others lose it.
The logs of the workers have all of it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zmqgrad.elastic.agent.consequences import UNKNOWN, lost_peer
from zmqgrad.elastic.agent.output import without_escapes

_HEAD = b"Traceback (most recent call last):"


class Shown:
    """What is shown of a job: its tracebacks, and which workers have failed."""

    def __init__(self) -> None:
        self.tracebacks: dict[tuple[bytes, ...], int] = {}
        """The rank of the worker that wrote each first."""
        self.failed: set[int] = set()


class Tracebacks:
    """Shortens the stderr of worker ``rank``.

    Attributes:
        shortened: whether anything was left out that is not shown above.
    """

    def __init__(self, shown: Shown, rank: int) -> None:
        self.shortened = False
        self._shown, self._rank = shown, rank
        self._held: list[bytes] = []  # the lines of a traceback that has not ended
        self._pending = b""  # of a live stream: a line that may become its head
        self._in_line = False

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        """Returns what to show of complete lines; a traceback when its last line has come."""
        return [shown for line in lines for shown in self._line(line)]

    def _line(self, line: bytes) -> Iterator[bytes]:
        if self._held:
            self._held.append(line)
            if not line.startswith(b" "):
                held, self._held = self._held, []
                yield from self._short(held)
        elif without_escapes(line).rstrip() == _HEAD:
            self._held.append(line)
        else:
            yield line

    def _short(self, traceback: list[bytes]) -> list[bytes]:
        key = tuple(without_escapes(line).rstrip() for line in traceback)
        first = self._shown.tracebacks.setdefault(key, self._rank)
        last = traceback[-1].rstrip(b"\r")
        if first != self._rank:
            return [last + b" (traceback: above, worker %d)" % first]
        if self._is_consequence(key[-1].decode(errors="replace")):
            self.shortened = True
            return [last + b" (follows from the failure of another worker)"]
        return traceback

    def _is_consequence(self, error: str) -> bool:
        """Whether it is the loss of a worker that has failed, or has just written why it fails."""
        lost, others = lost_peer([error]), {*self._shown.tracebacks.values()} - {self._rank}
        if lost is None:
            return False
        return self._has_other_failed() or lost in others or (lost == UNKNOWN and bool(others))

    def _has_other_failed(self) -> bool:
        return bool(self._shown.failed - {self._rank})

    def finish(self) -> list[bytes]:
        """Returns the lines of a traceback that has no end: a line, if its worker was ended meanwhile."""
        held, self._held = self._held, []
        if held and self._has_other_failed():
            self.shortened = True
            return [held[0].rstrip(b"\r") + b" ... (cut off when the worker was ended)"]
        return held

    def feed_live(self, chunk: bytes) -> bytes:
        """Returns what to show of the bytes of a program that draws: all at once, but for tracebacks."""
        *lines, rest = (self._pending + chunk).split(b"\n")
        out = b""
        for line in lines:
            shown = [line] if self._in_line else list(self._line(line))
            self._in_line = False
            out += b"".join(each + b"\n" for each in shown)
        may_be_head = not self._in_line and _HEAD.startswith(without_escapes(rest)) and rest
        self._pending = rest if self._held or may_be_head else b""
        self._in_line = bool(rest and not self._pending) or (self._in_line and not lines)
        return out if self._pending else out + rest

    def finish_live(self) -> bytes:
        """As :meth:`finish`, of the bytes."""
        held, self._pending = b"".join(line + b"\n" for line in self.finish()) + self._pending, b""
        return held
