"""The checker against histories of a register with known verdicts, and against a search of all orders."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.testing.simulation.linearizability import Operation, explain


def step(state: int, call: Any) -> tuple[int, Any]:
    """A register: an integer is written, None reads."""
    return (state, state) if call is None else (call, "done")


def read(result: int, began: float, ended: float) -> Operation:
    return Operation(0, None, result, began, ended)


def write(value: int, began: float, ended: float, unknown: bool = False) -> Operation:
    return Operation(1, value, "done", began, ended, unknown)


@pytest.mark.parametrize(
    ("history", "good"),
    [
        ([], True),
        ([write(1, 0, 1), read(1, 2, 3)], True),
        ([write(1, 0, 1), read(0, 2, 3)], False),
        ([write(1, 0, 3), read(0, 1, 2)], True),
        ([write(1, 0, 3), read(1, 1, 2)], True),
        ([write(1, 0, 5), read(1, 1, 2), read(0, 3, 4)], False),
        ([write(1, 0, 9), write(2, 0, 9), read(2, 1, 2), read(1, 3, 4)], True),
        ([write(1, 0, 9), write(2, 0, 9), read(2, 1, 2), read(1, 3, 4), read(2, 5, 6)], False),
        ([write(1, 0, 1, unknown=True), read(0, 2, 3), read(1, 4, 5)], True),
        ([write(1, 0, 1, unknown=True), read(0, 2, 3)], True),
        ([read(1, 0, 1), write(1, 2, 3, unknown=True)], False),
    ],
)
def test_known_histories(history: list[Operation], good: bool) -> None:
    assert (explain(history, 0, step) == "") is good


def test_the_report_names_the_operation_that_does_not_fit() -> None:
    report = explain([write(1, 0, 1), read(0, 2, 3)], 0, step)
    assert "at most 1 of 2 operations fit, which lead to 1" in report
    assert "client 0  2.000000 to 3.000000  None -> 0" in report.split("the whole history")[0]


OPERATIONS = st.builds(
    lambda call, result, began, length, unknown: Operation(
        0, call, result if call is None else "done", began, began + length, unknown and call is not None
    ),
    st.none() | st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 8),
    st.integers(1, 6),
    st.booleans(),
)


@given(st.lists(OPERATIONS, max_size=5))
def test_the_verdict_is_that_of_a_search_of_all_orders(history: list[Operation]) -> None:
    assert (explain(history, 0, step) == "") == any_order_fits(history)


def any_order_fits(history: list[Operation]) -> bool:
    """Tries every order of every subset that has the known operations."""
    known = sum(not o.unknown for o in history)
    return any(
        sum(not o.unknown for o in order) == known and in_time(order) and returns_the_results(order)
        for size in range(known, len(history) + 1)
        for order in permutations(history, size)
    )


def in_time(order: tuple[Operation, ...]) -> bool:
    return not any(
        not later.unknown and later.ended < earlier.began
        for n, earlier in enumerate(order)
        for later in order[n + 1 :]
    )


def returns_the_results(order: tuple[Operation, ...]) -> bool:
    state = 0
    for operation in order:
        state, result = step(state, operation.call)
        if not operation.unknown and result != operation.result:
            return False
    return True
