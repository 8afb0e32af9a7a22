"""The tally: reports in any order, once or twice, end the pass exactly when all is handled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.passes.tally import ROOTS, Tally
from zmqgrad.wire.messages import StallReport

QUIET = StallReport(0, 0)


@given(st.lists(st.integers(0, 10**6), max_size=30), st.randoms(use_true_random=False), st.booleans())
def test_any_order_of_reports_ends_with_the_last_one(
    parents: list[int], shuffle: random.Random, twice: bool
) -> None:
    """Request i + 1 was set off by an earlier one, as ``parents`` say: a tree."""
    children: dict[int, list[int]] = {n: [] for n in range(len(parents) + 1)}
    for i, parent in enumerate(parents):
        children[parent % (i + 1)].append(i + 1)
    order = list(children)
    shuffle.shuffle(order)
    tally = Tally(root=0)
    for i, request in enumerate(order):
        assert not tally.finished.done()
        tally.handled([request], [(0, [child]) for child in children[request]], QUIET)
        if twice and i + 1 < len(order):
            tally.handled([request], [(0, [child]) for child in children[request]], QUIET)
    assert tally.finished.done()
    assert tally.under_way() == {}


def test_the_first_error_counts_and_does_not_end_the_pass() -> None:
    tally = Tally(root=0)
    first = ValueError("first")
    tally.handled([7], [], QUIET, first)
    tally.handled([ROOTS], [(1, [7]), (2, [8])], QUIET, ValueError("second"))
    assert tally.error() is first
    assert tally.under_way() == {8: 2}
    tally.handled([8], [], QUIET)
    assert tally.finished.done()


def test_a_lost_worker_ends_the_pass_if_something_is_under_way_there() -> None:
    tally = Tally(root=0)
    tally.lose(5, ConnectionError("5 is gone"))
    tally.handled([ROOTS], [(1, [7])], QUIET)
    assert not tally.finished.done()
    tally.lose(1, ConnectionError("1 is gone"))
    assert tally.finished.done()
    assert str(tally.error()) == "1 is gone"


def test_a_lost_worker_that_others_have_set_something_off_at_ends_the_pass() -> None:
    tally = Tally(root=0)
    tally.handled([ROOTS], [(1, [7])], QUIET)
    tally.lose(5, ConnectionError("gone"))
    assert not tally.finished.done()
    tally.handled([7], [(5, [8])], QUIET)
    assert tally.finished.done()
    assert isinstance(tally.error(), ConnectionError)


def test_a_worker_may_be_lost_once_its_part_is_done() -> None:
    tally = Tally(root=0)
    tally.handled([8], [], QUIET)
    tally.lose(5, ConnectionError("gone"))
    tally.handled([ROOTS], [(5, [8])], QUIET)
    assert tally.finished.done()
    assert tally.error() is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_the_reports_of_a_worker_the_latest_counts(order: tuple[int, int]) -> None:
    tally = Tally(root=0)
    tally.handled([ROOTS], [(3, [1, 2])], QUIET)
    for tick in order:
        tally.handled([tick], [], StallReport(3, tick, tick == 1))
    assert tally.waiting() == set()


def test_a_tally_that_has_ended_goes_on_with_what_is_expected() -> None:
    tally = Tally(root=0)
    tally.handled([ROOTS], [], StallReport(0, 1, True))
    assert tally.finished.done()
    assert tally.waiting() == {0}
    tally.expect({9: 0})
    assert not tally.finished.done()
    tally.handled([9], [], StallReport(0, 2))
    assert tally.finished.done()
    assert tally.waiting() == set()


def test_nothing_is_expected_of_a_pass_that_failed() -> None:
    tally = Tally(root=0)
    tally.lose(0, ConnectionError("gone"))
    tally.expect({9: 0})
    assert tally.finished.done()
