"""The work queue: each arrival is taken once, by few consumers, and none is left behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.engine import work_queue
from zmqgrad.autograd.engine.work_queue import WorkQueue


def arrivals(*sends: int) -> list[tuple[int, list[None]]]:
    return [(send, []) for send in sends]


def test_one_consumer_handles_later_arrivals() -> None:
    queue = WorkQueue()
    assert queue.add(arrivals(1, 2))
    assert queue.take(1) == arrivals(1)
    assert not queue.add(arrivals(3))
    assert not queue.finish()
    assert queue.take(10) == arrivals(2, 3)
    assert queue.finish()
    assert queue.add(arrivals(4))


def test_repetitions_are_ignored() -> None:
    queue = WorkQueue()
    queue.add(arrivals(1, 2))
    queue.add(arrivals(2, 1))
    queue.add(arrivals(1, 3))
    assert queue.take(10) == arrivals(1, 2, 3)
    assert queue.finish()
    assert not queue.add(arrivals(1))


def test_other_threads_help_while_arrivals_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "MAX_CONSUMERS", 2)
    queue = WorkQueue()
    assert not queue.help()
    assert queue.add(arrivals(0))
    assert queue.take(1) == arrivals(0)
    assert not queue.needs_help()  # one gradient is handled by the thread that is there
    queue.add(arrivals(1, 2, 3, 4))
    assert queue.take(1) == arrivals(1)
    assert queue.needs_help()
    assert queue.help()
    assert queue.take(1) == arrivals(2)
    assert not queue.help()  # there are enough consumers
    assert not queue.finish()
    assert queue.take(9) == arrivals(3, 4)
    assert queue.finish()
    assert queue.is_consumed()
    assert not queue.help()  # nothing waits
    assert queue.finish()
    assert not queue.is_consumed()


def test_no_arrival_waits_for_a_helper_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads of the pool may be busy for long."""
    monkeypatch.setattr(work_queue, "MAX_CONSUMERS", 2)
    queue = WorkQueue()
    assert queue.add(arrivals(0))
    assert not queue.add(arrivals(1))
    assert queue.request_help()
    assert not queue.request_help()  # one is enough
    assert queue.take(9) == arrivals(0, 1)
    assert queue.finish()
    assert queue.add(arrivals(2))
    assert not queue.add(arrivals(3))
    assert queue.help(requested=True)
    assert queue.take(9) == arrivals(2, 3)
    assert queue.finish()
    assert queue.finish()
    assert not queue.help(requested=True)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=30))
def test_each_arrival_is_taken_once_and_in_order(steps: list[tuple[int, int]]) -> None:
    queue, consumed, added, taken = WorkQueue(), False, 0, []
    for count, arriving in steps:
        started = queue.add(arrivals(*range(added, added + arriving)))
        assert not (started and consumed)
        consumed |= started
        added += arriving
        if consumed:
            taken += queue.take(count)
            consumed = not queue.finish()
        assert consumed or len(taken) == added
    while consumed:
        taken += queue.take(3)
        consumed = not queue.finish()
    assert taken == arrivals(*range(added))
