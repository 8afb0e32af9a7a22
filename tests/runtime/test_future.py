"""Outcomes: set once, seen by all."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref

import pytest

from zmqgrad.runtime.future import Promise


class Value:
    """Something that a weak reference can watch."""


class Failure(Exception):
    """An error that a weak reference can watch."""


def test_the_first_setting_counts() -> None:
    outcome: Promise[int] = Promise()
    assert not outcome.done()
    assert outcome.set_result(1)
    assert not outcome.set_result(2)
    assert not outcome.set_exception(ValueError("late"))
    assert outcome.wait() == outcome.result() == 1
    assert outcome.exception() is None


def test_none_is_a_value() -> None:
    outcome: Promise[None] = Promise()
    outcome.set_result(None)
    assert outcome.done()
    assert outcome.wait(0) is None


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    outcome: Promise[int] = Promise()
    error = KeyError("k")
    assert outcome.set_exception(error)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            outcome.wait(1)
        assert caught.value is error
    assert outcome.exception() is error


@pytest.mark.open_outcomes
@pytest.mark.parametrize("timeout", [0, 0.01, -1, -0.5])
def test_a_wait_ends_with_its_timeout(timeout: float) -> None:
    outcome: Promise[int] = Promise()
    assert not outcome.wait_done(timeout)
    with pytest.raises(TimeoutError, match=str(timeout)):
        outcome.wait(timeout)
    with pytest.raises(RuntimeError, match="not set yet"):
        outcome.result()


def test_an_endless_timeout_is_taken() -> None:
    outcome: Promise[int] = Promise()
    waiter = threading.Thread(target=outcome.wait_done, args=(float("inf"),))
    waiter.start()
    outcome.set_result(1)
    waiter.join(10)
    assert not waiter.is_alive()


def test_all_waiters_wake() -> None:
    outcome: Promise[int] = Promise()
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(outcome.wait(30))) for _ in range(20)]
    for t in threads:
        t.start()
    outcome.set_result(7)
    for t in threads:
        t.join(30)
    assert got == [7] * 20


def test_concurrent_setters_agree_on_one_result() -> None:
    for _ in range(50):
        outcome: Promise[int] = Promise()
        heard: list[int] = []
        outcome.add_done_callback(lambda o: heard.append(o.result()))  # noqa: B023
        start = threading.Barrier(4)
        won: list[int] = []

        def set_it(
            i: int, o: Promise[int] = outcome, b: threading.Barrier = start, w: list[int] = won
        ) -> None:
            b.wait(10)
            if o.set_result(i):
                w.append(i)

        threads = [threading.Thread(target=set_it, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
        assert won == heard == [outcome.result()]


def test_a_callback_that_races_with_the_setting_runs_exactly_once() -> None:
    for _ in range(200):
        outcome: Promise[int] = Promise()
        heard: list[int] = []
        start = threading.Barrier(2)

        def setter(o: Promise[int] = outcome, b: threading.Barrier = start) -> None:
            b.wait(10)
            o.set_result(5)

        thread = threading.Thread(target=setter)
        thread.start()
        start.wait(10)
        outcome.add_done_callback(lambda o: heard.append(o.result()))  # noqa: B023
        thread.join(10)
        assert heard == [5]


def test_callbacks_run_in_order_and_see_the_outcome() -> None:
    outcome: Promise[str] = Promise()
    heard: list[str] = []
    outcome.add_done_callback(lambda o: heard.append("first " + o.result()))
    outcome.add_done_callback(lambda o: heard.append("second " + o.result()))
    outcome.set_result("v")
    outcome.add_done_callback(lambda o: heard.append("late " + o.result()))
    assert heard == ["first v", "second v", "late v"]


def test_a_callback_may_use_the_outcome_freely() -> None:
    """No lock of ours is held while it runs."""
    outcome: Promise[int] = Promise()
    heard: list[object] = []

    def callback(o: Promise[int]) -> None:
        o.add_done_callback(lambda p: heard.append(p.wait(1)))
        heard.append(o.set_result(2))

    outcome.add_done_callback(callback)
    outcome.set_result(1)
    assert heard == [1, False]


def test_a_failing_callback_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    outcome: Promise[int] = Promise()
    heard: list[int] = []

    def bad(o: Promise[int]) -> None:
        raise ZeroDivisionError("in the callback")

    outcome.add_done_callback(bad)
    outcome.add_done_callback(lambda o: heard.append(o.result()))
    with caplog.at_level(logging.ERROR):
        assert outcome.set_result(3)
        outcome.add_done_callback(bad)
    assert heard == [3]
    assert [r.exc_info is not None for r in caplog.records] == [True, True]


def test_a_raised_error_does_not_keep_the_promise_alive() -> None:
    """The traceback holds the frames of ``wait``; those must not hold the outcome, or only gc frees it."""
    gc.disable()
    try:
        outcome: Promise[Value] = Promise()
        error = Failure("x")
        watched = weakref.ref(error)
        outcome.set_exception(error)
        try:
            outcome.wait(1)
        except Failure:
            pass
        del outcome, error
        assert watched() is None
    finally:
        gc.enable()


def test_a_promise_that_is_dropped_drops_its_value() -> None:
    outcome: Promise[Value] = Promise()
    value = Value()
    watched = weakref.ref(value)
    outcome.set_result(value)
    outcome.wait(1)
    del value, outcome
    assert watched() is None


def test_ctrl_c_interrupts_a_wait_and_leaves_the_promise_usable() -> None:
    """``torch.futures.Future.wait`` blocks in C++, where Ctrl-C cannot interrupt it."""
    outcome: Promise[int] = Promise()
    expected, interrupted = threading.Event(), threading.Event()
    main = threading.get_ident()

    def once(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def wait() -> None:
        expected.set()  # not before: the exception may come at once
        outcome.wait(30)

    def poke() -> None:
        expected.wait(30)
        # More than once: a signal that comes just before the wait begins is seen only at its end.
        while not interrupted.wait(0.01):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, once)
    poker = threading.Thread(target=poke)
    poker.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        interrupted.set()
        expected.set()
        poker.join()
        signal.signal(signal.SIGINT, before)
    outcome.set_result(1)
    assert outcome.wait(1) == 1


def test_repr_shows_the_state() -> None:
    outcome: Promise[int] = Promise()
    assert repr(outcome) == "<Promise pending>"
    outcome.set_result(3)
    assert repr(outcome) == "<Promise int>"
    failed: Promise[int] = Promise()
    failed.set_exception(ValueError("v"))
    assert repr(failed) == "<Promise ValueError('v')>"
