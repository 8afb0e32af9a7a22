"""64-bit ids: 16 bits for the worker that created the id, 48 bits for a counter.

Ids of different workers never collide, and an id identifies its creator. Overflow is an error: with a reused
id, a reply could be matched with the wrong call.
"""

from __future__ import annotations

import itertools

WORKER_BITS = 16
COUNTER_BITS = 48
MAX_WORKER = (1 << WORKER_BITS) - 1
MAX_COUNTER = (1 << COUNTER_BITS) - 1


def join_id(worker: int, counter: int) -> int:
    """Combine ``worker`` (0 to 65535) and ``counter`` into an id.

    Raises:
        OverflowError: if either does not fit its bits.
    """
    if not 0 <= worker <= MAX_WORKER:
        raise OverflowError(f"worker id {worker} does not fit {WORKER_BITS} bits (0 to {MAX_WORKER})")
    if not 0 <= counter <= MAX_COUNTER:
        raise OverflowError(f"worker {worker} has used up its {COUNTER_BITS}-bit ids (counter {counter})")
    return worker << COUNTER_BITS | counter


def split_id(value: int) -> tuple[int, int]:
    """Split an id into ``(worker, counter)``."""
    return value >> COUNTER_BITS, value & MAX_COUNTER


def show_id(value: int) -> str:
    """Format an id as ``worker.counter``."""
    worker, counter = split_id(value)
    return f"{worker}.{counter}"


def parse_id(text: str) -> int:
    """The inverse of :func:`show_id`; a plain number is an id as well.

    Raises:
        ValueError: if it is neither.
    """
    worker, point, counter = text.partition(".")
    try:
        return join_id(int(worker), int(counter)) if point else int(text)
    except OverflowError as e:
        raise ValueError(str(e)) from e


class IdSource:
    """Generates the ids of one worker. Thread-safe."""

    def __init__(self, worker: int, first: int = 1) -> None:
        self._worker = worker
        self._last = join_id(worker, MAX_COUNTER)
        # ``next`` of a count is atomic, on free-threaded Python, too; that of a range is not there.
        self._ids = itertools.count(join_id(worker, first))

    def next(self) -> int:
        """Return a new id.

        Raises:
            OverflowError: after 2**48 ids.
        """
        found = next(self._ids)
        if found > self._last:
            raise OverflowError(f"worker {self._worker} has used up its {COUNTER_BITS}-bit ids")
        return found
