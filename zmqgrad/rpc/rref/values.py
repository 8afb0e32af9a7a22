"""The owner's side of the RRef protocol: the values of one worker, and the holders of their forks.

A value is kept while any worker holds a fork of it (R1), or until the call that creates it has arrived:
messages of two peers are not ordered, so a third worker may register a fork, or fetch the value, before that
call arrives. It then gets the promise that the call will set.

Only :meth:`OwnedValues.value` waits, and nothing here sends: methods return the effects of the protocol, or
what they drop, to the caller. Thread-safe; the lock is never held while a user's object is freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from zmqgrad.errors import RpcTimeoutError, RRefError
from zmqgrad.rpc.raising import result_of
from zmqgrad.rpc.rref.protocol import Effect, OwnerForks, RecentIds
from zmqgrad.runtime.future import Promise
from zmqgrad.wire.ids import show_id, split_id

MIN_RECENT_VALUES = 10_000
"""How many dropped values are remembered at least, to distinguish them from values not yet created."""


class OwnedValues:
    """rref id -> the promise that holds the value, or will. ``owner``: the name of the worker, for errors."""

    def __init__(self, owner: str) -> None:
        self._name = owner
        self._lock = threading.RLock()  # guards all below
        self._values: dict[int, Promise[Any]] = {}
        self._dropped = RecentIds(MIN_RECENT_VALUES)
        # Values that others referred to before the call that creates them arrived. The fork of that call is
        # not registered yet, so they are not dropped when the other forks are deleted.
        self._awaited: set[int] = set()
        self._forks = OwnerForks()
        # By lost worker, whose id is never reused: the error of a value that it should have had made.
        self._lost: dict[int, Callable[[int], BaseException]] = {}
        self._expired: set[int] = set()  # those lost so long ago that their forks are removed
        self._closed = False

    # ---- values -----------------------------------------------------------------------------------------

    def find(self, rref_id: int) -> Promise[Any]:
        """The promise of ``rref_id``, created if necessary.

        Raises:
            RRefError: if the value was dropped, or if this worker was shut down.
        """
        with self._lock:
            return self._find(rref_id) or self._await(rref_id)

    def _find(self, rref_id: int) -> Promise[Any] | None:
        """The promise of ``rref_id``, if there is one. Called with the lock held; raises as :meth:`find`."""
        if rref_id in self._dropped:
            raise RRefError(f"value {show_id(rref_id)} of {self._name} is gone: nothing referred to it")
        promise = self._values.get(rref_id)
        if promise is None and self._closed:  # the call arrived during close()
            raise self._never_made()
        return promise

    def _await(self, rref_id: int) -> Promise[Any]:
        """A new promise of a value whose call has not arrived. Called with the lock held."""
        promise: Promise[Any] = Promise()
        lost = self._lost.get(split_id(rref_id)[0])
        if lost is None:
            self._awaited.add(rref_id)
        else:  # nothing more arrives from it
            promise.set_exception(lost(rref_id))
        if lost is None or self._forks.knows(rref_id):
            self._values[rref_id] = promise
        return promise

    def create_pending(self, holder: int, rref_id: int, fork_id: int) -> Promise[Any]:
        """The promise of ``rref_id``, which is about to be created for ``holder``.

        Raises:
            RRefError: as :meth:`find`, or if another worker has made the id.
        """
        if split_id(rref_id)[0] != holder:
            raise RRefError(
                f"worker {holder} has value {show_id(rref_id)} made, whose id is another worker's"
            )
        with self._lock:
            promise = self._find(rref_id)
            if promise is None:
                promise = self._values[rref_id] = Promise()
            self._awaited.discard(rref_id)
            # Also of a holder that was lost a moment ago: children of the fork may still register.
            if fork_id and holder not in self._expired:
                self._forks.note(rref_id, fork_id, holder)
        return promise

    def value_ready(self, rref_id: int) -> None:
        """Note that the promise of :meth:`create_pending` has been set."""
        with self._lock:
            if not self._forks.knows(rref_id):  # created for this worker itself: its handle keeps it
                self._dropped.add(rref_id)
                self._values.pop(rref_id, None)

    def value(self, rref_id: int, timeout: float | None) -> Any:
        """Wait up to ``timeout`` seconds (None, infinite: no limit) for the value of ``rref_id``.

        Raises:
            RRefError: if it was dropped.
            RpcTimeoutError: if it is not created in time.
            Exception: the error of its creation.
        """
        promise = self.find(rref_id)
        if not promise.wait_done(timeout):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout ({(timeout or 0.0) * 1000:.0f} ms): value "
                f"{show_id(rref_id)} of {self._name} was not made within it"
            )
        return result_of(promise)

    # ---- forks ------------------------------------------------------------------------------------------

    def share(self, rref_id: int, promise: Promise[Any], fork_id: int, holder: int) -> bool:
        """Register fork ``fork_id`` for ``holder``. Returns False if that is lost."""
        with self._lock:
            if holder in self._lost:
                return False
            self._values[rref_id] = promise
            self._dropped.discard(rref_id)  # it had no forks; now it has one again
            self._forks.note(rref_id, fork_id, holder)
            return True

    def note(self, rref_id: int, fork_id: int, holder: int) -> None:
        """Register fork ``fork_id``, which ``holder`` got from another user."""
        with self._lock:
            if self._closed:  # the request arrived during close(): nothing would set its promise
                return
            if rref_id not in self._dropped and holder not in self._lost:
                self._forks.note(rref_id, fork_id, holder)
                # Still unknown: it was deleted before. Known without a value: its call has not arrived.
                if self._forks.knows(rref_id) and rref_id not in self._values:
                    self._await(rref_id)

    def delete(self, forks: Iterable[tuple[int, int]], holder: int | None = None) -> list[Effect]:
        """Remove ``forks`` of ``holder`` (None: of any), given as (rref id, fork id)."""
        effects: list[Effect] = []
        with self._lock:
            for rref_id, fork_id in forks:
                effects += self._forks.delete(rref_id, fork_id, holder)
        return effects

    def drop(self, rref_id: int) -> Promise[Any] | None:
        """Drop ``rref_id`` if it was created and has no forks. Returns the promise that held the value."""
        with self._lock:
            if self._forks.knows(rref_id) or rref_id in self._awaited:
                return None  # another fork was sent since the last one was deleted, or will be registered
            promise = self._values.get(rref_id)
            if promise is not None and not promise.done():
                return None  # value_ready() will; until then close() ends the threads that wait for it
            self._dropped.add(rref_id)
            return self._values.pop(rref_id, None)

    # ---- ending -----------------------------------------------------------------------------------------

    def lose(self, peer: int, error_of: Callable[[int], BaseException]) -> None:
        """Note that ``peer`` is lost; its forks stay. Values of which its call has not arrived fail.

        Args:
            error_of: the error of a value, by its id.
        """
        with self._lock:
            self._lost[peer] = error_of
            orphans = {r: self._values[r] for r in self._awaited if split_id(r)[0] == peer}
        for rref_id, promise in orphans.items():
            promise.set_exception(error_of(rref_id))
        with self._lock:  # only now: what is neither awaited nor set is being made, and is not dropped
            self._awaited -= orphans.keys()
            for rref_id in orphans:
                if not self._forks.knows(rref_id):
                    self._values.pop(rref_id, None)

    def expire(self, peer: int) -> list[Effect]:
        """Remove the forks of ``peer``, which was lost ``ORPHAN_GRACE_SECONDS`` ago."""
        with self._lock:
            self._expired.add(peer)
            return self._forks.expire(peer)

    def close(self) -> None:
        """Drop everything; promises that are not set fail."""
        with self._lock:
            self._closed = True
            values, self._values = self._values, {}
            self._awaited.clear()
            self._forks = OwnerForks()
        for promise in values.values():
            promise.set_exception(self._never_made())
        values.clear()

    def _never_made(self) -> RRefError:
        return RRefError(f"worker {self._name} was shut down before this value was made")

    def statistics(self) -> dict[str, int]:
        """The number of values kept for other workers, and of forks that living ones hold."""
        with self._lock:
            holders = [holder for forks in self._forks.forks().values() for holder in forks.values()]
            return {
                "owner_rrefs": len(self._values),
                "forks": sum(holder not in self._lost for holder in holders),
            }
