"""A backward pass as one graph task, to whoever asks torch.

A pass on one worker is several calls of torch's engine, each of which torch calls a graph task. Checkpoints
recompute once for each id of a graph task; hooks of several tensors collect gradients by that id and ask
which nodes the task will run; queued callbacks run at its end. They all ask Python functions of torch, which
report the pass instead where one runs (:func:`~zmqgrad.autograd.torch_internals.as_graph_task`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.graph.plan import Plan
from zmqgrad.autograd.send_recv import EdgeOrLeaf
from zmqgrad.autograd.torch_internals import as_graph_task

_ids = itertools.count(1 << 40)
"""Far from torch's own, which count from 0."""


class PassTask:
    """The graph task of one pass on one worker.

    Args:
        starts: where the gradients of each entry enter.
        plan: the plan of the pass: which entries have been dropped.
    """

    def __init__(self, starts: Sequence[Sequence[EdgeOrLeaf]], plan: Plan) -> None:
        self.id = next(_ids)
        self._starts = starts
        self._plan = plan
        self._absent: set[tuple[int, int]] = set()
        self._known: tuple[tuple[int, int], set[Any]] | None = None
        self.callbacks: deque[Callable[[], None]] = deque()
        """What is to be called at the end of the pass."""
        self.replicas_due: list[Any] = []
        """The DDP replicas that must average once all leaves have their gradients."""

    def note_absent(self, entry: int, index: int) -> None:
        """Note that the message for ``entry``, which is about to arrive, has no gradient at this start."""
        self._absent.add((entry, index))

    def reaches(self, node: Any) -> bool:
        """Return whether ``node`` may get a gradient in the pass."""
        dropped = self._plan.dropped
        now = len(dropped), len(self._absent)  # both only grow
        if self._known is None or self._known[0] != now:
            possible = [entry for entry in range(len(self._starts)) if entry not in dropped]
            self._known = now, self._reached(possible)
        return node in self._known[1]

    def _reached(self, entries: Iterable[int]) -> set[Any]:
        """Return the nodes that ``entries`` lead to, with leaves and recvs."""
        todo: list[Any] = [
            start.node
            for entry in entries
            for index, start in enumerate(self._starts[entry])
            if isinstance(start, GradientEdge) and (entry, index) not in self._absent
        ]
        found: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is not None and node not in found:
                found.add(node)
                todo += [following for following, _ in node.next_functions]
        return found

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of the pass."""
        self.callbacks.append(callback)

    def run_callbacks(self) -> None:
        """Call the queued callbacks, and those that they queue."""
        with as_graph_task(self):
            while self.callbacks:
                self.callbacks.popleft()()
