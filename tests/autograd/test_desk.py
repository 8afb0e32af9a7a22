"""The desk: each entry is taken once, by one thread or by several, and none is left behind."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.passes.desk import CLEAR, LONG, STEP, THREADS, Desk


def entries(*sends: int) -> list[tuple[int, list[None]]]:
    return [(send, []) for send in sends]


def begin(desk: Desk, threads: int) -> int:
    """So many threads have found their place."""
    for _ in range(threads):
        desk.begin()
    return threads


def test_one_thread_takes_what_comes_while_it_is_at_work() -> None:
    desk = Desk()
    assert desk.put(entries(1, 2), now=0.0) == 1
    assert desk.take(1, now=0.0) == entries(1)
    assert desk.put(entries(3), now=0.0) == 0
    assert not desk.leave()
    assert desk.take(10, now=0.0) == entries(2, 3)
    assert desk.leave()
    assert desk.put(entries(4), now=0.0) == 1


def test_what_has_come_before_is_left_out() -> None:
    desk = Desk()
    desk.put(entries(1, 2), now=0.0)
    assert desk.put(entries(2, 1), now=0.0) == 0
    desk.put(entries(1, 3), now=0.0)
    assert desk.take(10, now=0.0) == entries(1, 2, 3)


def test_nobody_begins_for_nothing() -> None:
    desk = Desk()
    desk.put(entries(1), now=0.0)
    desk.take(1, now=0.0)
    assert desk.leave()
    assert desk.put(entries(1), now=0.0) == 0


def test_more_threads_begin_where_entries_take_long() -> None:
    desk = Desk()
    desk.pace = 2 * LONG
    assert desk.put(entries(*range(100)), now=0.0) == THREADS
    assert desk.hire(now=0.0) == 0


def test_no_more_threads_than_entries_wait() -> None:
    desk = Desk()
    desk.pace = 2 * LONG
    assert desk.put(entries(1), now=0.0) == 1


def test_another_thread_begins_if_the_first_is_at_it_for_long() -> None:
    desk = Desk()
    desk.put(entries(1), now=0.0)
    desk.take(1, now=0.0)
    assert desk.put(entries(2), now=CLEAR / 2) == 0
    assert desk.hire(now=2 * CLEAR) == min(THREADS - 1, 1)


def test_what_comes_does_not_wait_for_a_thread_that_has_no_place_yet() -> None:
    desk = Desk()
    desk.pace = 2 * LONG
    hired = desk.put(entries(*range(100)), now=0.0) - 1
    desk.take(100, now=0.0)
    assert desk.leave()
    assert desk.put(entries(100), now=0.0) == 1
    for _ in range(hired):
        desk.begin()
    assert desk.put(entries(101), now=0.0) == max(0, THREADS - 1 - hired)


def test_another_thread_goes_on_for_one_that_cannot() -> None:
    desk = Desk()
    desk.put(entries(1, 2), now=0.0)
    desk.take(1, now=0.0)
    desk.flee()
    assert desk.hire(now=0.0) == 1
    desk.begin()
    assert desk.take(2, now=0.0) == entries(2)
    assert desk.leave()


def test_what_comes_alone_is_handled_at_once() -> None:
    desk = Desk()
    assert desk.take_alone(1, now=0.0)
    assert not desk.take_alone(2, now=0.0)  # a thread is at it
    assert desk.put(entries(1, 2), now=0.0) == 0  # which takes that as well, but nothing twice
    assert not desk.leave()
    assert desk.take(10, now=0.0) == entries(2)
    assert desk.leave()
    assert not desk.take_alone(2, now=0.0)  # a repetition
    assert desk.take_alone(3, now=0.0)
    assert desk.leave()


def test_the_pace_comes_down_at_once_and_goes_up_step_by_step() -> None:
    desk = Desk()
    assert desk.fitting(1.0) == 0  # nothing is known
    assert desk.learn(1, 1e-3) == 1e-3
    assert desk.learn(4, 1e-3) == 0.25e-3
    assert desk.fitting(1e-3) == 4
    assert math.isclose(desk.learn(1, 5e-3), STEP * 0.25e-3)
    assert desk.fitting(-1.0) == 0


def test_the_pace_goes_up_at_once_if_it_is_clear_why() -> None:
    desk = Desk()
    desk.learn(1, 1e-3)
    assert desk.learn(2, 3 * CLEAR) == 1.5 * CLEAR


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=30), st.booleans())
def test_each_entry_is_taken_once(steps: list[tuple[int, int]], long: bool) -> None:
    """Messages of some entries come, and threads take some, in any order."""
    desk, threads, put, taken = Desk(), 0, 0, []
    desk.pace = 2 * LONG if long else LONG / 2
    for take, count in steps:
        begun = desk.put(entries(*range(put, put + count)), now=0.0)
        threads += begun and 1 + begin(desk, begun - 1)
        put += count
        if threads:
            taken += desk.take(take, now=0.0)
            threads += begin(desk, desk.hire(now=0.0))
            threads -= desk.leave()
        assert 0 <= threads <= THREADS
        assert threads or len(taken) == put
    while threads:
        taken += desk.take(3, now=0.0)
        threads -= desk.leave()
    assert taken == entries(*range(put))
