"""A worker as a whole: its parts, its threads, its start and its end.

Everything hangs on a :class:`Worker`; there may be several in one process. Its threads are the receiver's,
the engine pool's and the timekeeper's. The receiver settles outcomes and queues requests; engine threads
run user code; a thread that waits for a call opens the answer itself.
"""

from __future__ import annotations

import os
import weakref

import torch

from zmqgrad.errors import NotInitializedError, RpcError
from zmqgrad.rpc.callee import Callee
from zmqgrad.rpc.calls import CallTable
from zmqgrad.rpc.current import act_for
from zmqgrad.rpc.dispatch import Doors
from zmqgrad.rpc.groups.events import Events
from zmqgrad.rpc.groups.membership import Membership
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.rpc.packing.code import book_of
from zmqgrad.rpc.packing.terms import Packed
from zmqgrad.rpc.references.table import ReferenceTable
from zmqgrad.rpc.serving import ServingTable
from zmqgrad.rpc.waiting import Waiting
from zmqgrad.rpc.worker.answers import Answers
from zmqgrad.rpc.worker.calling import Calling
from zmqgrad.rpc.worker.losing import Losing
from zmqgrad.rpc.worker.receiving import Receiving
from zmqgrad.rpc.worker.replying import Replying
from zmqgrad.rpc.worker.terms import PeerTerms
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.runtime.thread_pool import ThreadPool
from zmqgrad.runtime.timer import TimerThread
from zmqgrad.transport.base import Inbound, Mailbox, PeerAddress
from zmqgrad.wire.ids import IdSource
from zmqgrad.wire.messages import Payload


class Worker:
    """A member of a group.

    Args:
        membership: who takes part, this worker included.
        mailbox: its end of the transport, not yet started.
        options: timeouts and threads.
    """

    def __init__(
        self,
        membership: Membership,
        mailbox: Mailbox,
        options: RpcBackendOptions,
        clock: Clock = MONOTONIC,
    ) -> None:
        own = membership.own
        self.name = own.name
        self.id = own.id
        self.membership = membership
        self.mailbox = mailbox
        self.options = options
        self.clock = clock
        self.default_timeout = options.rpc_timeout
        self.closed = False  # written by close() alone
        self._pid = os.getpid()
        _workers.add(self)
        self.ids = IdSource(own.id)
        self.timekeeper = TimerThread(own.name, clock)
        self.pool = ThreadPool(own.name, options.num_worker_threads, self._prepare_thread)
        self.submit = self.pool.submit
        self.calls = CallTable()
        self.serving = ServingTable(clock)
        self.doors = Doors()
        self.events = Events(self.submit)
        self.codes = book_of(self)
        self.references = ReferenceTable(self)
        # Each part takes what stands above it. What others ask of one they find here, with no step between: a
        # method that only calls another would be paid for at every message.
        self.peer_terms = PeerTerms(membership, self.references, self.doors)
        self.terms, self.answer_terms = self.peer_terms.for_calls, self.peer_terms.for_answers
        self.gradient_devices, self.maps_devices = self.peer_terms.for_gradients, self.peer_terms.maps_devices
        self.losing = Losing(self)
        self.lost, self.silent = self.losing.lost, self.losing.silent
        self.lose, self.suspect, self.loss_of = self.losing.lose, self.losing.suspect, self.losing.loss_of
        self.waiting = Waiting(self)
        self.wait = self.waiting.wait
        self.calling = Calling(self)
        self.call, self.request_call = self.calling.call, self.calling.request_call
        self.request, self.post = self.calling.request, self.calling.post
        self.seconds, self.locate = self.calling.seconds, self.calling.locate
        self.answers = Answers(self)
        self.open, self.failed = self.answers.open, self.answers.failed
        self.future, self.future_of = self.answers.future, self.answers.future_of
        self.replying = Replying(self)
        self.reply, self.reply_error = self.replying.reply, self.replying.reply_error
        self.refuse, self.show_failure = self.replying.refuse, self.replying.show_failure
        self.receiving = Receiving(self)
        self.on_stray, self.serve_here = self.receiving.on_stray, self.receiving.serve_here
        self.callee = Callee(self)
        for part in (self.receiving, self.callee, self.references):
            part.install(self.doors)

    def _prepare_thread(self) -> None:
        """In a new engine thread: it acts for this worker, with as many threads as torch was told to use.

        OpenMP and MKL keep that number by thread, and torch sets it in threads of its own only, or when asked
        for it. Without this, each engine thread would wake helpers of its own for matrices of a few rows.
        """
        act_for(self)
        torch.get_num_threads()

    def start(self) -> None:
        """Start threads; calls can be made and are served from here on."""
        self.timekeeper.start()
        self.mailbox.start(
            self.receiving.on_message,
            self._address_of,
            self.pool,
            self.lose,
            self.timekeeper,
            self.suspect,
            self.answers.completer.due,
        )

    def _address_of(self, peer: int) -> PeerAddress:
        record = self.membership.record(peer)
        return PeerAddress(record.endpoints, record.incarnation)

    def drop_unread(self, inbound: Inbound) -> None:
        """Nobody will read this message: let go of the references in it."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        payload: Payload | None = getattr(message, "payload", None)
        if payload is not None and payload.forks:
            self.references.discard(payload.forks)

    def drop_unsent(self, peer: int, packed: Packed) -> None:
        """``packed`` will not be sent: undo the references made for it."""
        references = self.references.of(peer)
        for fork in packed.payload.forks:
            references.unfork(fork)

    def counts(self) -> tuple[int, int]:
        """Requests sent and requests received so far."""
        return self.calling.sent, self.receiving.served

    def quiet(self) -> bool:
        """Is nothing pending, queued or running here?"""
        return not len(self.calls) and not self.pool.busy() and not self.references.busy()

    def fail_all(self, error: RpcError) -> None:
        """Settle every pending call with ``error`` (P3)."""
        for call in self.calls.drain():
            call.outcome.set_exception(error)

    def close(self) -> None:
        """Stop at once: pending calls fail, threads are told to end. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.membership.close()
        for told in self.doors.closing:
            told()
        completer = self.answers.completer
        completer.close()
        self.fail_all(RpcError(f"worker {self.name} was shut down while this call was on its way"))
        self.pool.close()
        completer.finish()
        self.references.close()
        self.mailbox.close()
        self.timekeeper.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for all threads; names those that have not ended by ``deadline``."""
        left = self.pool.join(deadline) + self.timekeeper.join(deadline)
        return left + self.mailbox.join(deadline)

    def closed_error(self) -> NotInitializedError:
        """For a call that is made after the end, or in a fork."""
        if self._pid == os.getpid():
            return NotInitializedError(f"worker {self.name} has been shut down; call init_rpc again")
        return NotInitializedError(
            f"this process is a fork of process {self._pid}, in which worker {self.name} runs: a fork cannot "
            f"use its connections. Call init_rpc here for a worker of its own, or start processes by spawn "
            f"or forkserver"
        )

    def close_in_fork(self) -> None:
        """In a fork of this worker's process: it is no worker here, and its threads are not there."""
        self.closed = True

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.calls)} calls pending, {self.pool!r}"
        return f"<Worker {self.name} id={self.id}: {state}>"


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_in_fork() -> None:
    for worker in list(_workers):
        worker.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)
