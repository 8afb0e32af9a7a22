"""The values that this worker owns and the references that it holds: the ledgers, carried out.

One lock guards the ledgers and the table of values. It is never held while sending, waiting or letting go
of a user's object (whose ``__del__`` is user code).

Note [Finalizers only enqueue]: an RRef can die at any line of any thread, with our own lock held. Its
finalizer appends to a deque and, for the first of a batch, posts to the timekeeper; both are re-entrant.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zmqgrad.errors import (
    NotInitializedError,
    PeerLostError,
    RpcError,
    RpcTimeoutError,
    RRefError,
    TransportError,
)
from zmqgrad.rpc.code import PeerCode
from zmqgrad.rpc.dispatch import Doors
from zmqgrad.rpc.futures import PythonFuture
from zmqgrad.rpc.payload import TravelsAsReference
from zmqgrad.rpc.rref_ledger import (
    DropValue,
    Effect,
    OwnerLedger,
    Remembered,
    SendChildAccept,
    SendDelete,
    SendForkRequest,
    UserLedger,
)
from zmqgrad.runtime.future import Outcome
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import IdSource, show_id, split_id
from zmqgrad.wire.messages import (
    Message,
    MessageType,
    RRefAck,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
)

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.02
"""Dead references are gathered for so long and told to each owner in one message."""

RETRY_SECONDS = 5.0
"""A control message that nobody answers is sent again after so long, then after twice as long, and so on: who
cannot keep up must not be sent the more."""

MOST_PATIENCE = 16
"""But never later than after so many times ``RETRY_SECONDS``."""

REMEMBERED = 10_000
"""How many dropped values are remembered at least, to tell "gone" from "not here yet"."""


class Handle(TravelsAsReference):
    """What an RRef is made of: ids, the owner, and on the owner the outcome that holds the value."""

    __slots__ = (
        "__weakref__",
        "creation",
        "fork_id",
        "outcome",
        "owner",
        "rref_id",
        "table",
        "type_name",
        "value_type",
    )

    def __init__(
        self,
        table: ReferenceTable,
        rref_id: int,
        fork_id: int,
        owner: int,
        outcome: Outcome[Any] | None = None,
        type_name: str = "",
    ) -> None:
        self.table = table
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.outcome = outcome  # on the owner: the value; on a user: None until creating it failed
        self.type_name = type_name
        self.value_type: PythonFuture[Any] | None = None  # once it was asked for
        self.creation: Outcome[Inbound] | None = None  # the owner's answer, where this worker had it made

    def __del__(self) -> None:
        if self.fork_id:
            self.table.release_later(self.fork_id)


class ReferenceTable:
    """Owner's and user's side of the RRef protocol for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()  # guards all below but the deque
        self._values: dict[int, Outcome[Any]] = {}
        self._dropped = Remembered(REMEMBERED)
        # Values that others told of before their maker's call has come: its fork is yet to be noted, so they
        # are not dropped when those others let go.
        self._awaited: set[int] = set()
        self._owner = OwnerLedger()
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
        outcome: Outcome[Any] = Outcome()
        outcome.set(value)
        return Handle(self, self._ids.next(), 0, self._worker.id, outcome)

    def own_later(self) -> Handle:
        """A handle on a value that a remote call of this worker to itself will make."""
        rref_id = self._ids.next()
        return Handle(self, rref_id, 0, self._worker.id, self._expect(rref_id))

    def expect(self, holder: int, rref_id: int, fork_id: int) -> Outcome[Any]:
        """The outcome that will hold ``rref_id``, which is about to be made for ``holder``."""
        outcome = self._expect(rref_id)
        with self._lock:
            self._awaited.discard(rref_id)
            if fork_id and holder not in self._lost:
                self._owner.note(rref_id, fork_id, holder)
        return outcome

    def made(self, rref_id: int) -> None:
        """The outcome that :meth:`expect` gave has been set."""
        with self._lock:
            if not self._owner.knows(rref_id):  # made for this worker itself: its handle keeps it
                self._values.pop(rref_id, None)

    def _expect(self, rref_id: int) -> Outcome[Any]:
        """The outcome of ``rref_id``; made if it is not here yet, for messages of two peers have no order."""
        with self._lock:
            if rref_id in self._dropped:
                raise RRefError(
                    f"value {show_id(rref_id)} of {self._worker.name} is gone: nothing referred to it"
                )
            outcome = self._values.get(rref_id)
            if outcome is None and self._closed:  # a call that close() found half-way here
                raise self._never_made()
            return self._await(rref_id) if outcome is None else outcome

    def _await(self, rref_id: int) -> Outcome[Any]:
        """An outcome for what will be made. Called with the lock held."""
        self._awaited.add(rref_id)
        outcome = self._values[rref_id] = Outcome()
        return outcome

    def value(self, rref_id: int, timeout: float | None) -> Any:
        """The value of ``rref_id``; waits up to ``timeout`` seconds for it to be made.

        Raises:
            RRefError: if it is gone. RpcTimeoutError: if it does not come. Others: as making it raised.
        """
        outcome = self._expect(rref_id)
        if not outcome.wait_done(timeout):
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout ({(timeout or 0.0) * 1000:.0f} ms): value "
                f"{show_id(rref_id)} of {self._worker.name} was not made within it"
            )
        return outcome.result()

    # ---- user -------------------------------------------------------------------------------------------

    def refer(self, owner: int) -> Handle:
        """A handle on a value that ``owner`` is about to be asked for."""
        rref_id, fork_id = self._ids.next(), self._ids.next()
        with self._lock:
            self._user.create(rref_id, fork_id, owner)
        return Handle(self, rref_id, fork_id, owner)

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
        with self._lock:
            if peer in self._lost:  # nobody would ever take the fork back
                raise self._worker.loss_of(peer, "a message with an RRef")
            if handle.owner == self._worker.id:
                assert handle.outcome is not None
                self._values[handle.rref_id] = handle.outcome
                self._dropped.discard(handle.rref_id)  # nobody else referred to it; now somebody does again
                self._owner.note(handle.rref_id, fork_id, peer)
            elif self._user.holds(handle.fork_id):
                self._user.fork(handle.fork_id, fork_id, peer)
            else:
                raise self._dead(handle, "fork an UserRRef")
        return handle.owner, handle.rref_id, fork_id, self._worker.id, handle.type_name

    def adopt_from(self, owner: int, rref_id: int, fork_id: int, parent: int, type_name: str) -> Any:
        """The RRef of a fork that came here."""
        if owner == self._worker.id:
            outcome = self._expect(rref_id)
            if parent == self._worker.id:
                self._carry_out(self._locked(lambda: self._owner.delete(rref_id, fork_id)))
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
            self._carry_out(self._locked(lambda: self._owner.delete(rref_id, fork_id)))
        else:
            self._carry_out(self._locked(lambda: self._user.child_accepted(fork_id)))

    # ---- control messages -------------------------------------------------------------------------------

    def _on_fork_request(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefForkRequest)
        with self._lock:
            if message.rref_id not in self._dropped and inbound.envelope.source not in self._lost:
                self._owner.note(message.rref_id, message.fork_id, inbound.envelope.source)
                # Unknown even now: it was deleted before. Known without a value: its maker's call comes yet.
                if self._owner.knows(message.rref_id) and message.rref_id not in self._values:
                    self._await(message.rref_id)
        self._worker.reply(inbound, RRefAck())

    def _on_child_accept(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefChildAccept)
        self._worker.reply(inbound, RRefAck())
        self._carry_out(self._locked(lambda: self._user.child_accepted(message.fork_id)))

    def _on_user_delete(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefUserDelete)
        effects: list[Effect] = []
        with self._lock:
            for rref_id, fork_id in message.forks:
                effects += self._owner.delete(rref_id, fork_id)
        self._worker.reply(inbound, RRefAck())
        self._carry_out(effects)

    def peer_lost(self, peer: int) -> None:
        """``peer`` died, with its forks and its values."""
        with self._lock:
            self._lost.add(peer)
            self._views.pop(peer, None)
            orphans = {r: self._values[r] for r in self._awaited if split_id(r)[0] == peer}
            self._awaited -= orphans.keys()
            effects = self._owner.lose(peer) + self._user.lose(peer)
            for rref_id in orphans:
                if not self._owner.knows(rref_id):
                    del self._values[rref_id]
        for rref_id, outcome in orphans.items():
            outcome.fail(self._worker.loss_of(peer, f"the call that makes value {show_id(rref_id)}"))
        self._carry_out(effects)

    # ---- effects ----------------------------------------------------------------------------------------

    def _locked(self, step: Callable[[], list[Effect]]) -> list[Effect]:
        with self._lock:
            return step()

    def _carry_out(self, effects: list[Effect]) -> None:
        deletes: dict[int, list[tuple[int, int]]] = {}
        dropped: list[Outcome[Any]] = []
        for effect in effects:
            if isinstance(effect, SendDelete):
                deletes.setdefault(effect.owner, []).append((effect.rref_id, effect.fork_id))
            elif isinstance(effect, DropValue):
                dropped += self._drop(effect.rref_id)
            elif isinstance(effect, SendForkRequest):
                request = RRefForkRequest(effect.rref_id, effect.fork_id)
                self._tell(effect.owner, request, lambda f=effect.fork_id: self.confirm(f))  # type: ignore[misc]
            else:
                self._tell(effect.parent, RRefChildAccept(effect.rref_id, effect.fork_id), _nothing)
        for owner, forks in deletes.items():
            self._tell(owner, RRefUserDelete(tuple(forks)), lambda f=forks: self._deleted(f))  # type: ignore[misc]
        if dropped and not self._closed:
            # Letting go of a value may run a user's __del__: not in the receiver's thread.
            self._worker.pool.submit(dropped.clear)

    def _drop(self, rref_id: int) -> list[Outcome[Any]]:
        with self._lock:
            if self._owner.knows(rref_id) or rref_id in self._awaited:
                return []  # another fork was sent since the last one was deleted, or is to come
            outcome = self._values.pop(rref_id, None)
            self._dropped.add(rref_id)
        return [] if outcome is None else [outcome]

    def _deleted(self, forks: list[tuple[int, int]]) -> None:
        with self._lock:
            for _, fork_id in forks:
                self._user.deleted(fork_id)

    def _tell(self, peer: int, message: Message, acknowledged: Callable[[], None], patience: int = 1) -> None:
        """Send a control message until it is answered. Hearing one twice is harmless."""

        def settled(outcome: Outcome[Inbound]) -> None:
            if outcome.error() is None:
                acknowledged()
            elif isinstance(outcome.error(), RpcTimeoutError) and not self._closed:
                logger.info("%s: worker %d did not answer %s, again", self._worker.name, peer, message)
                self._tell(peer, message, acknowledged, min(2 * patience, MOST_PATIENCE))

        if self._closed:
            return
        try:
            self._worker.request(
                peer,
                message,
                seconds=patience * RETRY_SECONDS,
                what=type(message).__name__,
                settled=settled,
            )
        except (TransportError, NotInitializedError, PeerLostError) as e:
            logger.debug("%s: cannot tell worker %d %s: %s", self._worker.name, peer, message, e)

    # ---- ending -----------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Are there dead references that nobody was told of?"""
        return bool(self._released)

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        with self._lock:
            values, self._values = self._values, {}
            self._awaited.clear()
            self._owner, self._user = OwnerLedger(), UserLedger()
        for outcome in values.values():
            outcome.fail(self._never_made())
        values.clear()

    def _never_made(self) -> RRefError:
        return RRefError(f"worker {self._worker.name} was shut down before this value was made")

    def statistics(self) -> dict[str, int]:
        """How many values are kept for others, forks others hold, and references held here."""
        with self._lock:
            forks = self._owner.forks()
            return {
                "owner_rrefs": len(self._values),
                "forks": sum(map(len, forks.values())),
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


def _nothing() -> None:
    return None
