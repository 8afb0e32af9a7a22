"""The detector: reports in any order, once or twice, end the pass exactly when all is handled."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.engine.termination import ROOTS, TerminationDetector
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
    detector = TerminationDetector(root=0)
    for i, request in enumerate(order):
        assert not detector.finished.done()
        detector.handled([request], [(0, [child]) for child in children[request]], QUIET)
        if twice and i + 1 < len(order):
            detector.handled([request], [(0, [child]) for child in children[request]], QUIET)
    assert detector.finished.done()
    assert detector.outstanding() == {}


def test_the_first_error_ends_the_pass_whatever_is_outstanding() -> None:
    failed: list[str] = []
    detector = TerminationDetector(root=0, on_failed=lambda: failed.append("failed"))
    first = ValueError("first")
    detector.handled([ROOTS], [(1, [7]), (2, [8])], QUIET)
    assert not detector.finished.done()
    detector.handled([7], [], QUIET, first)
    assert detector.finished.done()
    detector.handled([8], [], QUIET, ValueError("second"))
    assert detector.error() is first
    assert failed == ["failed"]


def test_a_lost_worker_ends_the_pass_if_a_request_is_outstanding_there() -> None:
    detector = TerminationDetector(root=0)
    detector.lose(5, ConnectionError("5 is gone"))
    detector.handled([ROOTS], [(1, [7])], QUIET)
    assert not detector.finished.done()
    detector.lose(1, ConnectionError("1 is gone"))
    assert detector.finished.done()
    assert str(detector.error()) == "1 is gone"


def test_a_lost_worker_that_others_have_set_something_off_at_ends_the_pass() -> None:
    detector = TerminationDetector(root=0)
    detector.handled([ROOTS], [(1, [7])], QUIET)
    detector.lose(5, ConnectionError("gone"))
    assert not detector.finished.done()
    detector.handled([7], [(5, [8])], QUIET)
    assert detector.finished.done()
    assert isinstance(detector.error(), ConnectionError)


@pytest.mark.parametrize("reported_first", [True, False])
def test_what_a_lost_worker_has_sent_to_another_ends_the_pass(reported_first: bool) -> None:
    """It may not have arrived, and whoever should have received it knows nothing of it."""
    detector = TerminationDetector(root=0)
    detector.handled([ROOTS], [(1, [7])], QUIET)
    if reported_first:
        detector.handled([7], [(2, [8])], StallReport(1, 0))
    detector.lose(1, ConnectionError("1 is gone"))
    if not reported_first:
        detector.handled([7], [(2, [8])], StallReport(1, 0))
    assert detector.finished.done()
    assert str(detector.error()) == "1 is gone"


@pytest.mark.parametrize("has_arrived", [True, False])
def test_what_a_lost_worker_has_sent_to_the_coordinator_has_arrived_or_ends_the_pass(
    has_arrived: bool,
) -> None:
    detector = TerminationDetector(root=0)
    detector.handled([ROOTS], [(1, [7])], QUIET)
    if has_arrived:
        detector.arrived([8])
    detector.handled([7], [(0, [8])], StallReport(1, 0))
    detector.lose(1, ConnectionError("1 is gone"))
    assert detector.finished.done() is not has_arrived
    detector.handled([8], [], QUIET)
    assert detector.finished.done()
    assert (detector.error() is None) is has_arrived


def test_a_worker_may_be_lost_once_its_part_is_done() -> None:
    detector = TerminationDetector(root=0)
    detector.handled([8], [], QUIET)
    detector.lose(5, ConnectionError("gone"))
    detector.handled([ROOTS], [(5, [8])], QUIET)
    assert detector.finished.done()
    assert detector.error() is None


@pytest.mark.parametrize("announced_first", [True, False])
def test_a_request_whose_receiver_was_lost_by_its_sender_ends_the_pass(announced_first: bool) -> None:
    detector = TerminationDetector(root=0)
    steps = [
        lambda: detector.handled([ROOTS], [(5, [8])], QUIET),
        lambda: detector.lose_requests([7, 8], ConnectionError("gone")),
    ]
    for step in steps if announced_first else steps[::-1]:
        assert not detector.finished.done()
        step()
    assert detector.finished.done()
    assert isinstance(detector.error(), ConnectionError)


@pytest.mark.parametrize("announced_first", [True, False])
def test_a_request_that_was_handled_may_be_reported_as_lost(announced_first: bool) -> None:
    detector = TerminationDetector(root=0)
    steps = [
        lambda: detector.handled([ROOTS], [(5, [8])], QUIET),
        lambda: detector.handled([8], [], QUIET),
    ]
    for step in steps if announced_first else steps[::-1]:
        step()
        assert detector.finished.done() is (step is steps[1 if announced_first else 0])
        if step is steps[1]:
            detector.lose_requests([8], ConnectionError("gone"))
    assert detector.finished.done()
    assert detector.error() is None


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_latest_report_of_a_worker_counts(order: tuple[int, int]) -> None:
    detector = TerminationDetector(root=0)
    detector.handled([ROOTS], [(3, [1, 2])], QUIET)
    for tick in order:
        detector.handled([tick], [], StallReport(3, tick, tick == 1))
    assert detector.waiting() == set()


def test_a_finished_detector_continues_with_expected_requests() -> None:
    detector = TerminationDetector(root=0)
    detector.handled([ROOTS], [], StallReport(0, 1, True))
    assert detector.finished.done()
    assert detector.waiting() == {0}
    detector.expect({9: 0})
    assert not detector.finished.done()
    detector.handled([9], [], StallReport(0, 2))
    assert detector.finished.done()
    assert detector.waiting() == set()


def test_a_failed_pass_expects_nothing() -> None:
    detector = TerminationDetector(root=0)
    detector.lose(0, ConnectionError("gone"))
    detector.expect({9: 0})
    assert detector.finished.done()
