"""The values of one worker that RRefs refer to, and who holds forks of them: the owner's side.

A value is here while any worker holds a fork of it (R1), or until its maker's call has come: messages of two
peers have no order, so a third worker may tell of a fork, or ask for the value, before the call that makes it
is here. Whoever asks then gets the outcome that the call will set.

Nothing here sends or waits, but :meth:`OwnedValues.value`; methods return the effects of the ledger, or what
they drop, for the caller to carry out and to let go of. Any thread may call; the lock is never held while a
user's object dies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from zmqgrad.errors import RpcTimeoutError, RRefError
from zmqgrad.rpc.references.ledger import Effect, OwnerLedger, Remembered
from zmqgrad.runtime.future import Promise
from zmqgrad.wire.ids import show_id, split_id

REMEMBERED = 10_000
"""How many dropped values are remembered at least, to tell "gone" from "not here yet"."""


class OwnedValues:
    """rref id -> the outcome that holds the value, or will. ``owner``: name of the worker, for errors."""

    def __init__(self, owner: str) -> None:
        self._name = owner
        self._lock = threading.Lock()  # guards all below
        self._values: dict[int, Promise[Any]] = {}
        self._dropped = Remembered(REMEMBERED)
        # Values that others told of before their maker's call has come: its fork is yet to be noted, so they
        # are not dropped when those others let go.
        self._awaited: set[int] = set()
        self._ledger = OwnerLedger()
        self._lost: set[int] = set()  # workers that are gone; ids are never given twice
        self._closed = False

    # ---- values -----------------------------------------------------------------------------------------

    def find(self, rref_id: int) -> Promise[Any]:
        """The outcome of ``rref_id``; made if it is not here yet.

        Raises:
            RRefError: if the value is gone, or if this worker was shut down.
        """
        with self._lock:
            if rref_id in self._dropped:
                raise RRefError(f"value {show_id(rref_id)} of {self._name} is gone: nothing referred to it")
            outcome = self._values.get(rref_id)
            if outcome is None and self._closed:  # a call that close() found half-way here
                raise self._never_made()
            return self._await(rref_id) if outcome is None else outcome

    def _await(self, rref_id: int) -> Promise[Any]:
        """An outcome for what will be made. Called with the lock held."""
        self._awaited.add(rref_id)
        outcome = self._values[rref_id] = Promise()
        return outcome

    def expect(self, holder: int, rref_id: int, fork_id: int) -> Promise[Any]:
        """The outcome that will hold ``rref_id``, which is about to be made for ``holder``.

        Raises:
            RRefError: as :meth:`find`.
        """
        outcome = self.find(rref_id)
        with self._lock:
            self._awaited.discard(rref_id)
            if fork_id and holder not in self._lost:
                self._ledger.note(rref_id, fork_id, holder)
        return outcome

    def made(self, rref_id: int) -> None:
        """The outcome that :meth:`expect` gave has been set."""
        with self._lock:
            if not self._ledger.knows(rref_id):  # made for this worker itself: its handle keeps it
                self._values.pop(rref_id, None)

    def value(self, rref_id: int, timeout: float | None) -> Any:
        """The value of ``rref_id``; waits up to ``timeout`` seconds for it to be made.

        Raises:
            RRefError: if it is gone. RpcTimeoutError: if it does not come. Others: as making it raised.
        """
        outcome = self.find(rref_id)
        if not outcome.wait_done(timeout):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout ({(timeout or 0.0) * 1000:.0f} ms): value "
                f"{show_id(rref_id)} of {self._name} was not made within it"
            )
        return outcome.result()

    # ---- forks ------------------------------------------------------------------------------------------

    def lend(self, rref_id: int, outcome: Promise[Any], fork_id: int, holder: int) -> bool:
        """Fork ``fork_id`` goes to ``holder``. False if that is lost, and nobody would ever take it back."""
        with self._lock:
            if holder in self._lost:
                return False
            self._values[rref_id] = outcome
            self._dropped.discard(rref_id)  # nobody else referred to it; now somebody does again
            self._ledger.note(rref_id, fork_id, holder)
            return True

    def note(self, rref_id: int, fork_id: int, holder: int) -> None:
        """``holder`` has got fork ``fork_id`` of another user."""
        with self._lock:
            if rref_id not in self._dropped and holder not in self._lost:
                self._ledger.note(rref_id, fork_id, holder)
                # Unknown even now: it was deleted before. Known without a value: its maker's call comes yet.
                if self._ledger.knows(rref_id) and rref_id not in self._values:
                    self._await(rref_id)

    def delete(self, forks: Iterable[tuple[int, int]]) -> list[Effect]:
        """``forks``, as (rref id, fork id), are gone."""
        effects: list[Effect] = []
        with self._lock:
            for rref_id, fork_id in forks:
                effects += self._ledger.delete(rref_id, fork_id)
        return effects

    def drop(self, rref_id: int) -> Promise[Any] | None:
        """Keep ``rref_id`` no longer, unless it is needed after all; gives what held the value."""
        with self._lock:
            if self._ledger.knows(rref_id) or rref_id in self._awaited:
                return None  # another fork was sent since the last one was deleted, or is to come
            self._dropped.add(rref_id)
            return self._values.pop(rref_id, None)

    # ---- ending -----------------------------------------------------------------------------------------

    def lose(self, peer: int) -> tuple[list[Effect], dict[int, Promise[Any]]]:
        """``peer`` died with its forks: effects, and outcomes of what it will never have made, by rref id."""
        with self._lock:
            self._lost.add(peer)
            orphans = {r: self._values[r] for r in self._awaited if split_id(r)[0] == peer}
            self._awaited -= orphans.keys()
            effects = self._ledger.lose(peer)
            for rref_id in orphans:
                if not self._ledger.knows(rref_id):
                    del self._values[rref_id]
        return effects, orphans

    def close(self) -> None:
        """Forget everything; who waits for a value hears that it will not be made."""
        with self._lock:
            self._closed = True
            values, self._values = self._values, {}
            self._awaited.clear()
            self._ledger = OwnerLedger()
        for outcome in values.values():
            outcome.set_exception(self._never_made())
        values.clear()

    def _never_made(self) -> RRefError:
        return RRefError(f"worker {self._name} was shut down before this value was made")

    def statistics(self) -> dict[str, int]:
        """How many values are kept for others, and how many forks others hold."""
        with self._lock:
            return {
                "owner_rrefs": len(self._values),
                "forks": sum(map(len, self._ledger.forks().values())),
            }
