"""The assembly of a worker: its parts, its start, its end, and what a lost peer means for each part.

There may be several workers in one process. The threads of a worker are those of its thread pool and the
timer's. One thread of the pool at a time reads messages: it sets promises and queues requests. The others run
user code. A thread that waits for a call decodes the reply itself.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from zmqgrad.errors import RpcError, UnknownPeerError
from zmqgrad.rpc.callee import Callee
from zmqgrad.rpc.client import Client
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.current import set_current_worker
from zmqgrad.rpc.directory import Directory
from zmqgrad.rpc.membership.membership import LEFT, LEFT_AT_ONCE, Membership
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from zmqgrad.rpc.peer_contexts import PeerContexts
from zmqgrad.rpc.relaying import Shelf
from zmqgrad.rpc.replies import ReplyDecoder
from zmqgrad.rpc.reply_port import ReplyPorts
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.server import Server
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.transport import tap
from zmqgrad.transport.base import Mailbox, PeerAddress, PeerEnd

logger = logging.getLogger(__name__)

T = TypeVar("T")

OWN_THREADS_SECONDS = 1.0
"""How long threads that run no code of the program have to end after others have used up the time."""


class Worker(WorkerCore):
    """A member of a group.

    Args:
        membership: the known members of the group, this worker included.
        mailbox: this worker's end of the transport, not yet started.
        options: timeouts and threads.
        clock: the source of time.
    """

    def __init__(
        self,
        membership: Membership,
        mailbox: Mailbox,
        options: RpcBackendOptions,
        clock: Clock = MONOTONIC,
    ) -> None:
        super().__init__(membership, mailbox, options, clock)
        _workers.add(self)
        self.references = ReferenceTable(self)
        self.contexts = PeerContexts(membership, self.references, self.hooks)
        self.ports = ReplyPorts(mailbox, clock)
        self.client = Client(self, self.ports, self.contexts, self.references)
        self.replies = ReplyDecoder(self, self.references)
        self.server = Server(self, self.client, self.references, self.replies.queue)
        self.callee = Callee(self, self.server, self.contexts, self.references)
        self.ports.on_unexpected = self.server.on_unexpected
        # Bound here once: a forwarding method would cost a call for each message.
        self.call, self.request, self.request_call = (
            self.client.call,
            self.client.request,
            self.client.request_call,
        )
        self.post, self.wait, self.send_and_wait, self.resolve_timeout = (
            self.client.post,
            self.client.wait,
            self.client.send_and_wait,
            self.client.resolve_timeout,
        )
        self.decode, self.future = self.replies.decode, self.replies.future
        self.reply = self.server.reply
        self.references.connect(self.request, self.reply)
        self.directory = Directory(self)
        self.shelf = Shelf(self)
        self._is_shut = threading.Event()  # close() has done its work

    def _prepare_thread(self) -> None:
        """Initializes a new engine thread: sets its current worker and torch's number of threads.

        OpenMP and MKL keep that number per thread, and torch sets it only in its own threads or when it is
        read. Without this, each engine thread would start helper threads even for small matrices.
        """
        set_current_worker(self)
        torch.get_num_threads()

    # ---- lost peers -------------------------------------------------------------------------------------

    def on_suspected(self, peer: int, seconds: float) -> None:
        """Note that ``peer`` has been silent for ``seconds``; 0: it replies again. Fails nothing."""
        if peer in self.lost:
            return
        name = self.membership.name_of(peer)
        if seconds:
            self.silent[peer] = self.clock.now() - seconds
            logger.warning(
                "%s: %s (worker %d) has not replied for %.1f s: stopped, or its machine is busy",
                self.name,
                name,
                peer,
                seconds,
            )
        elif self.silent.pop(peer, None) is not None:
            logger.warning("%s: %s (worker %d) replies again", self.name, name, peer)

    def lose(self, peer: int, reason: str) -> None:
        """Declare ``peer`` lost. That takes effect behind what has arrived from it. Idempotent."""
        self.mailbox.end(peer, reason)

    def _on_end(self, end: PeerEnd) -> None:
        """The last event of a peer: fail what waits for it and cancel what it requested."""
        peer, reason = end.peer, end.reason
        if self.closed or peer in self.lost:
            return
        self.lost[peer] = reason
        self.silent.pop(peer, None)
        logger.info("%s: %s (worker %d) is lost: %s", self.name, self.membership.name_of(peer), peer, reason)
        if self.tracer is not None:
            self.tracer.peer_lost(peer, reason, reason in (LEFT, LEFT_AT_ONCE))
        self.membership.mark_left(peer)  # first: who is told by a call may look who is left
        self.client.on_peer_lost(peer)
        self.server.in_flight.lose(peer)
        self.references.peer_lost(peer)
        self.contexts.forget(peer)
        for callback in self.hooks.peer_lost:
            callback(peer, self.loss_of(peer, "a part of it"))
        record = self.membership.find_known(peer)
        self.events.lost(peer, None if record is None else record.info, reason)

    # ---- start and end ----------------------------------------------------------------------------------

    def start(self, serving: bool = True) -> None:
        """Start threads; calls can be made from here on.

        Args:
            serving: serve the calls of others; if False, they wait for ``server.serve()``.
        """
        if not serving:
            self.server.hold()
        tap.register(self)
        self.timer.start()
        self.mailbox.start(
            self.server.on_message,
            self._address_of,
            self.pool,
            self._on_end,
            self.timer,
            self.on_suspected,
            self.replies.queue.drain,
        )

    def _address_of(self, peer: int) -> PeerAddress:
        record = self.membership.find_known(peer)
        if record is None:
            if self.closed:
                raise UnknownPeerError(f"{self.name} is closed, and has not looked up worker {peer}")
            record = self.membership.find(peer)
        return PeerAddress(record.endpoints, record.incarnation)

    def ask(
        self, peer: int, function: Callable[..., T], args: Sequence[Any], timeout: float = UNSET_RPC_TIMEOUT
    ) -> T:
        """Call ``function(*args)`` on ``peer``, and return its result. Raises what ``rpc_sync`` does."""
        result: T = self.decode(
            self.send_and_wait(lambda: self.call(peer, function, args, None, timeout, waits=True))
        )
        return result

    def counts(self) -> tuple[int, int, int]:
        """The numbers of requests sent and received so far, and of the sent ones that perhaps were not."""
        return self.client.sent, self.server.served, self.client.perhaps_sent

    def is_idle(self) -> bool:
        """Whether nothing is pending, queued or running here."""
        queued = self.references.busy() or self.replies.queue.unfinished()
        return not (len(self.client.pending) or queued or self.pool.busy())

    def close(self, goodbye: str = "") -> None:
        """Stop at once: pending calls fail, and threads end once their tasks do. Idempotent.

        Args:
            goodbye: why this worker leaves, which others receive as its last message; empty: none.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self.membership.close()
            for callback in self.hooks.closing:
                callback()
            self.replies.queue.close()
            self.client.fail_all(RpcError(f"worker {self.name} was shut down while this call was on its way"))
            self.pool.close()
            self.replies.queue.finish()
            self.references.close()
            self.mailbox.close(goodbye)
            self.server.repeats.close()
            tap.unregister(self)
        finally:
            self._is_shut.set()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait until ``deadline`` for all threads to end; returns the names of those that have not."""
        if not self._is_shut.wait(deadline.timeout()):  # another thread is still closing it
            return [f"{self.name}-close"]
        left = self.pool.join(deadline)
        if left:  # in code of the program, on which the other threads do not depend: they end all the same
            deadline = Deadline.after(max(deadline.left(), OWN_THREADS_SECONDS))
        left += self.mailbox.join(deadline)
        self.timer.close()  # last: the mailbox needs it to close its sockets
        return left + self.timer.join(deadline)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.client.pending)} calls pending, {self.pool!r}"
        return f"<Worker {self.name} id={self.id}: {state}>"


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_in_fork() -> None:
    for worker in list(_workers):
        worker.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)
