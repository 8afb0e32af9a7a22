"""Runs an operator against the shared state until it is finished."""

from __future__ import annotations

import logging

from zmqgrad.elastic.operators import Action, Operator
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc
from zmqgrad.elastic.state_holder import StateHolder
from zmqgrad.elastic.transitions import apply
from zmqgrad.errors import RendezvousClosedError, RendezvousGracefulExitError, RendezvousTimeoutError
from zmqgrad.transport import tap
from zmqgrad.transport.tap import Tracer

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 1.0
"""How long one wait for a change takes at most: dead nodes and the end of a last call cause no change."""


class OperatorExecutor:
    """Executes the operators of one node.

    Args:
        node: this node.
        holder: its copy of the state.
        settings: of the rendezvous.
    """

    def __init__(self, node: NodeDesc, holder: StateHolder, settings: RendezvousSettings) -> None:
        self._node = node
        self._holder = holder
        self._settings = settings
        self.tracer: Tracer | None = None
        self._applied: tuple[int, str, int, int] | None = None  # a step, for the tracer, until it is written
        tap.register(self)

    def identity(self) -> tap.Identity:
        """As :class:`~zmqgrad.transport.tap.Traced`."""
        # Without the run id, which the workers' traces do not have: it would make two jobs of one.
        return tap.Identity(tap.RENDEZVOUS_NODE, str(self._node))

    def run(self, operator: Operator, deadline: float) -> None:
        """Run ``operator`` until it returns FINISH.

        Args:
            operator: see :mod:`~zmqgrad.elastic.operators`.
            deadline: a time of the clock of the state holder.

        Raises:
            RendezvousClosedError: if the rendezvous is closed; RendezvousGracefulExitError, if this node
                waited for its first round.
            RendezvousTimeoutError: if the operator cannot finish by ``deadline``.
            RendezvousConnectionError, RendezvousStateError: if the backend cannot be used.
        """
        while (action := self.step(operator, deadline)) is not Action.FINISH:
            if action is Action.SYNC:
                self._holder.wait_for_change(self._wait_seconds(deadline))

    def step(self, operator: Operator, deadline: float) -> Action:
        """Synchronise, ask ``operator`` once, and apply its action to the local copy. Returns the action.

        Args:
            deadline: monotonic time after which ``operator`` gives up.

        Raises:
            RendezvousClosedError, RendezvousTimeoutError, ...: as :meth:`run`.
        """
        holder = self._holder
        applied, self._applied = self._applied, None
        if holder.sync() and applied is not None and self.tracer is not None:
            self.tracer.rendezvous_step(*applied)
        action = operator(holder.context(), deadline)
        if action is Action.ERROR_CLOSED:
            why = (
                "was retired: the process that served it has left"
                if holder.state.retired
                else "is closed, as its job has ended: give a new job another id (run_id, --rdzv-id)"
            )
            raise RendezvousClosedError(f"the rendezvous {self._settings.run_id!r} {why}")
        if action is Action.ERROR_NOT_NEEDED:
            raise RendezvousGracefulExitError(
                f"the rendezvous {self._settings.run_id!r} was closed: {self._node} was not needed"
            )
        if action is Action.ERROR_TIMEOUT:
            raise RendezvousTimeoutError(self._explain_timeout())
        if action not in (Action.FINISH, Action.SYNC):
            logger.debug("%s: %s: %s", self._settings.run_id, self._node, action.name)
            apply(action, holder.state, self._node, self._settings)
            state = holder.state
            self._applied = state.round, action.name, len(state.participants), len(state.wait_list)
            holder.mark_dirty(announce=action is not Action.KEEP_ALIVE)
        return action

    def _wait_seconds(self, deadline: float) -> float:
        """How long to wait for a change: until something is due, and not longer than a moment."""
        context = self._holder.context()
        left = deadline - context.now
        due = self._settings.keep_alive_interval - context.heartbeat_age
        if context.state.deadline is not None:
            due = min(due, self._settings.timeout.last_call - context.last_call_age)
        return max(0.0, min(MAX_WAIT_SECONDS, left, due if due > 0 else MAX_WAIT_SECONDS))

    def _explain_timeout(self) -> str:
        state, settings = self._holder.state, self._settings
        return (
            f"the rendezvous {settings.run_id!r} did not complete in time: round {state.round} has "
            f"{len(state.participants)} of {settings.min_nodes} to {settings.max_nodes} nodes"
            f"{' and is complete' if state.complete else ''}, {len(state.wait_list)} wait"
        )
