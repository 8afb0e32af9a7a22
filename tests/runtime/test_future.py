"""Outcomes: set once, seen by all."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref

import pytest

from zmqgrad.runtime.future import Outcome


class Value:
    """Something that a weak reference can watch."""


class Failure(Exception):
    """An error that a weak reference can watch."""


def test_the_first_setting_counts() -> None:
    outcome: Outcome[int] = Outcome()
    assert not outcome.done()
    assert outcome.set(1)
    assert not outcome.set(2)
    assert not outcome.fail(ValueError("late"))
    assert outcome.wait() == outcome.result() == 1
    assert outcome.error() is None


def test_none_is_a_value() -> None:
    outcome: Outcome[None] = Outcome()
    outcome.set(None)
    assert outcome.done()
    assert outcome.wait(0) is None


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    outcome: Outcome[int] = Outcome()
    error = KeyError("k")
    assert outcome.fail(error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            outcome.wait(1)
        assert caught.value is error
    assert outcome.error() is error


@pytest.mark.open_outcomes
@pytest.mark.parametrize("timeout", [0, 0.01, -1, -0.5])
def test_a_wait_ends_with_its_timeout(timeout: float) -> None:
    outcome: Outcome[int] = Outcome()
    assert not outcome.wait_done(timeout)
    with pytest.raises(TimeoutError, match=str(timeout)):
        outcome.wait(timeout)
    with pytest.raises(RuntimeError, match="not there yet"):
        outcome.result()


def test_an_endless_timeout_is_taken() -> None:
    outcome: Outcome[int] = Outcome()
    waiter = threading.Thread(target=outcome.wait_done, args=(float("inf"),))
    waiter.start()
    outcome.set(1)
    waiter.join(10)
    assert not waiter.is_alive()


def test_all_waiters_wake() -> None:
    outcome: Outcome[int] = Outcome()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(outcome.wait(30))) for _ in range(20)]
    for t in threads:
        t.start()
    outcome.set(7)
    for t in threads:
        t.join(30)
    assert got == [7] * 20


def test_of_many_who_set_one_wins_and_all_agree() -> None:
    for _ in range(50):
        outcome: Outcome[int] = Outcome()
        heard: list[int] = []
        outcome.then(lambda o: heard.append(o.result()))  # noqa: B023
        start = threading.Barrier(4)
        won: list[int] = []

        def set_it(
            i: int, o: Outcome[int] = outcome, b: threading.Barrier = start, w: list[int] = won
        ) -> None:
            b.wait(10)
            if o.set(i):
                w.append(i)

        threads = [threading.Thread(target=set_it, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
        assert won == heard == [outcome.result()]


def test_a_callback_that_races_with_the_setting_runs_exactly_once() -> None:
    for _ in range(200):
        outcome: Outcome[int] = Outcome()
        heard: list[int] = []
        start = threading.Barrier(2)

        def setter(o: Outcome[int] = outcome, b: threading.Barrier = start) -> None:
            b.wait(10)
            o.set(5)

        thread = threading.Thread(target=setter)
        thread.start()
        start.wait(10)
        outcome.then(lambda o: heard.append(o.result()))  # noqa: B023
        thread.join(10)
        assert heard == [5]


def test_callbacks_run_in_order_and_see_the_outcome() -> None:
    outcome: Outcome[str] = Outcome()
    heard: list[str] = []
    outcome.then(lambda o: heard.append("first " + o.result()))
    outcome.then(lambda o: heard.append("second " + o.result()))
    outcome.set("v")
    outcome.then(lambda o: heard.append("late " + o.result()))
    assert heard == ["first v", "second v", "late v"]


def test_a_callback_may_use_the_outcome_freely() -> None:
    """No lock of ours is held while it runs."""
    outcome: Outcome[int] = Outcome()
    heard: list[object] = []

    def callback(o: Outcome[int]) -> None:
        o.then(lambda p: heard.append(p.wait(1)))
        heard.append(o.set(2))

    outcome.then(callback)
    outcome.set(1)
    assert heard == [1, False]


def test_a_callback_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    outcome: Outcome[int] = Outcome()
    heard: list[int] = []

    def bad(o: Outcome[int]) -> None:
        raise ZeroDivisionError("in the callback")

    outcome.then(bad)
    outcome.then(lambda o: heard.append(o.result()))
    with caplog.at_level(logging.ERROR):
        assert outcome.set(3)
        outcome.then(bad)
    assert heard == [3]
    assert [r.exc_info is not None for r in caplog.records] == [True, True]


def test_an_error_that_was_raised_does_not_keep_the_outcome_alive() -> None:
    """The traceback holds the frames of ``wait``; those must not hold the outcome, or only gc frees it."""
    gc.disable()
    try:
        outcome: Outcome[Value] = Outcome()
        error = Failure("x")
        watched = weakref.ref(error)
        outcome.fail(error)
        try:
            outcome.wait(1)
        except Failure:
            pass
        del outcome, error
        assert watched() is None
    finally:
        gc.enable()


def test_a_value_goes_with_its_outcome() -> None:
    outcome: Outcome[Value] = Outcome()
    value = Value()
    watched = weakref.ref(value)
    outcome.set(value)
    outcome.wait(1)
    del value, outcome
    assert watched() is None


def test_ctrl_c_interrupts_a_wait_and_harms_nobody() -> None:
    """DESIGN 16.10: torch's own future does not see it."""
    outcome: Outcome[int] = Outcome()
    interrupted = threading.Event()
    main = threading.get_ident()

    def once(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def poke() -> None:
        # More than once: a signal that comes just before the wait begins is seen only at its end.
        while not interrupted.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, once)
    poker = threading.Thread(target=poke)
    poker.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            outcome.wait(30)
    finally:
        interrupted.set()
        poker.join()
        signal.signal(signal.SIGINT, before)
    outcome.set(1)
    assert outcome.wait(1) == 1


def test_its_repr_tells_the_state() -> None:
    outcome: Outcome[int] = Outcome()
    assert repr(outcome) == "<Outcome pending>"
    outcome.set(3)
    assert repr(outcome) == "<Outcome int>"
    failed: Outcome[int] = Outcome()
    failed.fail(ValueError("v"))
    assert repr(failed) == "<Outcome ValueError('v')>"
