"""Offsets of clocks: honest bounds for artificial skews, drift and delays, and causality."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from zmqgrad.trace.clocks import MAX_DRIFT, OffsetEstimator

MS = 1_000_000
SECOND = 1000 * MS

Clock = Callable[[int], int]


def make_clock(rng: random.Random) -> Clock:
    """A clock up to 5 s off, whose rate differs by up to half of MAX_DRIFT and changes once."""
    offset, turn = rng.randint(-5 * SECOND, 5 * SECOND), rng.randint(0, 10 * SECOND)
    before, after = (rng.uniform(-0.45, 0.45) * MAX_DRIFT for _ in range(2))
    return lambda t: offset + t + round(before * min(t, turn) + after * max(0, t - turn))


def converse(rng: random.Random, clocks: dict[str, Clock], messages: int, seconds: int) -> list[tuple]:
    """Messages with asymmetric, sometimes long delays: (source, target, sent, received)."""
    names = sorted(clocks)
    slow = {(a, b): rng.randint(5_000, 2 * MS) for a in names for b in names}
    found = []
    for _ in range(messages):
        a, b = rng.sample(names, 2)
        at = rng.randint(0, seconds * SECOND)
        delay = slow[a, b] + (rng.randint(0, 50 * MS) if rng.random() < 0.3 else rng.randint(0, 20_000))
        found.append((a, b, clocks[a](at), clocks[b](at + delay)))
    return found


def check(seed: int) -> None:
    rng = random.Random(seed)
    clocks = {name: make_clock(rng) for name in "abcd"[: rng.randint(2, 4)]}
    estimator = OffsetEstimator()
    seconds = rng.choice((1, 10))
    messages = converse(rng, clocks, rng.randint(20, 150), seconds)
    for message in messages:
        estimator.add(*message)
    alignment = estimator.solve("a")
    assert alignment is not None
    reference = clocks[alignment.reference]
    for name in alignment.clocks():
        convert = alignment.converter(name)
        for _ in range(5):
            t = rng.randint(0, seconds * SECOND)
            error = abs(convert(clocks[name](t)) - reference(t))
            assert error <= alignment.bound(name, clocks[name](t)), (seed, name, t)
    for source, target, sent, received in messages:
        if {source, target} <= set(alignment.clocks()):
            arrived = alignment.converter(target)(received)
            left = alignment.converter(source)(sent)
            slack = alignment.bound(source, sent) + alignment.bound(target, received)
            assert arrived >= left - slack


@pytest.mark.slow
def test_the_bound_holds_in_a_thousand_random_tries() -> None:
    for seed in range(1000):
        check(seed)


@given(st.integers(min_value=1000, max_value=1 << 32))
def test_the_bound_holds(seed: int) -> None:
    check(seed)


def test_quick_messages_both_ways_give_a_tight_bound() -> None:
    estimator = OffsetEstimator()
    for i in range(100):
        at = i * 10 * MS
        estimator.add("a", "b", at, at + 5 * SECOND + 20_000)
        estimator.add("b", "a", at + 5 * SECOND + 30_000, at + 60_000)
    alignment = estimator.solve("a")
    assert alignment is not None
    assert abs(alignment.converter("b")(5 * SECOND + 500 * MS) - 500 * MS) <= 10_000
    assert alignment.bound("b", 5 * SECOND + 500 * MS) < 50_000


def test_clocks_without_a_direct_message_are_aligned_over_a_third() -> None:
    estimator = OffsetEstimator()
    for a, b, offset in (("a", "b", SECOND), ("b", "c", 2 * SECOND)):
        base = 0 if a == "a" else SECOND
        estimator.add(a, b, base + MS, base + MS + offset + 10_000)
        estimator.add(b, a, base + offset + 2 * MS, base + 2 * MS + 10_000)
    alignment = estimator.solve("a")
    assert alignment is not None
    assert abs(alignment.converter("c")(3 * SECOND + MS) - MS) <= alignment.bound("c", 3 * SECOND + MS) < MS


def test_messages_in_one_direction_have_no_bound_but_keep_their_order() -> None:
    estimator = OffsetEstimator()
    estimator.add("a", "b", 0, 7 * SECOND)
    alignment = estimator.solve("a")
    assert alignment is not None
    assert alignment.bound("b", 7 * SECOND) == float("inf")
    assert alignment.converter("b")(7 * SECOND) >= -20_000  # the drift within a bin


def test_a_clock_that_jumps_is_followed() -> None:
    estimator = OffsetEstimator()
    for i in range(200):
        at = i * 50 * MS
        ahead = 0 if i < 100 else 3600 * SECOND
        estimator.add("a", "b", at, at + ahead + 10_000)
        estimator.add("b", "a", at + ahead + 20_000, at + 30_000)
    alignment = estimator.solve("a")
    assert alignment is not None
    assert len(alignment.jumps) == 1
    convert = alignment.converter("b")
    assert abs(convert(2 * SECOND) - 2 * SECOND) < 50_000
    assert abs(convert(8 * SECOND + 3600 * SECOND) - 8 * SECOND) < 50_000


def test_no_messages_give_no_alignment() -> None:
    assert OffsetEstimator().solve("a") is None
