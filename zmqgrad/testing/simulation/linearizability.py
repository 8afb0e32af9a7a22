"""Checks that a concurrent history is linearizable.

Herlihy and Wing, "Linearizability", 1990: each operation takes effect at one moment between its call and its
return. The search for such moments is that of Wing and Gong (1993) with the configurations that were already
tried remembered (Lowe, "Testing for linearizability", 2017): a configuration is the set of operations that
have taken effect, and the state that they lead to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

S = TypeVar("S", bound=Hashable)

MAX_CONFIGURATIONS = 500_000


@dataclass(frozen=True)
class Operation:
    """One call of a client, with the times of its call and its return.

    One that is ``unknown`` failed without a reply: it may have taken effect at any time since, or never.
    """

    client: int | str
    call: Any
    result: Any
    began: float
    ended: float
    unknown: bool = False

    def __str__(self) -> str:
        result = "no reply" if self.unknown else repr(self.result)
        return f"client {self.client}  {self.began:.6f} to {self.ended:.6f}  {self.call!r} -> {result}"


def explain(history: Sequence[Operation], initial: S, step: Callable[[S, Any], tuple[S, Any]]) -> str:
    """Returns an empty string if ``history`` is linearizable; otherwise, how far the search came.

    Args:
        history: all operations of all clients, in any order.
        initial: the state before all of them.
        step: the sequential specification: (state, call) -> (next state, result). It must not change a state.

    Raises:
        RuntimeError: if the search is too large, so that nothing is known.
    """
    operations = sorted(history, key=lambda o: o.began)
    required = sum(1 << n for n, o in enumerate(operations) if not o.unknown)
    tried = {(0, initial)}
    stack: list[tuple[int, S]] = [(0, initial)]
    best: tuple[int, S] = (0, initial)
    while stack:
        done, state = stack.pop()
        if done & required == required:
            return ""
        if (done & required).bit_count() > (best[0] & required).bit_count():
            best = done, state
        for n in _minimal(operations, done):
            after, result = step(state, operations[n].call)
            found = done | 1 << n, after
            if (operations[n].unknown or result == operations[n].result) and found not in tried:
                tried.add(found)
                stack.append(found)
        if len(tried) > MAX_CONFIGURATIONS:
            raise RuntimeError(f"the history of {len(operations)} operations takes too long to check")
    return _report(operations, *best)


def _minimal(operations: Sequence[Operation], done: int) -> list[int]:
    """The operations that may take effect next: those that were called before all others had returned."""
    first_return, candidates = math.inf, []
    for n, operation in enumerate(operations):
        if done >> n & 1:
            continue
        if operation.began > first_return:
            break
        candidates.append(n)
        if not operation.unknown:
            first_return = min(first_return, operation.ended)
    return candidates


def _report(operations: Sequence[Operation], done: int, state: object) -> str:
    count = done.bit_count()
    lines = [
        f"not linearizable: at most {count} of {len(operations)} operations fit, which lead to {state!r};"
        f" none of these can come next:"
    ]
    lines += [f"    {operations[n]}" for n in _minimal(operations, done)]
    return "\n".join([*lines, "the whole history:", *[f"    {operation}" for operation in operations]])
