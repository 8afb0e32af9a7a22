"""Where torch's engine may be trusted to stop. Pure: numbers in, numbers out.

The engine is told at which edges to hand back what arrives, and does not run the nodes there, unless such a
node leads to another of these edges. So a border beyond which another target of the same group lies would be
run, before its time and on a partial sum. Take ``x = w * w``, sent away and also used here with ``w`` in one
sum: from that sum one reaches ``w``, and also ``x``, through which one reaches ``w`` again.

Such groups are rare, and are run node by node instead (:mod:`~zmqgrad.autograd.graph.single`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqgrad.autograd.graph.plan import Edge, Graph


def runs_through(graph: Graph, outgoing: Sequence[Edge]) -> bool:
    """Is one of the targets of ``outgoing`` reached through another one?"""
    targets = {node for node, _ in outgoing}
    seen: set[int] = set()
    stack = [following for target in targets for following, _ in graph.following[target]]
    while stack:
        node = stack.pop()
        if node in targets:
            return True
        if node not in seen:
            seen.add(node)
            stack += [following for following, _ in graph.following[node]]
    return False
