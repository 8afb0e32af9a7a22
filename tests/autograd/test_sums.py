"""Sums in a fixed order: equal bits in any order of arrival, and few gradients held if that is in order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqgrad.autograd.graph.sums import OrderedSum, Place


def value(place: Place) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(97 * place[0] + place[1]))


PLACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40)), unique=True, min_size=1, max_size=40)


@given(PLACES)
def test_the_order_of_arrival_does_not_matter(places: list[Place]) -> None:
    found = set()
    for order in (places, sorted(places), sorted(places, reverse=True)):
        total = OrderedSum()
        for place in order:
            total.add(place, value(place))
        result = total.total()
        assert result is not None
        torch.testing.assert_close(result, torch.stack([value(p) for p in places]).sum(0))
        found.add(tuple(result.tolist()))
    assert len(found) == 1


def test_gradients_in_order_or_in_reverse_are_added_soon() -> None:
    for order in (range(64), reversed(range(64))):
        total, held = OrderedSum(), 0
        for number in order:
            total.add((0, number), value((0, number)))
            held = max(held, len(total))
        assert held <= 6
        assert len(total) == 1


def test_only_a_gradient_without_its_neighbour_is_held() -> None:
    tree, other = (0,), (1,)
    total, held = OrderedSum(), list[torch.Tensor]()

    def hold(gradient: torch.Tensor) -> torch.Tensor:
        held.append(gradient)
        return gradient.clone()

    parts = [torch.tensor([value]) for value in (2.0, 3.0, 4.0)]
    assert total.total() is None
    assert total.add((tree, 2), parts[0], hold) is None
    assert total.add((other, 3), parts[1], hold) is None
    neighbour = total.add((tree, 3), parts[2], hold)
    assert neighbour is not None
    assert neighbour.tolist() == [2]
    assert neighbour is not parts[0]
    assert held == parts[:2]
    result = total.total()
    assert result is not None
    assert result.tolist() == [9]
