"""Deadlines, and the clock that tests turn by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.runtime import clock as clocks
from zmqgrad.runtime.clock import MONOTONIC, Deadline, ManualClock, wall_offset

seconds = st.floats(0, 1e6)


def test_several_waits_share_one_deadline(clock: ManualClock) -> None:
    deadline = Deadline.after(5.0, clock)
    assert deadline.left() == 5.0
    clock.advance(3.0)
    assert deadline.left() == 2.0
    assert not deadline.passed()
    clock.advance(2.0)
    assert deadline.left() == 0.0
    assert deadline.passed()
    clock.advance(1.0)
    assert deadline.left() == 0.0


def test_a_deadline_without_limit_never_passes(clock: ManualClock) -> None:
    deadline = Deadline.after(None, clock)
    clock.advance(1e12)
    assert deadline.left() == math.inf
    assert deadline.timeout() is None
    assert not deadline.passed()
    assert repr(deadline) == "<Deadline never>"


def test_the_time_left_is_a_valid_timeout_for_threading(clock: ManualClock) -> None:
    far = Deadline.after(1e30, clock).timeout()
    assert far is not None
    assert threading.Event().wait(0) is False
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(far)  # OverflowError if it were too long
    assert not thread.is_alive()


@given(first=seconds, second=seconds, passed=seconds)
def test_sooner_is_the_smaller_of_the_two(first: float, second: float, passed: float) -> None:
    clock = ManualClock()
    deadline = Deadline.after(first, clock)
    clock.advance(passed)
    assert deadline.capped(second).at == min(first, passed + second)
    assert deadline.capped(None) is deadline


def test_a_deadline_of_no_time_has_passed(clock: ManualClock) -> None:
    assert Deadline.after(0, clock).passed()
    assert Deadline.after(-3, clock).left() == 0.0


def test_time_does_not_go_back(clock: ManualClock) -> None:
    with pytest.raises(ValueError, match=r"-1\.0"):
        clock.advance(-1.0)
    assert clock.now() == 0.0


def test_a_listener_is_called_after_each_advance(clock: ManualClock) -> None:
    heard: list[float] = []
    clock.on_advance(lambda: heard.append(clock.now()))
    clock.advance(1.0)
    clock.advance(0.5)
    assert heard == [1.0, 1.5]


def test_the_monotonic_clock_never_decreases() -> None:
    before = MONOTONIC.now()
    assert MONOTONIC.now() >= before


@pytest.mark.parametrize("delayed", range(14))
def test_a_thread_that_loses_the_processor_does_not_shift_the_wall_clock(
    delayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two reads it is away for a millisecond."""

    def times() -> Iterator[int]:
        time = 1_000
        for n in range(15):
            time += 100 if n != delayed else 1_000_000
            yield time

    time = times()
    monkeypatch.setattr(clocks, "monotonic_ns", time.__next__)
    monkeypatch.setattr(clocks, "wall_ns", lambda: 7_000_000_000 + next(time))
    assert wall_offset() == 7_000_000_000
