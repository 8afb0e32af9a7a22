"""When to log that a thread still waits: not in short waits, then now and then."""

from __future__ import annotations

import logging

from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline

FIRST_SECONDS = 5.0
"""A shorter wait is not logged."""

INTERVAL_SECONDS = 15.0
"""Time between two lines."""


class WaitLog:
    """Logs one wait, which begins now. For a single thread.

    Args:
        logger: where to write.
        clock: for tests.
    """

    def __init__(self, logger: logging.Logger, clock: Clock = MONOTONIC) -> None:
        self._logger = logger
        self._clock = clock
        self._next = Deadline.after(FIRST_SECONDS, clock)

    def left(self) -> float:
        """Seconds until the next line is due."""
        return self._next.left()

    def warning(self, text: str, *arguments: object) -> None:
        """Log the line, formatted as by :mod:`logging`, if it is due."""
        if self._next.passed():
            self._next = Deadline.after(INTERVAL_SECONDS, self._clock)
            self._logger.warning(text, *arguments)
