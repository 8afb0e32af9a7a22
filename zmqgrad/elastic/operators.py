"""What a node does next: pure functions of what it knows, which return one action.

An operator is called again after each action, with the state that resulted, until it returns FINISH or an
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState

ROLLBACK_SECONDS = 5.0
"""How long after its deadline a join may take to remove its node from the state again."""


class Action(Enum):
    """What to do with the shared state, or that nothing is left to do."""

    KEEP_ALIVE = auto()
    ADD_TO_PARTICIPANTS = auto()
    ADD_TO_WAIT_LIST = auto()
    MOVE_TO_WAIT_LIST = auto()
    REMOVE_FROM_PARTICIPANTS = auto()
    REMOVE_FROM_WAIT_LIST = auto()
    MARK_RENDEZVOUS_COMPLETE = auto()
    MARK_RENDEZVOUS_CLOSED = auto()
    MARK_RETIRED = auto()
    SYNC = auto()
    """Wait until the state changes."""
    ERROR_CLOSED = auto()
    ERROR_NOT_NEEDED = auto()
    """The rendezvous was closed while the node waited for its first round."""
    ERROR_TIMEOUT = auto()
    FINISH = auto()


class Context(NamedTuple):
    """What a node knows when it decides."""

    node: NodeDesc
    state: RendezvousState
    settings: RendezvousSettings
    now: float
    """Seconds of this node's monotonic clock."""
    heartbeat_age: float
    """Seconds since this node's heartbeat changed, by this node's clock; infinite if it has none."""
    last_call_age: float
    """Seconds since this node saw the running last call begin; 0 if none is running."""

    @property
    def is_participant(self) -> bool:
        """Whether this node takes part in the current round."""
        return self.node in self.state.participants

    @property
    def must_keep_alive(self) -> bool:
        """Whether the next keep-alive of this node is due."""
        return self.heartbeat_age >= self.settings.keep_alive_interval


def num_free(state: RendezvousState, settings: RendezvousSettings) -> int:
    """For how many waiting nodes there is a place. The first in line get them."""
    return settings.max_nodes - len(state.participants)


def spares(state: RendezvousState, settings: RendezvousSettings) -> list[NodeDesc]:
    """The waiting nodes for which there is no place until a participant is lost."""
    return state.wait_list[num_free(state, settings) :]


Operator = Callable[[Context, float], Action]
"""(context, deadline) -> action. The deadline is a time of ``context.now``'s clock."""


def join(context: Context, deadline: float) -> Action:
    """Take part in the current round, or in the next if this one is complete."""
    state, settings, now = context.state, context.settings, context.now
    if state.closed and context.node in state.wait_list and context.node not in state.completed_ranks:
        return Action.ERROR_NOT_NEEDED
    if state.closed or state.retired:
        return Action.ERROR_CLOSED
    if state.complete and context.is_participant:
        return Action.FINISH
    if now > deadline:
        return _give_up(context, deadline)
    if not context.is_participant:
        line = state.wait_list
        waits = context.node in line
        position = line.index(context.node) if waits else len(line)
        if not state.complete and position < num_free(state, settings):
            return Action.ADD_TO_PARTICIPANTS
        if not waits:
            return Action.ADD_TO_WAIT_LIST
    elif (
        state.deadline is not None
        and context.last_call_age >= settings.timeout.last_call
        # Who returns from the round before is in line, lives, and may have what the others need: it is given
        # its place, however long it takes to see that the round is open.
        and not state.wait_list[: num_free(state, settings)]
    ):
        return Action.MARK_RENDEZVOUS_COMPLETE
    return Action.KEEP_ALIVE if _is_known(context) and context.must_keep_alive else Action.SYNC


def joining(operator: Operator = join) -> Operator:
    """An operator like ``operator``, for which no time passes while the node is a spare."""
    extended = -math.inf

    def wait_as_spare(context: Context, deadline: float) -> Action:
        nonlocal extended
        if context.node in spares(context.state, context.settings):
            extended = context.now + context.settings.timeout.join
        return operator(context, max(deadline, extended))

    return wait_as_spare


def _give_up(context: Context, deadline: float) -> Action:
    """Remove the node for a short time after the deadline; otherwise its heartbeat will expire."""
    if context.now <= deadline + ROLLBACK_SECONDS:
        if context.is_participant:
            return Action.REMOVE_FROM_PARTICIPANTS
        if context.node in context.state.wait_list:
            return Action.REMOVE_FROM_WAIT_LIST
    return Action.ERROR_TIMEOUT


def _is_known(context: Context) -> bool:
    return context.is_participant or context.node in context.state.wait_list


def return_to_line(context: Context, deadline: float) -> Action:
    """Leave a complete round, and be the first in line for the next one: before any spare."""
    if not (context.is_participant and context.state.complete):
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now > deadline else Action.MOVE_TO_WAIT_LIST


def exit_round(context: Context, deadline: float) -> Action:
    """Leave the round, or the wait list, for good."""
    if not _is_known(context):
        return Action.FINISH
    if context.now > deadline:
        return Action.ERROR_TIMEOUT
    return Action.REMOVE_FROM_PARTICIPANTS if context.is_participant else Action.REMOVE_FROM_WAIT_LIST


def await_departure(number: int) -> Operator:
    """An operator for a node that others need: waits until all nodes have left round ``number``."""

    def operator(context: Context, deadline: float) -> Action:
        if context.state.round != number or not context.state.participants:
            return Action.FINISH
        return Action.ERROR_TIMEOUT if context.now > deadline else Action.SYNC

    return operator


def retire(context: Context, deadline: float) -> Action:
    """Retire the state, for the process that serves it, unless other nodes use it."""
    state = context.state
    if state.closed or state.retired or {*state.participants, *state.wait_list} - {context.node}:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now > deadline else Action.MARK_RETIRED


def close(context: Context, deadline: float) -> Action:
    """Close the rendezvous."""
    if context.state.closed:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now > deadline else Action.MARK_RENDEZVOUS_CLOSED


def keep_alive(context: Context, deadline: float) -> Action:
    """Renew the heartbeat if that is due. A node that is not in the state any more has nothing to renew."""
    if not _is_known(context) or not context.must_keep_alive:
        return Action.FINISH
    return Action.ERROR_TIMEOUT if context.now > deadline else Action.KEEP_ALIVE
