"""Quantiles: within the promised error of those of the sorted values."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.trace.sketch import RELATIVE_ERROR, Sketch


@given(st.lists(st.integers(1, 10**15), min_size=1), st.floats(0, 1))
def test_quantiles_are_those_of_the_sorted_values(values: list[int], q: float) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
    found = sketch.quantile(q)
    assert found is not None
    assert abs(found - exact) <= RELATIVE_ERROR * exact + 1
    assert sketch.max == max(values)
    assert sketch.count == len(values)


def test_nothing_has_no_quantiles_and_zero_is_no_error() -> None:
    sketch = Sketch()
    assert sketch.quantile(0.5) is None
    sketch.add(0)
    assert sketch.quantile(0.5) == 0
