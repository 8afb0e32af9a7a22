"""RRefs of one worker: the references that it holds, how they travel, and the ledgers, carried out.

The owner's side (:mod:`~zmqgrad.rpc.references.values`) and the user's side are guarded by a lock each;
neither is ever held with the other, or while sending, waiting or letting go of a user's object (whose
``__del__`` is user code).

Note [Finalizers only enqueue]: an RRef can die at any line of any thread, with our own lock held. Its
finalizer appends to a deque and, for the first of a batch, posts to the timekeeper; both are re-entrant.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import PeerLostError, RpcError, RRefError
from zmqgrad.rpc.dispatch import Doors
from zmqgrad.rpc.packing.code import PeerCode
from zmqgrad.rpc.references.handle import Handle
from zmqgrad.rpc.references.ledger import (
    DropValue,
    Effect,
    SendChildAccept,
    SendDelete,
    SendForkRequest,
    UserLedger,
)
from zmqgrad.rpc.references.values import OwnedValues
from zmqgrad.rpc.telling import Telling
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import IdSource, show_id
from zmqgrad.wire.messages import (
    MessageType,
    RRefAck,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
)

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

SWEEP_SECONDS = 0.02
"""Dead references are gathered for so long and told to each owner in one message."""


class ReferenceTable:
    """Owner's and user's side of the RRef protocol for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._owned = OwnedValues(worker.name)
        # What calls need of the owner's side, with no step between.
        self.expect, self.made, self.value = self._owned.expect, self._owned.made, self._owned.value
        self._telling = Telling(worker)
        self._lock = threading.Lock()  # guards all below but the deque
        self._user = UserLedger()
        self._lost: set[int] = set()  # workers that are gone; ids are never given twice
        self._released: deque[int] = deque()
        self._sweeping = False
        self._closed = False
        self._views: dict[int, PeerReferences] = {}
        self._ids = IdSource(worker.id)  # of their own: people count references, not messages
        self.make_rref: Callable[[Handle], Any] = lambda handle: handle

    def install(self, doors: Doors) -> None:
        """Answer the control messages of RRefs. They are quick, and never wait behind user code."""
        doors.control[MessageType.RREF_FORK_REQUEST] = self._on_fork_request
        doors.control[MessageType.RREF_CHILD_ACCEPT] = self._on_child_accept
        doors.control[MessageType.RREF_USER_DELETE] = self._on_user_delete

    def of(self, peer: int) -> PeerReferences:
        """How RRefs travel to and from ``peer``."""
        view = self._views.get(peer)
        if view is None:
            view = self._views[peer] = PeerReferences(self, peer, self._worker.codes.of(peer))
        return view

    # ---- owner ------------------------------------------------------------------------------------------

    def own(self, value: Any) -> Handle:
        """A handle on a value of this worker, not known to anybody else yet."""
        outcome: Promise[Any] = Promise()
        outcome.set_result(value)
        return Handle(self, self._ids.next(), 0, self._worker.id, outcome)

    def own_later(self) -> Handle:
        """A handle on a value that a remote call of this worker to itself will make."""
        rref_id = self._ids.next()
        return Handle(self, rref_id, 0, self._worker.id, self._owned.find(rref_id))

    # ---- user -------------------------------------------------------------------------------------------

    def refer(self, owner: int) -> Handle:
        """A handle on a value that ``owner`` is about to be asked for."""
        rref_id, fork_id = self._ids.next(), self._ids.next()
        with self._lock:
            self._user.create(rref_id, fork_id, owner)
        return Handle(self, rref_id, fork_id, owner)

    def unasked(self, handle: Handle) -> None:
        """The owner of ``handle`` could not be asked for its value; it may have heard of it all the same."""
        with self._lock:
            if not self._user.is_confirmed(handle.fork_id):
                self._user.forget(handle.fork_id)

    def confirm(self, fork_id: int) -> None:
        """The owner knows of ``fork_id``."""
        self._carry_out(self._locked(lambda: self._user.confirm(fork_id)))

    def confirm_now(self, handle: Handle) -> None:
        """Tell the owner of ``handle``, as is being done anyway, and wait for its word.

        Raises:
            RpcError: if that does not come.
        """
        worker = self._worker
        request = RRefForkRequest(handle.rref_id, handle.fork_id)
        worker.wait(
            worker.request(handle.owner, request, seconds=worker.default_timeout, what="RRefForkRequest")
        )
        self.confirm(handle.fork_id)

    def is_confirmed(self, handle: Handle) -> bool:
        """Does the owner know of this reference? (On the owner: yes.)"""
        if not handle.fork_id:
            return True
        with self._lock:
            return self._user.is_confirmed(handle.fork_id)

    def release_later(self, fork_id: int) -> None:
        """Called by finalizers. See Note [Finalizers only enqueue]."""
        self._released.append(fork_id)
        if not self._sweeping:
            self._sweeping = True
            self._worker.timekeeper.call_later(SWEEP_SECONDS, self.sweep)

    def sweep(self) -> None:
        """Tell owners of the references that died here."""
        self._sweeping = False
        effects: list[Effect] = []
        while self._released:
            fork_id = self._released.popleft()
            effects += self._locked(lambda fork_id=fork_id: self._user.release(fork_id))  # type: ignore[misc]
        self._carry_out(effects)

    def check_alive(self, handle: Handle, what: str) -> None:
        """Can ``handle``, a user's, still be used for ``what``?

        Raises:
            PeerLostError: if the worker that owned the value is gone. RRefError: if this one was shut down.
        """
        with self._lock:
            if not self._user.holds(handle.fork_id):
                raise self._dead(handle, what)

    def _dead(self, handle: Handle, what: str) -> RpcError:
        """Why ``handle`` cannot be used any more."""
        shown = show_id(handle.rref_id)
        if handle.owner not in self._lost:
            return RRefError(
                f"value {shown} is out of reach: this worker was shut down since, and its reference has been "
                f"deleted. Cannot call {what} after deletion."
            )
        name = self._worker.membership.name_of(handle.owner)
        now = self._worker.membership.successor(handle.owner)
        also = (
            f"; the {name} that runs now (worker {now.id}) is a new one and does not have it" if now else ""
        )
        return PeerLostError(
            f"value {shown} was lost with {name} (worker {handle.owner}), which owned it and is gone{also}"
        )

    # ---- travelling -------------------------------------------------------------------------------------

    def fork_for(self, peer: int, handle: Handle) -> tuple[int, int, int, int, str]:
        """A fork of ``handle`` for ``peer``."""
        if handle.table is not self:
            raise RRefError(
                "this RRef belongs to another worker, or to one that was shut down. "
                "Cannot call fork an UserRRef after deletion."
            )
        fork_id = self._ids.next()
        if handle.owner == self._worker.id:
            assert handle.outcome is not None
            lent = self._owned.lend(handle.rref_id, handle.outcome, fork_id, peer)
        else:
            with self._lock:
                lent = peer not in self._lost
                if lent and not self._user.holds(handle.fork_id):
                    raise self._dead(handle, "fork an UserRRef")
                if lent:
                    self._user.fork(handle.fork_id, fork_id, peer)
        if not lent:  # nobody would ever take the fork back
            raise self._worker.loss_of(peer, "a message with an RRef")
        return handle.owner, handle.rref_id, fork_id, self._worker.id, handle.type_name

    def adopt_from(self, owner: int, rref_id: int, fork_id: int, parent: int, type_name: str) -> Any:
        """The RRef of a fork that came here."""
        if owner == self._worker.id:
            outcome = self._owned.find(rref_id)
            if parent == self._worker.id:
                self._carry_out(self._owned.delete(((rref_id, fork_id),)))
            else:
                self._carry_out([SendChildAccept(parent, rref_id, fork_id)])
            return self.make_rref(Handle(self, rref_id, 0, owner, outcome, type_name))
        with self._lock:
            effects = [] if owner in self._lost else self._user.adopt(rref_id, fork_id, owner, parent)
        self._carry_out(effects)
        return self.make_rref(Handle(self, rref_id, fork_id, owner, None, type_name))

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Let go of forks that came here in a message which nobody will read."""
        for owner, rref_id, fork_id, parent in forks:
            if owner == self._worker.id:
                if parent == owner:
                    self.unfork(owner, rref_id, fork_id)
                else:
                    self._carry_out([SendChildAccept(parent, rref_id, fork_id)])
                continue
            with self._lock:
                effects = [] if owner in self._lost else self._user.adopt(rref_id, fork_id, owner, parent)
            self._carry_out(effects)
            self.release_later(fork_id)

    def unfork(self, owner: int, rref_id: int, fork_id: int) -> None:
        """A fork was made for a message that will never be sent."""
        if owner == self._worker.id:
            self._carry_out(self._owned.delete(((rref_id, fork_id),)))
        else:
            self._carry_out(self._locked(lambda: self._user.child_accepted(fork_id)))

    # ---- control messages -------------------------------------------------------------------------------

    def _on_fork_request(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefForkRequest)
        self._owned.note(message.rref_id, message.fork_id, inbound.envelope.source)
        self._worker.reply(inbound, RRefAck())

    def _on_child_accept(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefChildAccept)
        self._carry_out(self._locked(lambda: self._user.child_accepted(message.fork_id)))
        self._worker.reply(inbound, RRefAck())

    def _on_user_delete(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefUserDelete)
        self._carry_out(self._owned.delete(message.forks))
        self._worker.reply(inbound, RRefAck())  # last: it fails where the user was lost meanwhile

    def peer_lost(self, peer: int) -> None:
        """``peer`` died, with its forks and its values."""
        effects, orphans = self._owned.lose(peer)
        with self._lock:
            self._lost.add(peer)
            self._views.pop(peer, None)
            effects += self._user.lose(peer)
        for rref_id, outcome in orphans.items():
            outcome.set_exception(self._worker.loss_of(peer, f"the call that makes value {show_id(rref_id)}"))
        self._carry_out(effects)

    # ---- effects ----------------------------------------------------------------------------------------

    def _locked(self, step: Callable[[], list[Effect]]) -> list[Effect]:
        with self._lock:
            return step()

    def _carry_out(self, effects: list[Effect]) -> None:
        deletes: dict[int, list[tuple[int, int]]] = {}
        dropped: list[Promise[Any]] = []
        tell = self._telling.tell
        for effect in effects:
            if isinstance(effect, SendDelete):
                deletes.setdefault(effect.owner, []).append((effect.rref_id, effect.fork_id))
            elif isinstance(effect, DropValue):
                outcome = self._owned.drop(effect.rref_id)
                if outcome is not None:
                    dropped.append(outcome)
                    del outcome  # nothing but the list may keep it
            elif isinstance(effect, SendForkRequest):
                request = RRefForkRequest(effect.rref_id, effect.fork_id)
                tell(effect.owner, request, lambda f=effect.fork_id: self.confirm(f))  # type: ignore[misc]
            else:
                tell(effect.parent, RRefChildAccept(effect.rref_id, effect.fork_id))
        for owner, forks in deletes.items():
            tell(owner, RRefUserDelete(tuple(forks)), lambda f=forks: self._deleted(f))  # type: ignore[misc]
        if dropped and not self._closed:
            # Letting go of a value may run a user's __del__: not in the receiver's thread.
            self._worker.pool.submit(dropped.clear)

    def _deleted(self, forks: list[tuple[int, int]]) -> None:
        with self._lock:
            for _, fork_id in forks:
                self._user.deleted(fork_id)

    # ---- ending -----------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Are there dead references that nobody was told of?"""
        return bool(self._released)

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self._telling.close()
        with self._lock:
            self._user = UserLedger()
        self._owned.close()

    def statistics(self) -> dict[str, int]:
        """How many values are kept for others, forks others hold, and references held here."""
        owned = self._owned.statistics()
        with self._lock:
            return {
                **owned,
                "user_rrefs": len(self._user),
                "unconfirmed": sum(not fork.confirmed for fork in self._user.forks()),
            }


class PeerReferences:
    """The table as payloads to or from one peer see it; and how ``code`` travels between the two."""

    __slots__ = ("_peer", "_table", "code")

    def __init__(self, table: ReferenceTable, peer: int, code: PeerCode) -> None:
        self._table = table
        self._peer = peer
        self.code = code

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """A fork of ``rref`` for the peer."""
        return self._table.fork_for(self._peer, rref if isinstance(rref, Handle) else rref.handle)

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """A fork that will not reach the peer."""
        self._table.unfork(*fork[:3])

    def adopt(self, *fork: Any) -> Any:
        """The RRef of a fork that the peer sent."""
        return self._table.adopt_from(*fork)

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Let go of forks that the peer sent, unread."""
        self._table.discard(forks)
