"""The overseer looks while there is something to see, and falls asleep otherwise."""

from __future__ import annotations

import threading

from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.overseer import QUIET_LOOKS, Overseer

WAIT = 10.0


def test_it_looks_when_roused_and_falls_asleep_when_it_sees_nothing() -> None:
    looks = threading.Semaphore(0)

    def look() -> bool:
        looks.release()
        return False

    overseer = Overseer("test", look)
    try:
        assert not looks.acquire(timeout=0.01)  # asleep from the start
        for _ in range(2):
            overseer.rouse()
            for _ in range(QUIET_LOOKS + 1):
                assert looks.acquire(timeout=WAIT)
            assert not looks.acquire(timeout=0.02)
    finally:
        overseer.close()
        assert overseer.join(Deadline.after(WAIT)) == []


def test_it_goes_on_while_it_sees_something_and_closes_at_once() -> None:
    seen = threading.Semaphore(0)

    def look() -> bool:
        seen.release()
        return True

    overseer = Overseer("test", look)
    overseer.rouse()
    for _ in range(3 * QUIET_LOOKS):
        assert seen.acquire(timeout=WAIT)
    overseer.close()
    overseer.close()
    assert overseer.join(Deadline.after(WAIT)) == []
