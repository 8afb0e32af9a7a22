"""What the last change on each line was answered with, so that a change asked for twice is made once.

A client that loses its connection cannot know whether its request arrived, and asks again on the next
connection. It does so on the same *line* (an identity of its own) with the same *number*, and has one
request a line at a time, so one answer for each line suffices: asking for the next thing proves that the
answer to the one before has arrived. Pure.
"""

from __future__ import annotations

from zmqgrad.wire.messages import Message, StoreValue

MAX_LINES = 1 << 16
"""How many lines are remembered: then the one that changed something longest ago is forgotten."""

MAX_BYTES = 256 << 20
"""How many bytes their answers may hold; likewise."""


class Answers:
    """The answers to the last changes, by line."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self.last: dict[int, tuple[int, Message]] = {}
        """Number and answer of the last request on each line that changed something, the latest last; to be
        looked at only. A higher number than one asks for means that nobody waits for that any more."""
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._sizes: dict[int, int] = {}  # of those that are values, by line
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.last)

    def remember(self, line: int, number: int, message: Message) -> None:
        """``message`` answers request ``number``, which has changed something."""
        last = self.last
        if last.pop(line, None) is None and len(last) >= self._max_lines:
            self._forget(next(iter(last)))
        last[line] = number, message
        if type(message) is StoreValue or line in self._sizes:
            self._weigh(line, message)

    def _weigh(self, line: int, message: Message) -> None:
        self._bytes -= self._sizes.pop(line, 0)
        if type(message) is StoreValue:
            self._sizes[line] = len(message.value)
            self._bytes += len(message.value)
        while self._bytes > self._max_bytes and len(self.last) > 1:
            self._forget(next(iter(self.last)))

    def _forget(self, line: int) -> None:
        del self.last[line]
        self._bytes -= self._sizes.pop(line, 0)
