"""A rendezvous backend in one of our stores: the state is the value of a key, which the backend watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from zmqgrad.elastic.endpoint import leave_open
from zmqgrad.elastic.state_holder import RendezvousBackend, Token
from zmqgrad.errors import RendezvousConnectionError, RendezvousStateError, StoreError, StoreTimeoutError
from zmqgrad.runtime.arguments import check_instance
from zmqgrad.store import Store, TCPStore

DRAIN_SECONDS = 5.0
"""How long a server that closes waits for nodes that are connected, and read that the state is retired."""

_NO_STATE = b"\0"

_UNANNOUNCED_SECONDS = 5.0
"""How old a state may be that nodes use if no change of it was announced."""


class StoreBackend(RendezvousBackend):
    """Keeps the state in ``store``, under a key of the job.

    A second key counts the changes that are not only heartbeats; the nodes watch that one. A node that dies
    between the two writes announces nothing: the others find its change when they look next.

    The fencing token is the encoded state itself: nodes that write equal states agree.

    Args:
        store: shared by all nodes.
        run_id: identifies the job.
        owned: :meth:`close` closes ``store``, too. Otherwise that is yours to close afterwards.
        may_restart: the process that serves ``store`` may be started again with its contents. Otherwise, a
            server that is known to have ended is lost.

    Example:
        >>> backend = StoreBackend(HashStore(), "job")
        >>> backend.get_state() is None  # no node has joined
        True
        >>> backend.close()
    """

    name = "zmqgrad"

    def __init__(self, store: Store, run_id: str, *, owned: bool = False, may_restart: bool = False) -> None:
        check_instance("store", store, Store, "a store of zmqgrad.store")
        self._store = store
        self._owned = owned
        self._may_restart = may_restart
        self._lost = False
        self._key = f"zmqgrad/rendezvous/{run_id}"
        self._announcements = f"zmqgrad/announcements/{run_id}"
        self._changed = threading.Event()
        with self._errors():
            store.watch_key(self._announcements, self._on_change)

    def _on_change(self, old: bytes | None, new: bytes | None) -> None:
        self._changed.set()

    def get_state(self) -> tuple[bytes, Token] | None:
        self._changed.clear()  # changes from here on wake wait_for_change()
        with self._errors():
            # Writes nothing, as no state is equal to this; returns it if the key does not exist. One request.
            state = self._store.compare_set(self._key, _NO_STATE, _NO_STATE)
        return None if state == _NO_STATE else (state, state)

    def set_state(
        self, state: bytes, token: Token = None, announce: bool = True
    ) -> tuple[bytes, Token, bool] | None:
        if token is not None and not isinstance(token, bytes):
            raise RendezvousStateError(f"a token of another backend: {token!r}")
        expected = token or b""
        self._changed.clear()
        with self._errors():
            found = self._store.compare_set(self._key, expected, state)
            if announce and found == state:
                self._store.add(self._announcements, 1)
        if found == expected:
            return None  # the key does not exist any more: otherwise the state would have been set
        return found, found, found == state

    def wait_for_change(self, token: Token, seconds: float) -> bool:
        return self._changed.wait(seconds)

    @property
    def cache_seconds(self) -> float:
        return 0.0 if self._changed.is_set() else _UNANNOUNCED_SECONDS

    @property
    def is_lost(self) -> bool:
        return self._lost

    @property
    def is_host(self) -> bool:
        return self._owned and isinstance(self._store, TCPStore) and self._store.is_master

    def admit_newcomers(self, admit: bool) -> None:
        if self._owned and isinstance(self._store, TCPStore):
            self._store.admit_newcomers(admit)

    def close(self, in_use: bool = False) -> None:
        """Stop watching the state, and close the store if it is owned and others do not need it.

        Args:
            in_use: other nodes still use the store; a server is left open for them.
        """
        if self._owned and not (in_use and self.is_host):
            if isinstance(self._store, TCPStore):
                self._store.close_drained(DRAIN_SECONDS)
            else:
                self._store.close()
            return
        with self._errors():
            self._store.unwatch_key(self._announcements, self._on_change)
        if self._owned and isinstance(self._store, TCPStore):
            leave_open(self._store)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as e:
            if not isinstance(e, StoreTimeoutError):
                self._lost = True
            elif not self._may_restart and isinstance(self._store, TCPStore):
                self._store.expect_no_restart()  # tells a process that has ended from a path that is cut
            raise store_is_lost(e) from e


def store_is_lost(error: StoreError) -> RendezvousConnectionError:
    """What ``error`` of the store that a rendezvous is held in means for the rendezvous."""
    return RendezvousConnectionError(f"the store of the rendezvous cannot be used: {error}")
