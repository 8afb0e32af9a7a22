"""The RRefs of one worker: carries out the effects of the protocol, and serializes references.

The owner's side (:mod:`~zmqgrad.rpc.rref.values`) and the user's side are guarded by a lock each;
neither is held together with the other, or while sending, waiting or freeing a user's object (whose
``__del__`` is user code).

Note [Finalizers only enqueue]: an RRef can be finalized at any line of any thread, with our own lock held.
Its finalizer appends to a deque and, for the first of a batch, posts to the timer; both are re-entrant.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zmqgrad.errors import (
    NotInitializedError,
    PeerLostError,
    RpcError,
    RRefError,
    TransportError,
    UnknownWorkerError,
)
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.rref.handle import Handle
from zmqgrad.rpc.rref.protocol import (
    DropValue,
    Effect,
    SendChildAccept,
    SendDelete,
    SendForkRequest,
    UserForks,
)
from zmqgrad.rpc.rref.values import OwnedValues
from zmqgrad.runtime.blocking import may_wait_for_others
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import CoalescedJob
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.ids import IdSource, show_id
from zmqgrad.wire.messages import (
    Message,
    MessageType,
    Payload,
    RRefAck,
    RRefChildAccept,
    RRefForkRequest,
    RRefUserDelete,
)

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.02
"""How long deleted references are collected before each owner gets them in one message."""

ORPHAN_GRACE_SECONDS = 30.0
"""How long the forks of a lost worker stay registered, and those that were sent to it. References that it
passed on may still be about to be registered, which is requested as soon as the reference is unpickled."""


class ReferenceTable:
    """Owner's and user's side of the RRef protocol for one worker."""

    def __init__(self, worker: WorkerCore) -> None:
        self._worker = worker
        self._owned = OwnedValues(worker.name)
        # Bound here once: a forwarding method would cost a call for each request.
        self.create_pending, self.value_ready = self._owned.create_pending, self._owned.value_ready
        self.value = self._owned.value
        self._lock = threading.RLock()  # guards all below but the deque
        self._user = UserForks()
        self._lost: set[int] = set()  # lost workers; ids are never reused
        self._released: deque[int] = deque()
        self._flush = CoalescedJob(self.flush_releases, worker.timer.call_later)
        self._closed = False
        self._views: dict[int, PeerReferences] = {}
        self._ids = IdSource(worker.id)  # own counter: ids shown to users count references, not messages
        self.make_rref: Callable[[Handle], Any] = lambda handle: handle

    def connect(self, request: Callable[..., PendingCall], reply: Callable[[Inbound, Message], None]) -> None:
        """Handle the control messages of RRefs from now on: they are quick, and never queue behind user code.

        Args:
            request: sends one of this worker (:meth:`~zmqgrad.rpc.client.Client.request`). It arrives once,
                unless one of the two workers is lost.
            reply: sends the reply to one.
        """
        self._request = request
        self._reply = reply
        control = self._worker.hooks.control
        control[MessageType.RREF_FORK_REQUEST] = self._on_fork_request
        control[MessageType.RREF_CHILD_ACCEPT] = self._on_child_accept
        control[MessageType.RREF_USER_DELETE] = self._on_user_delete

    def of(self, peer: int) -> PeerReferences:
        """The references sent to and received from ``peer``."""
        view = self._views.get(peer)
        if view is None:
            view = self._views[peer] = PeerReferences(self, peer)
        return view

    # ---- owner ------------------------------------------------------------------------------------------

    def own(self, value: Any) -> Handle:
        """A handle of a value of this worker, which has no forks yet."""
        promise: Promise[Any] = Promise()
        promise.set_result(value)
        return Handle(self, self._ids.next(), 0, self._worker.id, promise)

    def own_later(self) -> Handle:
        """A handle of a value that a remote call of this worker to itself will create."""
        rref_id = self._ids.next()
        return Handle(self, rref_id, 0, self._worker.id, self._owned.find(rref_id))

    # ---- user -------------------------------------------------------------------------------------------

    def reference(self, owner: int) -> Handle:
        """A handle of a value that ``owner`` will be requested to create."""
        rref_id, fork_id = self._ids.next(), self._ids.next()
        with self._lock:
            self._user.create(rref_id, fork_id, owner)
        return Handle(self, rref_id, fork_id, owner)

    def abort_remote(self, handle: Handle) -> None:
        """Undo :meth:`reference` after a failed send, unless the owner has confirmed the fork."""
        with self._lock:
            if not self._user.is_confirmed(handle.fork_id):
                self._user.forget(handle.fork_id)

    def confirm(self, fork_id: int) -> None:
        """Note that the owner has registered ``fork_id``."""
        self._carry_out(self._locked(lambda: self._user.confirm(fork_id)))

    def is_confirmed(self, handle: Handle) -> bool:
        """Whether the owner has registered this reference. Always True on the owner."""
        if not handle.fork_id:
            return True
        with self._lock:
            return self._user.is_confirmed(handle.fork_id)

    def enqueue_release(self, fork_id: int) -> None:
        """Queue the deletion of a fork. Called by finalizers: see Note [Finalizers only enqueue]."""
        if self._closed:
            return
        self._released.append(fork_id)
        self._flush.schedule(FLUSH_SECONDS)

    def flush_releases(self) -> None:
        """Notify owners of the references that were deleted here."""
        effects: list[Effect] = []
        while self._released:
            try:
                fork_id = self._released.popleft()
            except IndexError:  # another thread does the same: the timer, or the one that shuts down
                break
            effects += self._locked(lambda fork_id=fork_id: self._user.release(fork_id))  # type: ignore[misc]
        self._carry_out(effects)

    def check_alive(self, handle: Handle, what: str) -> None:
        """Check that ``handle``, a user's, can still be used for ``what``.

        Raises:
            PeerLostError: if the owner of the value is lost.
            RRefError: if this worker was shut down.
        """
        with self._lock:
            if not self._user.holds(handle.fork_id):
                raise self._dead(handle, what)

    def _dead(self, handle: Handle, what: str) -> RpcError:
        """The error for the use of a deleted ``handle``."""
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

    # ---- serialization -------------------------------------------------------------------------------------

    def fork_for(self, peer: int, handle: Handle) -> tuple[int, int, int, int, str]:
        """Create a fork of ``handle`` for ``peer``."""
        if handle.table is not self:
            raise RRefError(
                "this RRef belongs to another worker, or to one that was shut down. "
                "Cannot call fork an UserRRef after deletion."
            )
        fork_id = self._ids.next()
        if handle.owner == self._worker.id:
            assert handle.promise is not None
            shared = self._owned.share(handle.rref_id, handle.promise, fork_id, peer)
        else:
            with self._lock:
                shared = peer not in self._lost
                if shared and not self._user.holds(handle.fork_id):
                    raise self._dead(handle, "fork an UserRRef")
                if shared:
                    self._user.fork(handle.fork_id, fork_id, peer)
        if not shared:  # the fork would never be deleted
            raise self._worker.loss_of(peer, "a message with an RRef")
        return handle.owner, handle.rref_id, fork_id, self._worker.id, handle.type_name

    def import_fork(self, owner: int, rref_id: int, fork_id: int, parent: int, type_name: str) -> Any:
        """The RRef of a fork that arrived here."""
        if owner == self._worker.id:
            promise = self._owned.find(rref_id)
            if parent == self._worker.id:
                self._carry_out(self._owned.delete(((rref_id, fork_id),)))
            else:
                self._carry_out([SendChildAccept(parent, rref_id, fork_id)])
            return self.make_rref(Handle(self, rref_id, 0, owner, promise, type_name))
        self._hold(owner, rref_id, fork_id, parent)
        return self.make_rref(Handle(self, rref_id, fork_id, owner, None, type_name))

    def _hold(self, owner: int, rref_id: int, fork_id: int, parent: int) -> None:
        """Hold a fork that arrived here; if its owner is lost here, tell its parent that nobody does."""
        with self._lock:
            if owner not in self._lost:
                effects = self._user.import_fork(rref_id, fork_id, owner, parent)
            else:
                effects = [SendChildAccept(parent, rref_id, fork_id)]
        self._carry_out(effects)

    def register(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Request the registration of forks that have arrived in a message, which may be read much later.

        Otherwise their value might be dropped meanwhile, if the worker that sent them is lost.
        """
        for owner, rref_id, fork_id, parent in forks:
            # An owner that is unknown here would have to be looked up, for which the reader must not wait.
            if owner != self._worker.id and self._worker.membership.find_known(owner) is not None:
                self._hold(owner, rref_id, fork_id, parent)

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Release forks that arrived in a message that nobody will read."""
        for owner, rref_id, fork_id, parent in forks:
            if owner == self._worker.id:
                if parent == owner:
                    self.unfork(owner, rref_id, fork_id)
                else:
                    self._carry_out([SendChildAccept(parent, rref_id, fork_id)])
                continue
            self._hold(owner, rref_id, fork_id, parent)
            self.enqueue_release(fork_id)

    def unfork(self, owner: int, rref_id: int, fork_id: int) -> None:
        """Undo a fork made for a message that will not be sent."""
        if owner == self._worker.id:
            self._carry_out(self._owned.delete(((rref_id, fork_id),)))
        else:
            self._carry_out(self._locked(lambda: self._user.child_accepted(fork_id)))

    def release_unread(self, inbound: Inbound) -> None:
        """Release the references in a message that nobody will read."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        payload: Payload | None = getattr(message, "payload", None)
        if payload is not None and payload.forks:
            self.discard(payload.forks)

    def unfork_all(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Undo the forks made for a message that will not be sent."""
        for owner, rref_id, fork_id, _ in forks:
            self.unfork(owner, rref_id, fork_id)

    # ---- control messages -------------------------------------------------------------------------------

    def _on_fork_request(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefForkRequest)
        self._owned.note(message.rref_id, message.fork_id, inbound.envelope.source)
        self._acknowledge(inbound)

    def _on_child_accept(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefChildAccept)
        source = inbound.envelope.source
        self._carry_out(self._locked(lambda: self._user.child_accepted(message.fork_id, source)))
        self._acknowledge(inbound)

    def _on_user_delete(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, RRefUserDelete)
        self._carry_out(self._owned.delete(message.forks, inbound.envelope.source))
        self._acknowledge(inbound)  # last: it fails if the user was lost meanwhile

    def _acknowledge(self, inbound: Inbound) -> None:
        try:
            self._reply(inbound, RRefAck())
        except TransportError as e:
            if type(e) is not TransportError:
                raise
            self._retry(partial(self._acknowledge, inbound), e)

    def _retry(self, send: Callable[[], None], error: TransportError) -> None:
        """Send a message again later for which there was, for example, no descriptor. Both workers live."""
        logger.debug("%s tries again later: %s", self._worker.name, error)
        self._worker.retry(send)

    def peer_lost(self, peer: int) -> None:
        """Drop the references to values of a lost peer; drop its forks after the grace time."""
        self._owned.lose(
            peer, lambda value: self._worker.loss_of(peer, f"the call that makes value {show_id(value)}")
        )
        with self._lock:
            self._lost.add(peer)
            self._views.pop(peer, None)
            self._user.lose(peer)
        self._worker.timer.call_later(ORPHAN_GRACE_SECONDS, partial(self._expire, peer))

    def _expire(self, peer: int) -> None:
        self._carry_out(self._owned.expire(peer) + self._locked(lambda: self._user.expire(peer)))

    # ---- effects ----------------------------------------------------------------------------------------

    def _locked(self, step: Callable[[], list[Effect]]) -> list[Effect]:
        with self._lock:
            return step()

    def _carry_out(self, effects: list[Effect]) -> None:
        deletes: dict[int, list[tuple[int, int]]] = {}
        dropped: list[Promise[Any]] = []
        send = self._send
        for effect in effects:
            if isinstance(effect, SendDelete):
                deletes.setdefault(effect.owner, []).append((effect.rref_id, effect.fork_id))
            elif isinstance(effect, DropValue):
                promise = self._owned.drop(effect.rref_id)
                if promise is not None:
                    dropped.append(promise)
                    del promise  # only the list may keep it
            elif isinstance(effect, SendForkRequest):
                request = RRefForkRequest(effect.rref_id, effect.fork_id)
                send(effect.owner, request, lambda f=effect.fork_id: self.confirm(f))  # type: ignore[misc]
            else:
                send(effect.parent, RRefChildAccept(effect.rref_id, effect.fork_id))
        for owner, forks in deletes.items():
            send(owner, RRefUserDelete(tuple(forks)), lambda f=forks: self._deleted(f))  # type: ignore[misc]
        if dropped and not self._closed:
            # Freeing a value may run a user's __del__, which must not run in the receiver's thread.
            self._worker.pool.submit(dropped.clear)

    def _send(self, peer: int, message: Message, on_ack: Callable[[], None] | None = None) -> None:
        """Send a control message, except after close. ``on_ack`` is called when it is acknowledged."""

        def on_done(promise: Promise[Inbound]) -> None:
            if on_ack is not None and promise.exception() is None:
                on_ack()

        if self._closed:
            return
        try:
            if self._worker.membership.find_known(peer) is None and not may_wait_for_others():
                # To find its address is to ask the store, and the calling thread reads for all others.
                self._worker.submit(partial(self._send, peer, message, on_ack))
            else:
                self._request(peer, message, description=type(message).__name__, on_done=on_done)
        except (TransportError, NotInitializedError, PeerLostError, UnknownWorkerError) as e:
            if type(e) is TransportError:
                self._retry(partial(self._send, peer, message, on_ack), e)
                return
            logger.debug("%s: cannot send %s to worker %d: %s", self._worker.name, message, peer, e)

    def _deleted(self, forks: list[tuple[int, int]]) -> None:
        with self._lock:
            for _, fork_id in forks:
                self._user.deleted(fork_id)

    # ---- ending -----------------------------------------------------------------------------------------

    def busy(self) -> bool:
        """Whether deletions are queued."""
        return bool(self._released)

    def close(self) -> None:
        """Drop all references and values."""
        self._closed = True
        with self._lock:
            self._user = UserForks()
        self._owned.close()

    def statistics(self) -> dict[str, int]:
        """The numbers of values kept for others, of forks that others hold, and of references held here."""
        owned = self._owned.statistics()
        with self._lock:
            return {
                **owned,
                "user_rrefs": len(self._user),
                "unconfirmed": sum(not fork.confirmed for fork in self._user.forks()),
            }


class PeerReferences:
    """The references in messages to and from one peer; ``code`` has the functions sent between the two."""

    __slots__ = ("_peer", "_table")

    def __init__(self, table: ReferenceTable, peer: int) -> None:
        self._table = table
        self._peer = peer

    def fork(self, rref: Any) -> tuple[Any, ...]:
        """Create a fork of ``rref`` for the peer."""
        return self._table.fork_for(self._peer, rref if isinstance(rref, Handle) else rref.handle)

    def unfork(self, fork: tuple[Any, ...]) -> None:
        """Undo a fork that will not be sent to the peer."""
        self._table.unfork(*fork[:3])

    def adopt(self, *fork: Any) -> Any:
        """The RRef of a fork that the peer sent."""
        return self._table.import_fork(*fork)

    def discard(self, forks: Sequence[tuple[int, int, int, int]]) -> None:
        """Release forks that the peer sent in a message that was not read."""
        self._table.discard(forks)
