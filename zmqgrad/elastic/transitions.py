"""What each action changes in the shared state. Pure; the functions modify the state that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmqgrad.elastic.operators import Action, num_free
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState


def apply(action: Action, state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Apply ``action`` of ``node`` to ``state``.

    Raises:
        KeyError: if ``action`` changes nothing (SYNC, FINISH and the errors).
    """
    _CHANGES[action](state, node, settings)


def keep_alive(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Give ``node`` a heartbeat that no node had before."""
    state.heartbeats += 1
    state.last_heartbeats[node] = state.heartbeats


def add_to_participants(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Begins the last call with ``min_nodes`` participants, and completes the round with ``max_nodes``."""
    _discard(state.wait_list, node)
    state.participants[node] = 0  # ranks are assigned on completion
    keep_alive(state, node, settings)
    if len(state.participants) == settings.min_nodes:
        state.last_calls += 1
        state.deadline = state.last_calls
    if len(state.participants) == settings.max_nodes:
        mark_complete(state, node, settings)


def add_to_wait_list(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Let ``node`` be the last in line for the next round."""
    state.wait_list.append(node)
    keep_alive(state, node, settings)


def move_to_wait_list(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Let ``node`` leave the complete round, and be the first in line for the next one."""
    remove(state, [node], settings)
    state.wait_list.insert(0, node)
    keep_alive(state, node, settings)


def _discard(nodes: list[NodeDesc], node: NodeDesc) -> None:
    if node in nodes:
        nodes.remove(node)


def remove_node(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Remove ``node``, which left."""
    remove(state, [node], settings)


def remove(state: RendezvousState, nodes: Iterable[NodeDesc], settings: RendezvousSettings) -> None:
    """Remove ``nodes``, which left or died.

    The next round opens when the last participant of a complete round has left. A last call ends when too few
    participants remain.
    """
    left = False
    for node in nodes:
        state.last_heartbeats.pop(node, None)
        _discard(state.wait_list, node)
        left |= state.participants.pop(node, None) is not None
    if not left:
        return
    if state.complete:
        if not state.participants:
            state.complete = False
            state.round += 1
    elif len(state.participants) < settings.min_nodes:
        state.deadline = None


def mark_complete(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Complete the round, and assign the ranks."""
    state.complete = True
    state.deadline = None
    state.participants = assign_ranks(state.participants, state.completed_ranks)
    state.completed_ranks = dict(state.participants)
    state.store_address = ""


def mark_closed(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Close the rendezvous for good."""
    state.closed = True


def mark_retired(state: RendezvousState, node: NodeDesc, settings: RendezvousSettings) -> None:
    """Tell nodes that come later that the state is not served any more."""
    state.retired = True


def num_admissible(state: RendezvousState, settings: RendezvousSettings) -> int:
    """How many waiting nodes another round could admit. Spares do not count: they would exclude others."""
    return min(len(state.wait_list), num_free(state, settings))


def assign_ranks(nodes: Iterable[NodeDesc], previous: dict[NodeDesc, int]) -> dict[NodeDesc, int]:
    """Assign the ranks 0 to n - 1.

    A node keeps its previous rank if that is below n. The ranks that are left go to nodes without a previous
    rank first, then to those whose rank is too high now; each group in sorted order.
    """
    nodes = sorted(nodes)
    kept = {node: previous[node] for node in nodes if previous.get(node, len(nodes)) < len(nodes)}
    free = sorted(set(range(len(nodes))) - set(kept.values()))
    others = sorted((node for node in nodes if node not in kept), key=lambda n: (previous.get(n, -1), n))
    return kept | dict(zip(others, free, strict=True))


_CHANGES: dict[Action, Callable[[RendezvousState, NodeDesc, RendezvousSettings], None]] = {
    Action.KEEP_ALIVE: keep_alive,
    Action.ADD_TO_PARTICIPANTS: add_to_participants,
    Action.ADD_TO_WAIT_LIST: add_to_wait_list,
    Action.MOVE_TO_WAIT_LIST: move_to_wait_list,
    Action.REMOVE_FROM_PARTICIPANTS: remove_node,
    Action.REMOVE_FROM_WAIT_LIST: remove_node,
    Action.MARK_RENDEZVOUS_COMPLETE: mark_complete,
    Action.MARK_RENDEZVOUS_CLOSED: mark_closed,
    Action.MARK_RETIRED: mark_retired,
}
