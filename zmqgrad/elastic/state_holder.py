"""A node's copy of the shared state, synchronised with the backend."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from typing import Any

from zmqgrad.elastic.observer import Observer
from zmqgrad.elastic.operators import Context
from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState, decode, encode
from zmqgrad.elastic.transitions import remove
from zmqgrad.errors import RendezvousStateError
from zmqgrad.runtime.clock import MONOTONIC, Clock

logger = logging.getLogger(__name__)

Token = Any
"""Fencing token: identifies the state that was read. Opaque outside of its backend."""


class RendezvousBackend(ABC):
    """Where the state is kept. Any number of nodes use it at the same time."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the kind of backend."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None if there is no state yet.

        Raises:
            RendezvousConnectionError: if the backend cannot be reached.
            RendezvousStateError: if what is there is not a state.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        """Set the state if it is still the one that ``token`` was returned with.

        Args:
            state: the new state.
            token: of the state that was read before; None: there was none.
            announce: end the waits of :meth:`wait_for_change`. Heartbeats end none: nodes judge them at their
                own pace, so that the traffic of n nodes does not grow with n * n.

        Returns:
            The state after the call, its token, and whether it is the new one. None if the backend holds no
            state, because it was lost.

        Raises:
            RendezvousConnectionError, RendezvousStateError: as :meth:`get_state`.
        """

    @abstractmethod
    def wait_for_change(self, token: Token, seconds: float) -> bool:
        """Wait until the state of ``token`` has changed, except for heartbeats, at most ``seconds``.

        Returns:
            Whether it may have. A change may be missed: look from time to time.
        """

    @property
    def cache_seconds(self) -> float:
        """How old a state may be that a node uses without reading it again."""
        return 1.0

    @property
    def is_lost(self) -> bool:
        """Whether it is known that the backend will not reply any more."""
        return False

    @property
    def is_host(self) -> bool:
        """Whether other nodes lose the state when this backend is closed."""
        return False

    def admit_newcomers(self, admit: bool) -> None:  # noqa: B027  # of a backend that no node serves
        """On its host: whether nodes are served that are not connected yet.

        Args:
            admit: False: they wait for the next backend there, or until this one admits them again.
        """

    def close(self, in_use: bool = False) -> None:  # noqa: B027  # without connections nothing is to do
        """Disconnect. Idempotent.

        Args:
            in_use: other nodes need the state that this process may serve.
        """


class StateHolder:
    """The state as one node knows it.

    Args:
        node: this node.
        backend: where the state is shared.
        settings: of the rendezvous.
        clock: of this node.

    Attributes:
        state: the copy.
        synced: when the backend last replied; None: it never has.
        renewed: when this node last began to write a new heartbeat that was accepted.
    """

    def __init__(
        self,
        node: NodeDesc,
        backend: RendezvousBackend,
        settings: RendezvousSettings,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.state = RendezvousState()
        self._node = node
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._observer = Observer()
        self._token: Token = None
        self._dirty = False
        self._announce = False  # the local changes are not only a heartbeat
        self.synced: float | None = None
        self._dead: list[NodeDesc] = []
        self._heartbeat = 0  # the last one of this node that was seen in the backend
        self.renewed = -math.inf

    def context(self) -> Context:
        """What an operator may know."""
        now = self._clock.now()
        return Context(
            self._node,
            self.state,
            self._settings,
            now,
            self._observer.heartbeat_age(self._node, now),
            self._observer.last_call_age(now),
        )

    def mark_dirty(self, announce: bool = True) -> None:
        """The state was changed here: the next :meth:`sync` tries to write it.

        Args:
            announce: the change is not only a heartbeat.

        The attempt fails if another node has written since, or the backend does not reply; the change is then
        lost, and the operator decides again.
        """
        self._dirty = True
        self._announce |= announce

    def sync(self, cache_seconds: float = 0.0) -> bool | None:
        """Write the state if it is dirty, otherwise read it; then remove dead nodes from the local copy.

        Args:
            cache_seconds: how long a state that was read or written is not read again.

        Returns:
            Whether the local changes were written; None if there were none.

        Raises:
            RendezvousConnectionError: if the backend cannot be reached.
            RendezvousStateError: if the state is malformed, was lost, or belongs to a job of other settings.
        """
        has_set: bool | None = None
        began = self._clock.now()
        if self._dirty:
            # If the attempt fails, it may have written all the same, and other nodes count from now. Writing
            # again later would succeed, and renew the lease of this node for longer than they agree to.
            self._dirty = False
            announce, self._announce = self._announce or bool(self._dead), False
            self.state.settings = self._settings.agreement
            self.state.creator = self.state.creator or str(self._node)
            written = self._backend.set_state(encode(self.state), self._token, announce)
            found = None if written is None else written[:2]
            has_set = written is not None and written[2]
        elif self.is_fresh(cache_seconds):
            return None
        else:
            found = self._backend.get_state()
        state, token = (RendezvousState(), None) if found is None else (decode(found[0]), found[1])
        if self._token is not None and state.creator != self.state.creator:
            self.renewed = (
                -math.inf
            )  # nodes without a token may form, or have formed, a second group of the job
            begun = f", and {state.creator} has begun another" if state.creator else ""
            raise RendezvousStateError(
                f"the backend has lost the state of the rendezvous {self._settings.run_id!r}{begun}"
            )
        self.state, self._token = state, token
        if has_set and self._dead:
            logger.info(
                "%s: removed %s, which had no heartbeat",
                self._settings.run_id,
                ", ".join(map(str, self._dead)),
            )
        heartbeat = self.state.last_heartbeats.get(self._node, 0)
        if has_set and heartbeat != self._heartbeat:
            self.renewed = began
        self._heartbeat = heartbeat  # also one whose reply was lost: it renews nothing later
        self._dirty = False
        self.synced = self._clock.now()
        self._sanitize(self.synced)
        self._check_settings()
        return has_set

    def _check_settings(self) -> None:
        """Refuse to share the state with nodes of other settings. A job without nodes may change them."""
        found, own = self.state.settings, self._settings.agreement
        nodes = {*self.state.participants, *self.state.wait_list}
        if found and found != own and nodes:
            raise RendezvousStateError(
                f"the rendezvous {self._settings.run_id!r} is in use with other settings: {found} at "
                f"{', '.join(map(str, sorted(nodes)))}; {own} here. Give each job an id of its own, and all "
                f"nodes of a job the same settings. Nodes that have died count for "
                f"{self._settings.expiry_seconds:g} s"
            )

    def is_fresh(self, seconds: float) -> bool:
        """Whether the state was read or written less than ``seconds`` ago."""
        return self.synced is not None and self._clock.now() - self.synced < seconds

    def wait_for_change(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for another node to change the state. Returns whether it may have."""
        return self._backend.wait_for_change(self._token, seconds)

    def next_expiry(self) -> float:
        """Seconds until the first heartbeat expires unless it is renewed; infinite without any."""
        return self._observer.next_expiry(self._settings, self._clock.now())

    def remove_ended(self, node: NodeDesc, number: int) -> None:
        """Remove ``node``, which has ended in round ``number``, from the shared state.

        Raises:
            RendezvousConnectionError, RendezvousStateError: as :meth:`sync`.
        """
        self.sync()
        if self.state.round != number:
            return  # it may have joined another round since, and only left that one
        self._observer.declare_dead(node)
        self._sanitize(self._clock.now())
        while node in self._dead:  # until it is written: another node may be faster
            self.mark_dirty()
            self.sync()

    def _sanitize(self, now: float) -> None:
        """Remove dead nodes from the local copy. They leave the shared state with the next change."""
        self._observer.observe(self.state, now)
        self._dead = [node for node in self._observer.dead(self._settings, now) if node != self._node]
        if self._dead:
            remove(self.state, self._dead, self._settings)
