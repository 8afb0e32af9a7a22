"""Sums of gradients in a fixed order, whichever of them arrives first.

Several threads may run groups of one pass, so gradients to be added arrive in any order, and floating-point
addition is not associative. So each has a *place*, and the sum is a binary tree over the places (pairwise
summation; Higham, "The accuracy of floating point summation", 1993). Two halves of a tree are added as soon
as both are complete: if gradients arrive in order, or in reverse order, about log2(n) of n are held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Place = tuple[tuple[int, ...], int]
"""A tree, and the number of a gradient in it. The trees of a sum are added in order."""

OF_ENTRIES, OF_GROUPS = (0,), (1,)
"""The trees of what enters the local graph, and of what groups produce."""


def added(present: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, with their history, if any, in whichever mode the thread is.

    Torch adds sparse to dense tensors, but not dense to sparse ones.
    """
    if present.requires_grad or gradient.requires_grad:
        with torch.enable_grad():
            return _added(present, gradient)
    return _added(present, gradient)


def _added(present: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if present.layout is not torch.strided and gradient.layout is torch.strided:
        return gradient + present
    return present + gradient


class OrderedSum(dict[tuple[tuple[int, ...], int, int], torch.Tensor]):
    """The sum of gradients, each added once with a place of its own. Not thread-safe.

    Holds complete subtrees by tree, height and number among those of that height; neither half of a complete
    subtree is kept.
    """

    __slots__ = ()

    def add(
        self, place: Place, gradient: torch.Tensor, held: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Add ``gradient``, which nothing else may change as long as it is held.

        Args:
            place: where in the sum.
            gradient: what to add.
            held: called if ``gradient`` is to be held; returns what is held instead.

        Returns:
            The neighbour that it was added to at once, which is not held any more; None if that is not here.
        """
        tree, number = place
        neighbour = sibling = self.pop((tree, 0, number ^ 1), None) if self else None
        if sibling is None:
            self[tree, 0, number] = gradient if held is None else held(gradient)
            return None
        height = 0
        while sibling is not None:
            gradient = added(sibling, gradient) if number & 1 else added(gradient, sibling)
            number >>= 1
            height += 1
            sibling = self.pop((tree, height, number ^ 1), None)
        self[tree, height, number] = gradient
        return neighbour

    def total(self) -> torch.Tensor | None:
        """Return the sum so far; None if nothing was added."""
        if len(self) == 1:
            return next(iter(self.values()))
        total: torch.Tensor | None = None
        for key in sorted(self, key=_first):
            total = self[key] if total is None else added(total, self[key])
        return total


def _first(key: tuple[tuple[int, ...], int, int]) -> tuple[tuple[int, ...], int]:
    """Return the tree of a subtree, and its first leaf."""
    tree, height, number = key
    return tree, number << height


class SumOfCalls:
    """What checkpointed calls add to the gradient of one leaf, in any order: a sum of a sum for each.

    Each call is computed again in a pass of its own, an *inner* one, which may add several gradients.

    Args:
        of: the pass that leads through the calls.
        before: the sum of the passes before it.
    """

    __slots__ = ("_before", "_inner", "_total", "of")

    def __init__(self, of: int, before: torch.Tensor | None = None) -> None:
        self.of = of
        self._before = before
        self._total = OrderedSum()
        self._inner: dict[int, tuple[Place, OrderedSum]] = {}

    def of_call(self, inner_pass: int, call: Place) -> OrderedSum:
        """Return the sum of an inner pass; ``call`` is the place of the call that it computes again."""
        return self._inner.setdefault(inner_pass, (call, OrderedSum()))[1]

    def close(self, inner_pass: int) -> None:
        """Add the sum of an inner pass to those before it: it has ended."""
        call, part = self._inner.pop(inner_pass, (None, None))
        if call is not None and part is not None and (found := part.total()) is not None:
            self._total.add(call, found)

    def total(self) -> torch.Tensor | None:
        """Return the sum so far; None if nothing was added."""
        for inner_pass in list(self._inner):
            self.close(inner_pass)
        total = self._total.total()
        if self._before is None or total is None:
            return self._before if total is None else total
        return added(self._before, total)
