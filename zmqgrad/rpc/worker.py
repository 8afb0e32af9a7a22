"""One worker: sends calls, serves those of others, and ends in good order.

Everything hangs on a :class:`Worker`; there may be several in one process. Its threads are the receiver's,
the engine pool's and the timekeeper's. The receiver settles outcomes and queues requests; engine threads
run user code; a thread that waits for a call opens the answer itself.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zmqgrad.errors import (
    ClosedError,
    CongestionError,
    NotInitializedError,
    PeerLostError,
    RpcError,
    RpcTimeoutError,
    TransportError,
    UnknownPeerError,
)
from zmqgrad.rpc.callee import Callee
from zmqgrad.rpc.calls import CallTable, LaneOutcome, PendingCall, What, describe
from zmqgrad.rpc.current import act_for
from zmqgrad.rpc.devices import for_answers, for_calls
from zmqgrad.rpc.dispatch import Doors, RequestHandler
from zmqgrad.rpc.futures import Completer, RpcFuture
from zmqgrad.rpc.groups.events import Events
from zmqgrad.rpc.groups.membership import Membership, WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, check_timeout
from zmqgrad.rpc.packing.code import book_of
from zmqgrad.rpc.packing.packing import pack_call
from zmqgrad.rpc.packing.terms import PACKED_NOTHING, Packed, Terms
from zmqgrad.rpc.packing.unpacking import unpack, unpack_tensors
from zmqgrad.rpc.references.table import ReferenceTable
from zmqgrad.rpc.remote_errors import describe_exception, rebuild_exception
from zmqgrad.rpc.serving import ServedCall, ServingTable, cancelled, serve, serve_no_more, time_left
from zmqgrad.rpc.waiting import Waiting
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.runtime.engine_pool import EnginePool, Task
from zmqgrad.runtime.future import Outcome
from zmqgrad.runtime.timekeeper import Timekeeper
from zmqgrad.transport.base import Frame, Inbound, Mailbox
from zmqgrad.wire.ids import IdSource
from zmqgrad.wire.messages import (
    RESPONSE,
    Call,
    Cancel,
    ExceptionReply,
    Message,
    MessageType,
    Payload,
    RemoteCall,
    Result,
    RRefValue,
)
from zmqgrad.wire.tensors import Devices

logger = logging.getLogger(__name__)


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
        self.ids = IdSource(own.id)
        self.timekeeper = Timekeeper(own.name, clock)
        self.pool = EnginePool(
            own.name, options.num_worker_threads, self.timekeeper.call_later, self._prepare_thread
        )
        self.submit = self.pool.submit
        self.calls = CallTable()
        self.serving = ServingTable(clock)
        self.doors = Doors()
        self.codes = book_of(self)
        self.references = ReferenceTable(self)
        self.default_timeout = options.rpc_timeout
        self.lost: dict[int, str] = {}  # peers that are gone, and why that is believed
        self.silent: dict[int, float] = {}  # peers that do not answer heartbeats, and since when
        self._completer = Completer(self.submit, self.timekeeper.call_later, self._open_outcome)
        self.events = Events(self.submit)
        self.waiting = Waiting(self)
        self.wait = self.waiting.wait
        self._closed = False
        self._pid = os.getpid()
        _workers.add(self)
        self._sent = 0
        self._served = 0
        self._terms: dict[tuple[int, bool], Terms] = {}  # by peer, and whether they keep history
        self._answer_terms: dict[tuple[int, bool], Terms] = {}
        self._gradient_devices: dict[int, Devices] = {}
        self.callee = Callee(self)
        self.callee.install(self.doors)
        self.doors.control[MessageType.CANCEL] = self._on_cancel
        self.references.install(self.doors)

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
            self._on_message,
            lambda peer: self.membership.record(peer).endpoints,
            self.pool,
            self.lose,
            self.timekeeper,
            self.suspect,
            self._completer.due,
        )

    # ---- calling ----------------------------------------------------------------------------------------

    def call(
        self,
        to: object,
        function: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: Any = UNSET_RPC_TIMEOUT,
        waits: bool = False,
    ) -> PendingCall:
        """Ask worker ``to`` to run ``function(*args, **kwargs)``; see :meth:`request` for ``waits``."""
        seconds = self.seconds(timeout)
        peer = self.membership.find_here(to)
        if peer is None:
            peer, seconds = self.locate(to, seconds)
        reference, packed = pack_call(function, args, kwargs, self.terms(peer))
        return self.request_call(peer.id, reference, packed, seconds, function, waits=waits)

    def locate(self, to: object, seconds: float) -> tuple[WorkerRecord, float]:
        """The worker that ``to`` means, which others must be asked for, and what is left of ``seconds`` then.

        Raises:
            UnknownWorkerError: if there is none. RpcTimeoutError: if nothing is left.
        """
        if not seconds:
            return self.membership.find(to), 0.0
        began = self.clock.now()
        peer = self.membership.find(to, seconds)
        return peer, max(1e-6, seconds - (self.clock.now() - began))  # 0 would be no limit

    def request_call(
        self,
        peer: int,
        reference: str,
        packed: Packed,
        seconds: float,
        what: What,
        keep: Any = None,
        waits: bool = False,
    ) -> PendingCall:
        """Send a CALL of a function that is packed already."""
        call = Call(reference, packed.payload, seconds)
        return self.request(peer, call, packed, seconds, what, keep, waits=waits)

    def request(
        self,
        peer: int,
        message: Message,
        packed: Packed = PACKED_NOTHING,
        seconds: float = 0.0,
        what: What = "",
        keep: Any = None,
        settled: Callable[[Outcome[Inbound]], None] | None = None,
        waits: bool = False,
    ) -> PendingCall:
        """Send a request that will be answered within ``seconds`` (0: no limit).

        ``keep`` is kept alive until then; ``settled`` is called with the outcome, in whichever thread
        brings it, and must not block. ``waits``: the calling thread goes on to :meth:`wait` at once, so it
        may as well read the answer itself.
        """
        if self._closed:
            raise self._closed_error()
        kind = message.TYPE
        if peer in self.lost:
            self._unfork(peer, packed)
            raise self.loss_of(peer, describe(what))
        if self.doors.outgoing is not None:
            message = self.doors.outgoing(peer, message, packed.tensors, what)
        deadline = self.clock.now() + seconds if seconds else math.inf
        lane = self.mailbox.take_lane(peer) if waits else None
        if lane is None:
            call = PendingCall(self.ids.next(), peer, deadline, seconds, what, keep, kind)
        else:
            call = PendingCall(
                self.ids.next(), peer, deadline, seconds, what, keep, kind, LaneOutcome(lane), lane
            )
        if settled is not None:
            call.outcome.then(settled)
        self.calls.add(call)
        try:
            if peer in self.lost:  # since we looked: whoever noted the loss may not have seen this call
                raise self.loss_of(peer, describe(what))
            self.mailbox.send(
                peer, message, call.message_id, packed.frames, 0 if lane is None else lane.number, seconds
            )
        except BaseException as e:
            self.calls.take(call.message_id)
            if lane is not None:
                lane.give_back()
            if self.doors.unsent is not None:
                self.doors.unsent(message)
            self._unfork(peer, packed)
            error = self._why_unsent(call, e)
            try:
                call.outcome.fail(error)
                if error is e:
                    raise
                raise error from e
            finally:
                del call, error  # its traceback holds this frame: make no cycle of it
        self._sent += 1
        self.waiting.note(deadline)
        return call

    def _why_unsent(self, call: PendingCall, error: BaseException) -> BaseException:
        """What to tell the caller of ``error``, which kept ``call`` from being sent."""
        if isinstance(error, UnknownPeerError):  # it ended before it was ever sent to
            self.lose(call.peer, str(error))
        if isinstance(error, TransportError) and call.peer in self.lost:
            return self.loss_of(call.peer, call.describe())
        if isinstance(error, CongestionError):
            return RpcTimeoutError(f"{self.waiting.over_time(call)}: it was not sent, for {error}")
        return error

    def _closed_error(self) -> NotInitializedError:
        if self._pid == os.getpid():
            return NotInitializedError(f"worker {self.name} has been shut down; call init_rpc again")
        return NotInitializedError(
            f"this process is a fork of process {self._pid}, in which worker {self.name} runs: a fork cannot "
            f"use its connections. Call init_rpc here for a worker of its own, or start processes by spawn "
            f"or forkserver"
        )

    def close_in_fork(self) -> None:
        """In a fork of this worker's process: it is no worker here, and its threads are not there."""
        self._closed = True

    def post(self, peer: int, message: Message, frames: Sequence[Frame] = (), lane: int = 0) -> None:
        """Send a request that is not answered to this worker, if at all."""
        if self._closed:
            raise self._closed_error()
        try:
            self.mailbox.send(peer, message, self.ids.next(), frames, lane, self.default_timeout)
        except CongestionError as e:
            raise RpcTimeoutError(str(e)) from e
        self._sent += 1

    def _on_cancel(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, Cancel)
        self.serving.cancel(inbound.envelope.source, message.call)

    def on_stray(self, inbound: Inbound) -> None:
        """What came in by a lane for nobody who waits there."""
        task = self._on_message(inbound)
        self._completer.pass_on()
        if task is not None:
            try:
                self.pool.submit(task)
            except ClosedError:
                logger.debug("%s: a request came while closing", self.name)

    def serve_here(self, handler: RequestHandler, inbound: Inbound) -> None:
        """In the thread that waits at a lane: a request that came by it, which is part of what it waits for.

        ``handler`` answers for its own errors; those of the system (Ctrl-C) reach the caller.
        """
        if inbound.envelope.source in self.lost:
            self._refuse(inbound)
            return
        self._served += 1
        handler(inbound)

    def future(self, call: PendingCall) -> RpcFuture[Any]:
        """The answer of ``call`` as a future."""
        future = call.future = RpcFuture(call.outcome, self._completer)
        future.what, future.peer = call.what, call.peer
        call.outcome.then(future.answered)
        return future

    def failed(self, error: Exception) -> RpcFuture[Any]:
        """A future of a call that could not be sent."""
        answer: Outcome[Inbound] = Outcome()
        answer.fail(error)
        return self.future_of(answer)

    def future_of(self, answer: Outcome[Inbound]) -> RpcFuture[Any]:
        """An answer as a future."""
        future: RpcFuture[Any] = RpcFuture(answer, self._completer)
        answer.then(future.answered)
        return future

    def _open_outcome(self, outcome: Outcome[Inbound]) -> Any:
        return self.open(outcome.result())

    def open(self, inbound: Inbound) -> Any:
        """The value of an answer.

        Raises:
            what the remote function raised.
        """
        message = inbound.message
        opener = self.doors.openers.get(inbound.envelope.type)  # type: ignore[call-overload]
        tensors = None
        if opener is not None:
            message, tensors = opener(inbound)
        if isinstance(message, ExceptionReply):
            raise rebuild_exception(message)
        if not isinstance(message, (Result, RRefValue)):
            return None
        if tensors is None:
            tensors = unpack_tensors(message.payload, inbound.frames)
        references = self.references.of(inbound.envelope.source)
        return unpack(message.payload, inbound.frames, tensors, references)

    @property
    def closed(self) -> bool:
        """Has it been shut down?"""
        return self._closed

    def seconds(self, timeout: Any) -> float:
        """What a ``timeout`` argument means: seconds, 0 for no limit, -1 for the default.

        Inside a call that is served here, never more than what that call has left.

        Raises:
            ConfigurationError: for anything else. RpcTimeoutError: if that call has no time left.
        """
        seconds = self.default_timeout if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout)
        left = time_left()
        if left == math.inf:
            return seconds
        if left == 0.0:
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout and will now be marked with an error: nobody waits any "
                f"more for the call that {self.name} serves here, so it can make no further calls"
            )
        return min(seconds, left) if seconds else left

    def terms(self, peer: WorkerRecord) -> Terms:
        """On which terms values travel to ``peer``."""
        key = peer.id, self.doors.with_history()
        terms = self._terms.get(key)
        if terms is None:
            same = peer.program == self.membership.own.program
            devices = for_calls(self.membership.own, peer)
            terms = self._terms[key] = Terms(self.references.of(peer.id), same, key[1], devices)
        return terms

    def answer_terms(self, peer: WorkerRecord) -> Terms:
        """The same for answers: tensors go back to the devices that they came from."""
        key = peer.id, self.doors.with_history()
        terms = self._answer_terms.get(key)
        if terms is None:
            devices = for_answers(self.membership.own, peer)
            terms = self._answer_terms[key] = self.terms(peer)._replace(devices=devices)
        return terms

    def gradient_devices(self, peer: int) -> Devices:
        """Where gradients for ``peer`` arrive: those of tensors that it sent, and of answers to it."""
        devices = self._gradient_devices.get(peer)
        if devices is None:
            own, record = self.membership.own, self.membership.record(peer)
            devices = {**for_calls(own, record), **for_answers(own, record)}
            self._gradient_devices[peer] = devices
        return devices

    # ---- serving ----------------------------------------------------------------------------------------

    def _on_message(self, inbound: Inbound) -> Task | None:
        """In the thread that reads; gives what is to be done in an engine thread."""
        kind: MessageType = inbound.envelope.type  # type: ignore[assignment]
        if self.lost and inbound.envelope.source in self.lost:
            self._refuse(inbound)
            return None
        control = self.doors.control.get(kind)
        if control is not None:
            self._served += not kind & RESPONSE
            try:
                control(inbound)
            except (ClosedError, PeerLostError) as e:  # this worker ends just now, or the other has
                logger.debug("%s: nobody to answer %r: %s", self.name, inbound.message, e)
            return None
        if kind & RESPONSE:
            call = self.calls.take(inbound.envelope.message_id)
            if call is None:
                self.drop_unread(inbound)
                return None
            if call.future is not None:
                call.future.in_crowd = True
            call.outcome.set(inbound)
            return None
        self._served += 1
        self._completer.pass_on()  # what this thread does next may take long
        handler = self.doors.requests.get(kind)
        if handler is None:
            logger.warning("%s: nobody here answers %s", self.name, type(inbound.message).__name__)
            return None
        return partial(self._serve, handler, inbound, self.serving.begin(inbound))

    def _refuse(self, inbound: Inbound) -> None:
        """A message of a worker that is gone: one that was on its way, or of one that was only frozen."""
        source = inbound.envelope.source
        self.drop_unread(inbound)
        if inbound.envelope.type & RESPONSE:
            return
        said = f"{self.name} takes no calls of {self.membership.name_of(source)} (worker {source})"
        error = PeerLostError(f"{said}, which was given up: {self.lost[source]}; join anew")
        try:
            self._send_error(inbound, error)
        except (TransportError, RpcError) as e:  # so it is dead indeed
            logger.debug("%s: nobody to refuse: %s", self.name, e)

    def _serve(self, handler: RequestHandler, inbound: Inbound, served: ServedCall | None) -> None:
        """In an engine thread."""
        token = serve(served)
        try:
            if served is not None and served.is_over():
                self._too_late(inbound)
            else:
                handler(inbound)
        except BaseException as e:
            self.reply_error(inbound, e)
        finally:
            if served is not None:
                self.serving.end(served)
            serve_no_more(token)

    def _too_late(self, inbound: Inbound) -> None:
        """A call whose caller gave up while it waited for a thread: it is not run."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        error = RpcTimeoutError(
            f"RPC ran for more than set timeout and will now be marked with an error: its caller had given "
            f"up before {self.name} could run it, so it was not run"
        )
        self.drop_unread(inbound)
        if isinstance(message, RemoteCall):
            made = self.references.expect(inbound.envelope.source, message.rref_id, message.fork_id)
            made.fail(error)
            self.references.made(message.rref_id)
        raise error

    def drop_unread(self, inbound: Inbound) -> None:
        """Nobody will read this message: let go of the references in it."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        payload: Payload | None = getattr(message, "payload", None)
        if payload is not None and payload.forks:
            self.references.discard(payload.forks)

    def _unfork(self, peer: int, packed: Packed) -> None:
        """``packed`` will not be sent: undo the references made for it."""
        references = self.references.of(peer)
        for fork in packed.payload.forks:
            references.unfork(fork)

    def reply(
        self, inbound: Inbound, message: Message, packed: Packed = PACKED_NOTHING, what: str = ""
    ) -> None:
        """Answer ``inbound``."""
        source = inbound.envelope.source
        envelope = inbound.envelope
        try:
            if source in self.lost:
                raise self.loss_of(source, f"the answer to {what}")
            if self.doors.outgoing is not None:
                message = self.doors.outgoing(source, message, packed.tensors, what)
            lane = envelope.lane
            if lane and cancelled():  # nobody waits there any more, and would read it
                lane = 0
            self.mailbox.send(source, message, envelope.message_id, packed.frames, lane)
        except BaseException:
            self._unfork(source, packed)
            raise

    def reply_error(self, inbound: Inbound, error: BaseException) -> None:
        """Answer ``inbound`` by an exception."""
        source = inbound.envelope.source
        if source in self.lost:
            logger.debug("%s: worker %d died before it could be told of %r", self.name, source, error)
            return
        try:
            self._send_error(inbound, error)
        except (TransportError, RpcError) as e:
            logger.warning("%s cannot tell worker %d of %r: %s", self.name, source, error, e)

    def _send_error(self, inbound: Inbound, error: BaseException) -> None:
        reply = describe_exception(error, repr(self.membership.own.info))
        envelope = inbound.envelope
        self.show_failure(envelope.source, reply.traceback)
        self.mailbox.send(envelope.source, reply, envelope.message_id, (), envelope.lane)

    def show_failure(self, source: int, trace: str) -> None:
        """What a call raised shows here as well: the caller may never look at its future."""
        logger.warning("On %s, for %s:\n%s", self.membership.own.info, self.membership.name_of(source), trace)

    # ---- losing -----------------------------------------------------------------------------------------

    def suspect(self, peer: int, seconds: float) -> None:
        """``peer`` has been silent for so long; 0: it answers again. Nothing is given up for that."""
        name = self.membership.name_of(peer)
        if seconds:
            self.silent[peer] = self.clock.now() - seconds
            logger.warning(
                "%s: %s (worker %d) has not answered for %.1f s: stopped, or kept waiting by its machine",
                self.name,
                name,
                peer,
                seconds,
            )
        elif self.silent.pop(peer, None) is not None:
            logger.warning("%s: %s (worker %d) answers again", self.name, name, peer)

    def lose(self, peer: int, why: str) -> None:
        """The process of ``peer`` has ended: nothing waits for it any longer (P2)."""
        if self._closed:
            return
        if peer in self.lost:
            self.mailbox.forget(peer)  # it was told so, at most
            return
        self.lost[peer] = why
        self.silent.pop(peer, None)
        logger.info("%s: %s (worker %d) is gone: %s", self.name, self.membership.name_of(peer), peer, why)
        for call in self.calls.lose(peer):
            call.outcome.fail(self.loss_of(peer, call.describe()))
        self.membership.depart(peer)
        self.serving.lose(peer)
        self.references.peer_lost(peer)
        for known in (self._terms, self._answer_terms):
            known.pop((peer, False), None)
            known.pop((peer, True), None)
        for told in self.doors.peer_lost:
            told(peer, self.loss_of(peer, "a part of it"))
        self.mailbox.forget(peer)  # else the socket would look for it for ever
        record = self.membership.find_former(peer)
        if record is not None:  # of who was never known to join, nobody hears that it is gone
            self.events.lost(record.info, why)

    def loss_of(self, peer: int, what: str) -> PeerLostError:
        """The error for ``what`` was asked of a peer that is gone."""
        return PeerLostError(
            f"{self.membership.name_of(peer)} (worker {peer}) is gone: {self.lost[peer]}; "
            f"{what} will not be answered"
        )

    # ---- ending -----------------------------------------------------------------------------------------

    def fail_all(self, error: RpcError) -> None:
        """Settle every pending call with ``error`` (P3)."""
        for call in self.calls.drain():
            call.outcome.fail(error)

    def counts(self) -> tuple[int, int]:
        """Requests sent and requests received so far."""
        return self._sent, self._served

    def quiet(self) -> bool:
        """Is nothing pending, queued or running here?"""
        return not len(self.calls) and not self.pool.busy() and not self.references.busy()

    def close(self) -> None:
        """Stop at once: pending calls fail, threads are told to end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.membership.close()
        for told in self.doors.closing:
            told()
        self._completer.close()
        self.fail_all(RpcError(f"worker {self.name} was shut down while this call was on its way"))
        self.pool.close()
        self._completer.finish()
        self.references.close()
        self.mailbox.close()
        self.timekeeper.close()

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for all threads; names those that have not ended by ``deadline``."""
        left = self.pool.join(deadline) + self.timekeeper.join(deadline)
        return left + self.mailbox.join(deadline)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.calls)} calls pending, {self.pool!r}"
        return f"<Worker {self.name} id={self.id}: {state}>"


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _close_in_fork() -> None:
    for worker in list(_workers):
        worker.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)
