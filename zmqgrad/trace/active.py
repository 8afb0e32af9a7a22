"""What the threads of a process serve and wait for at the moment.

Most requests and waits are over before the log is written, so a begin is only noted here. What has ended by
then becomes one event, or none (a short wait); for what has not, the writer claims it, and writes its begin.
Thread-safe without a lock: ``dict.pop`` is atomic, so either the thread or the writer gets the begin.
"""

from __future__ import annotations

from typing import Any

from zmqgrad.trace.events import RequestStarted, WaitBegun, tag_of

Key = tuple[int, int, int, int]
"""Thread, actor, peer, message id."""

Row = tuple[Any, ...]
"""An event, as the recorder queues it."""


class Active:
    """Requests and waits that have begun and not ended, with the times of their begins."""

    def __init__(self) -> None:
        self.requests: dict[Key, int] = {}
        self.waits: dict[Key, int] = {}

    def __bool__(self) -> bool:
        return bool(self.requests or self.waits)

    def claim(self, until: int) -> list[Row]:
        """Returns the events of what began until then; their ends become events of their own."""
        return [
            (tag, begun, *key)
            for tag, begins in ((tag_of(RequestStarted), self.requests), (tag_of(WaitBegun), self.waits))
            for key, at in list(begins.items())
            if at <= until and (begun := begins.pop(key, None)) is not None
        ]
