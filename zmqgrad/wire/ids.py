"""Ids are 64 bits: 16 for the worker that made them, 48 counted up on it.

So ids made by different workers never meet, and an id tells where it came from. Running out is an
error, not a wrap: a reused id would tie a reply to the wrong call (DESIGN section 5).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

WORKER_BITS = 16
COUNTER_BITS = 48
MAX_WORKER = (1 << WORKER_BITS) - 1
MAX_COUNTER = (1 << COUNTER_BITS) - 1


def join_id(worker: int, counter: int) -> int:
    """The id that ``worker`` (0 to 65535) makes as its ``counter``-th.

    Raises:
        OverflowError: if either does not fit its bits.
    """
    if not 0 <= worker <= MAX_WORKER:
        raise OverflowError(f"worker id {worker} does not fit {WORKER_BITS} bits (0 to {MAX_WORKER})")
    if not 0 <= counter <= MAX_COUNTER:
        raise OverflowError(f"worker {worker} has used up its {COUNTER_BITS}-bit ids (counter {counter})")
    return worker << COUNTER_BITS | counter


def split_id(value: int) -> tuple[int, int]:
    """``(worker, counter)`` of an id."""
    return value >> COUNTER_BITS, value & MAX_COUNTER


def show_id(value: int) -> str:
    """An id as people read it: ``worker.counter``."""
    worker, counter = split_id(value)
    return f"{worker}.{counter}"


class IdSource:
    """Counts up the ids of one worker; safe to call from any thread."""

    def __init__(self, worker: int, first: int = 1) -> None:
        last = join_id(worker, MAX_COUNTER)
        ids = itertools.chain(range(join_id(worker, first), last + 1), _UsedUp(worker))
        # One C call, so no lock is needed.
        self.next: Callable[[], int] = ids.__next__
        """A new id. Raises ``OverflowError`` after 2**48 ids."""


class _UsedUp:
    """What comes after the last id of ``worker``: an error, each time."""

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def __iter__(self) -> _UsedUp:
        return self

    def __next__(self) -> int:
        raise OverflowError(f"worker {self._worker} has used up its {COUNTER_BITS}-bit ids")
