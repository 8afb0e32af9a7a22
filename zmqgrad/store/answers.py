"""What the last change on each line was answered with, so that a change asked for twice is made once.

A client that loses its connection cannot know whether its request arrived, and asks again on the next
connection. It does so on the same *line* (an identity of its own) with the same *number*, and has one
request a line at a time, so one answer for each line suffices: asking for the next thing proves that the
answer to the one before has arrived. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zmqgrad.wire.messages import Message, StoreValue

MAX_LINES = 1 << 16
"""How many lines are remembered: then the one that changed something longest ago is forgotten."""

MAX_BYTES = 256 << 20
"""How many bytes their answers may hold; likewise."""


class Answer(NamedTuple):
    """``message`` answered request ``number``."""

    number: int
    message: Message


_new = tuple.__new__  # quicker than the class itself


class Answers:
    """The answers to the last changes, by line."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self._last: dict[int, Answer] = {}  # the latest last
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._last)

    def find(self, line: int, number: int) -> Answer | None:
        """The last answer on ``line`` if request ``number`` is not newer than that; None if it is new.

        An answer to a newer number means that nobody waits for ``number`` any more.
        """
        last = self._last.get(line)
        return last if last is not None and number <= last.number else None

    def remember(self, line: int, number: int, message: Message) -> None:
        """``message`` answers request ``number``, which has changed something."""
        last = self._last
        before = last.pop(line, None)
        last[line] = _new(Answer, (number, message))
        if type(message) is StoreValue or (before is not None and type(before.message) is StoreValue):
            self._bytes += _size(message) - (0 if before is None else _size(before.message))
        if len(last) > self._max_lines or self._bytes > self._max_bytes:
            self._forget()

    def _forget(self) -> None:
        while len(self._last) > self._max_lines or (self._bytes > self._max_bytes and len(self._last) > 1):
            oldest = next(iter(self._last))
            self._bytes -= _size(self._last.pop(oldest).message)

    def __iter__(self) -> Iterator[tuple[int, Answer]]:
        """Lines and answers, the oldest first."""
        return iter(self._last.items())


def _size(message: Message) -> int:
    return len(message.value) if type(message) is StoreValue else 0
