"""The client of a worker: sends requests, and ends each by its reply, a timeout or an error.

Each pending call is removed from :class:`~zmqgrad.rpc.calls.PendingCalls` exactly once, by its reply, its
deadline, the loss of the peer, cancellation or shutdown (docs/guarantees.md, P3).
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from msgspec.structs import replace

from zmqgrad import environment
from zmqgrad.errors import (
    ClosedError,
    CongestionError,
    PeerLostError,
    RpcError,
    RpcTimeoutError,
    TransportError,
    UnknownPeerError,
    ZmqgradError,
)
from zmqgrad.rpc.calls import (
    Description,
    PendingCall,
    PendingCalls,
    describe,
    refuse_in_library,
    refused_wait,
)
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.in_flight import time_left_for_calls
from zmqgrad.rpc.membership.membership import WorkerRecord
from zmqgrad.rpc.options import UNSET_RPC_TIMEOUT, check_timeout
from zmqgrad.rpc.peer_contexts import PeerContexts
from zmqgrad.rpc.reply_port import ReplyPorts
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.context import SERIALIZED_NONE, SerializedPayload
from zmqgrad.rpc.serialization.serializer import serialize_call
from zmqgrad.rpc.wait_reports import WaitReporter, locate
from zmqgrad.runtime import collector
from zmqgrad.runtime.blocking import may_wait_for_others
from zmqgrad.runtime.clock import monotonic_ns
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import Alarm
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport import tap
from zmqgrad.transport.base import Frame, Inbound
from zmqgrad.wire.messages import Call, Cancel, ExceptionReply, Message, MessageType, RemoteCall

logger = logging.getLogger(__name__)

_SPANNED = (Call, RemoteCall)

CANCELLABLE = frozenset((MessageType.CALL, MessageType.REMOTE_CALL, MessageType.RREF_FETCH))


class Client:
    """Sends the requests of ``worker``. Thread-safe.

    Args:
        worker: the core of the worker.
        ports: where threads wait for replies.
        contexts: how values are serialized for each peer.
        references: releases the RRefs of messages that are not sent or not read.
    """

    def __init__(
        self, worker: WorkerCore, ports: ReplyPorts, contexts: PeerContexts, references: ReferenceTable
    ) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._mailbox = worker.mailbox
        self._clock = worker.clock
        self._hooks = worker.hooks
        self._lost = worker.lost
        self._next_id = worker.ids.next
        self._ports = ports
        self._context_for = contexts.for_calls
        self._references = references
        self.pending = PendingCalls()
        self._claim = itertools.count().__next__
        self._counting = threading.RLock()  # guards the next two
        self.sent = 0
        self.perhaps_sent = 0
        """How many of these have perhaps not left: Ctrl-C came while they were sent."""
        self._alarm = Alarm(self._check_deadlines, worker.timer)
        self.reporter = WaitReporter(worker, self.pending) if environment.reports_waits() else None
        """Reports what waits for long; None: nothing does."""

    # ---- requests ---------------------------------------------------------------------------------------

    def resolve_timeout(self, timeout: Any) -> float:
        """Resolve a ``timeout`` argument: seconds, 0 for no limit, -1 for the worker's default.

        Inside a call that is served here, the result is at most the time left of that call, unless
        ``remote`` made it.

        Returns:
            Seconds; 0 for no limit.

        Raises:
            ConfigurationError: if ``timeout`` is negative.
            RpcTimeoutError: if the served call has no time left.
        """
        default = self._worker.default_timeout
        seconds = default if timeout is UNSET_RPC_TIMEOUT else check_timeout(timeout, default=default)
        left = time_left_for_calls()
        if left == math.inf:
            return seconds
        if left == 0.0:
            raise RpcTimeoutError(
                f"RPC ran for more than set timeout and will now be marked with an error: nobody waits any "
                f"more for the call that {self._worker.name} serves here, so it can make no further calls"
            )
        return min(seconds, left) if seconds else left

    def call(
        self,
        to: object,
        function: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: Any = UNSET_RPC_TIMEOUT,
        waits: bool = False,
    ) -> PendingCall:
        """Send a call of ``function(*args, **kwargs)`` to worker ``to``; see :meth:`request`.

        A finalizer that interrupts this library leaves that to another thread.
        """
        seconds = self.resolve_timeout(timeout)
        if collector.running and collector.interrupts_library():
            return self._call_later(function, partial(self.call, to, function, args, kwargs), seconds)
        peer = self._membership.find_here(to)
        if peer is None:
            peer, seconds = self.find_peer(to, seconds)
        on_id = None
        if self._hooks.tracer is None:
            reference, serialized = serialize_call(function, args, kwargs, self._context_for(peer))
        else:
            began = monotonic_ns()
            reference, serialized = serialize_call(function, args, kwargs, self._context_for(peer))
            serialized = serialized._replace(nanoseconds=monotonic_ns() - began)
            on_id = self.describer(reference, function, args, kwargs)
        call = Call(reference, serialized.payload, seconds)
        return self.request(peer.id, call, serialized, seconds, function, waits=waits, on_id=on_id)

    def describer(
        self,
        reference: str,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> Callable[[int], None] | None:
        """What tells the tracer of a call by its message id, if the message does not tell it enough."""
        tracer = self._hooks.tracer
        if tracer is None or (reference and not tracer.records_arguments):
            return None
        return partial(tracer.request_described, function=describe(function), args=args, kwargs=kwargs)

    def _call_later(
        self, function: Callable[..., Any], send: Callable[[float], PendingCall], seconds: float
    ) -> PendingCall:
        """Let an engine thread ``send`` a call. Safe in finalizers, wherever they run."""
        deadline = self._clock.now() + seconds if seconds else math.inf
        call = PendingCall(
            self._next_id(), -1, deadline, seconds, function, None, 0, Promise(), self._ports.at_receiver
        )
        self.pending.add(call)
        if self._worker.closed:  # it may have ended all pending calls before
            self._end(call, self._worker.closed_error())
        task = partial(copy_context().run, self._send_later, call, send)
        self._worker.timer.call_soon(partial(self._submit_later, call, task))
        self._alarm.set(deadline)
        return call

    def _submit_later(self, call: PendingCall, task: Task) -> None:
        try:
            self._worker.submit(task)
        except ClosedError:
            self._end(call, self._worker.closed_error())

    def _send_later(self, call: PendingCall, send: Callable[[float], PendingCall]) -> None:
        try:
            sent = send(call.timeout)
        except Exception as e:
            self._end(call, e)
            return

        def on_done(reply: Promise[Inbound]) -> None:
            error = reply.exception()
            if error is not None:
                self._end(call, error)
            elif self.pending.take(call.message_id) is not None:
                call.promise.set_result(reply.result())
            else:
                self._references.release_unread(reply.result())

        sent.promise.add_done_callback(on_done)

    def _end(self, call: PendingCall, error: BaseException) -> None:
        if self.pending.take(call.message_id) is not None:
            call.promise.set_exception(error)

    def find_peer(self, to: object, seconds: float) -> tuple[WorkerRecord, float]:
        """Look up worker ``to`` in the group's directory.

        Returns:
            The worker, and what is left of ``seconds`` (0: no limit).

        Raises:
            UnknownWorkerError: if there is no such worker.
            RpcTimeoutError: if the directory does not reply in time.
        """
        if not seconds:
            return self._membership.find(to), 0.0
        began = self._clock.now()
        peer = self._membership.find(to, seconds)
        return peer, max(1e-6, seconds - (self._clock.now() - began))  # 0 would mean no limit

    def request_call(
        self,
        peer: int,
        reference: str,
        serialized: SerializedPayload,
        seconds: float,
        description: Description,
        keepalive: Any = None,
        waits: bool = False,
        on_id: Callable[[int], None] | None = None,
        reply_to: int = 0,
    ) -> PendingCall:
        """Send a CALL whose function and arguments are serialized already; see :meth:`request`."""
        call = Call(reference, serialized.payload, seconds)
        return self.request(
            peer,
            call,
            serialized,
            seconds,
            description,
            keepalive,
            waits=waits,
            on_id=on_id,
            reply_to=reply_to,
        )

    def request(
        self,
        peer: int,
        message: Message,
        serialized: SerializedPayload = SERIALIZED_NONE,
        seconds: float = 0.0,
        description: Description = "",
        keepalive: Any = None,
        on_done: Callable[[Promise[Inbound]], None] | None = None,
        waits: bool = False,
        on_id: Callable[[int], None] | None = None,
        reply_to: int = 0,
    ) -> PendingCall:
        """Send a request.

        Args:
            peer: the worker id of the receiver.
            message: the header; ``serialized`` has its payload and frames.
            seconds: the timeout; 0 for no limit.
            description: what is requested, for errors and logs.
            keepalive: an object to keep alive until the reply arrives.
            on_done: called with the promise in the thread that sets it; must not block.
            waits: the calling thread calls :meth:`wait` next, so it may read the reply itself.
            on_id: called with the message id before the request is sent.
            reply_to: unless ``waits``: the number of the reply port that the calling thread reads next.

        Raises:
            NotInitializedError: if the worker is closed.
            PeerLostError: if the peer is lost.
            RpcTimeoutError: if too many bytes are in flight to the peer for ``seconds``.
            RpcError: if a finalizer that interrupts this library calls this.
            TransportError: if the message cannot be sent.
        """
        if collector.running:
            refuse_in_library(description)
        if self._worker.closed:
            raise self._worker.closed_error()
        if peer in self._lost:
            self._references.unfork_all(serialized.payload.forks)
            raise self._worker.loss_of(peer, describe(description))
        try:
            kind = message.TYPE
            span = None
            if tap.spans is not None and isinstance(message, _SPANNED):
                span = tap.spans.call(
                    describe(description), self._worker.name, self._membership.name_of(peer)
                )
                message = replace(message, traceparent=span.traceparent)
            if self._hooks.request_interceptor is not None:
                message = self._hooks.request_interceptor(peer, message, serialized.tensors, description)
            deadline = self._clock.now() + seconds if seconds else math.inf
            port = self._ports.acquire(peer) if waits else self._ports.at_receiver
            call = PendingCall(
                self._next_id(), peer, deadline, seconds, description, keepalive, kind, port.promise(), port
            )
            if on_done is not None:
                call.promise.add_done_callback(on_done)
            if span is not None:
                call.promise.add_done_callback(partial(_end_span, span))
            if waits:
                call.claimant, call.claim = threading.get_ident(), self._claim()
        except BaseException:  # nothing was sent
            self._references.unfork_all(serialized.payload.forks)
            raise
        was_counted = was_sent = False
        try:
            self.pending.add(call)
            # What happened since the first checks may have missed this call.
            if self._worker.closed:
                raise self._worker.closed_error()
            if peer in self._lost:
                raise self._worker.loss_of(peer, describe(description))
            if on_id is not None:
                on_id(call.message_id)
            if self._hooks.tracer is not None:
                serialized.tell(self._hooks.tracer, peer, call.message_id)
            number = port.number or reply_to
            was_counted = True
            with self._counting:  # a shutdown waits until as many were served
                self.sent += 1
            self._mailbox.send(peer, message, call.message_id, serialized.frames, number, seconds)
            was_sent = True
            if self.reporter is not None:
                self.reporter.add(call)
            if deadline < self._alarm.at:
                self._alarm.set(deadline)
        except BaseException as e:
            if was_sent:  # Ctrl-C
                self.give_up(call)
                raise
            self.pending.take(call.message_id)
            if was_counted:
                self._count_failed(e)
            if was_counted and not isinstance(e, ZmqgradError):  # its receiver may use what belongs to it
                port.abandon(self._ports.on_unexpected)
                call.promise.set_exception(e)
                raise
            port.release()
            if self._hooks.on_send_failed is not None:
                self._hooks.on_send_failed(message)
            self._references.unfork_all(serialized.payload.forks)
            error = self._send_error(call, e)
            try:
                call.promise.set_exception(error)
                if error is e:
                    raise
                raise error from e
            finally:
                del call, error  # the traceback refers to this frame: avoid a reference cycle
        return call

    def _count_failed(self, error: BaseException) -> None:
        """``error`` ended the sending of a request that was counted.

        What a signal handler raises comes behind a system call, by which the request may have left.
        """
        with self._counting:
            if isinstance(error, ZmqgradError):
                self.sent -= 1
            else:
                self.perhaps_sent += 1

    def _send_error(self, call: PendingCall, error: BaseException) -> BaseException:
        """The exception for the caller when ``error`` prevented ``call`` from being sent."""
        if (loss := self._loss_behind(error, call.peer, call.describe())) is not None:
            return loss
        if isinstance(error, ClosedError) and self._worker.closed:  # since the checks
            return self._worker.closed_error()
        if isinstance(error, CongestionError):
            return RpcTimeoutError(f"{self._timeout_error(call)}: it was not sent, for {error}")
        return error

    def _loss_behind(self, error: BaseException, peer: int, what: str) -> PeerLostError | None:
        """The loss of ``peer`` that is behind ``error``, with which ``what`` could not be sent, if any."""
        if isinstance(error, TransportError) and peer in self._lost:
            return self._worker.loss_of(peer, what)
        if isinstance(error, UnknownPeerError):  # it ended before the first message to it
            self._worker.lose(peer, str(error))
            return self._worker.loss_of(peer, what, str(error))
        if isinstance(error, ClosedError) and not self._worker.closed:  # of its end we are to be told next
            return self._worker.loss_of(peer, what, str(error))
        return None

    def post(self, peer: int, message: Message, frames: Sequence[Frame] = (), port: int = 0) -> None:
        """Send a message that has no reply to this worker.

        Args:
            port: the number of the reply port at which ``peer`` waits for it; 0: its receiver.

        Raises:
            NotInitializedError: if the worker is closed.
            PeerLostError: if the peer is lost.
            RpcTimeoutError: if too many bytes stay in flight to the peer.
            TransportError: if the message cannot be sent.
        """
        if self._worker.closed:
            raise self._worker.closed_error()
        with self._counting:  # as in request
            self.sent += 1
        try:
            self._mailbox.send(peer, message, self._next_id(), frames, port, self._worker.default_timeout)
        except BaseException as e:
            self._count_failed(e)
            if isinstance(e, CongestionError):
                raise RpcTimeoutError(str(e)) from e
            loss = self._loss_behind(e, peer, type(message).__name__)
            if loss is None:
                raise
            raise loss from e

    # ---- replies ----------------------------------------------------------------------------------------

    def on_reply(self, inbound: Inbound) -> None:
        """Handle a reply that the receiver has read."""
        envelope = inbound.envelope
        call = self.pending.take_replied(envelope.message_id, envelope.source)
        if call is None:
            self._references.release_unread(inbound)
            return
        payload = getattr(getattr(inbound.message, "wrapped", inbound.message), "payload", None)
        if payload is not None and payload.forks:  # it may be read much later
            self._references.register(payload.forks)
        if call.future is not None:
            call.future.batched = True
        call.promise.set_result(inbound)

    def wait(self, call: PendingCall) -> Inbound:
        """Wait for the reply of ``call``.

        Raises:
            RpcTimeoutError: if it does not arrive in time.
            PeerLostError: if the peer is lost.
            RpcError: if a finalizer calls this in a thread that must not wait.
        """
        promise, port = call.promise, call.port
        call.claimant = 0
        if not (may_wait_for_others() or promise.done()):
            port.abandon(self._ports.on_unexpected)
            raise refused_wait(call.description)
        abandoned = failed = True
        tracer = self._hooks.tracer
        try:
            if tracer is not None:
                tracer.wait_begun(call.peer, call.message_id)
            while (inbound := port.receive(promise, call.deadline)) is not None:
                envelope = inbound.envelope
                if envelope.message_id != call.message_id or envelope.source != call.peer:
                    self._ports.on_unexpected(inbound)
                elif self.pending.take(call.message_id) is not None:
                    promise.set_result(inbound)
                    abandoned = failed = False
                    return inbound
                else:  # another thread has removed the call and is about to set its promise
                    self._references.release_unread(inbound)
                    promise.wait_done()
            if promise.done() or not self._expire(call):
                promise.wait_done()  # returns at once, unless another thread is just setting it
                abandoned = promise.exception() is not None and call.peer not in self._lost
            failed = abandoned or promise.exception() is not None
        except BaseException:  # Ctrl-C
            abandoned = self.cancel(call)
            raise
        finally:
            if abandoned:
                port.abandon(self._ports.on_unexpected)
            else:
                port.release()
            if tracer is not None:
                tracer.wait_ended(call.peer, call.message_id, failed)
        try:
            return promise.result()
        finally:
            del call, promise  # the traceback refers to this frame: avoid a reference cycle

    def send_and_wait(self, send: Callable[[], PendingCall]) -> Inbound:
        """Wait for the reply of the call that ``send`` sends, with ``waits``. Raises what both of them do.

        An interrupt at any moment gives the call up.
        """
        call, before = None, self._claim()
        try:
            call = send()
            return self.wait(call)
        except BaseException:
            if may_wait_for_others():  # otherwise the callee is to run it all the same
                self._give_up_begun(call, before)
            raise
        finally:
            del call  # the traceback of an error refers to this frame: avoid a reference cycle

    def _give_up_begun(self, call: PendingCall | None, before: int) -> None:
        """Give up ``call``; None: that of this thread, if an interrupt came while it was being returned.

        A call that was claimed ``before`` is not it: a signal handler, whose call has failed, interrupts it.
        """
        if call is not None:
            self.give_up(call)
            return
        me = threading.get_ident()
        for begun in [each for each in self.pending.all() if each.claimant == me and each.claim > before]:
            self.give_up(begun)

    def give_up(self, call: PendingCall) -> None:
        """Cancel ``call``, if it is pending, and give its port back. Idempotent."""
        self.cancel(call)
        call.port.abandon(self._ports.on_unexpected)

    def cancel(self, call: PendingCall) -> bool:
        """Cancel ``call``: notify the callee, or release what the reply holds if it is here already.

        Returns:
            Whether the call was still pending, so that its reply may still arrive.
        """
        if self.pending.take(call.message_id) is not None:
            call.promise.set_exception(RpcError(f"{call.describe()} was given up by its caller"))
            self._send_cancel(call)
            return True
        if call.promise.done() and call.promise.exception() is None:
            self._references.release_unread(call.promise.result())
        return False

    def _send_cancel(self, call: PendingCall) -> None:
        if call.kind not in CANCELLABLE or call.peer in self._lost:
            return
        try:
            self.post(call.peer, Cancel(call.message_id))
        except (TransportError, RpcError) as e:
            logger.debug("%s: cannot cancel %s: %s", self._worker.name, call.describe(), e)

    # ---- deadlines --------------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        expired = self.pending.expire(self._clock.now())
        self._alarm.set(self.pending.next_deadline())
        self._time_out(expired)

    def _expire(self, call: PendingCall) -> bool:
        """Time ``call`` out, in the thread that waits for it. False if another thread ends it."""
        if self.pending.take(call.message_id) is None:
            return False
        self._time_out([call])
        return True

    def _time_out(self, calls: list[PendingCall]) -> None:
        self._fail(calls, self._timeout_error)
        for call in calls:
            self._send_cancel(call)

    def _timeout_error(self, call: PendingCall) -> RpcTimeoutError:
        since = self._worker.silent.get(call.peer)
        silence = f", silent for {self._clock.now() - since:.1f} s by now" if since is not None else ""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be marked "
            f"with an error: {call.describe()} on {self._membership.name_of(call.peer)}{silence}"
            f"; {self._locate(call)}"
        )

    def _locate(self, call: PendingCall) -> str:
        """What is known of a call that gets no reply."""
        return locate(self._hooks.tracer, call) or (
            f"{len(self.pending)} other calls are pending here. Set {environment.TRACE}=DIR to learn "
            f"where it is"
        )

    # ---- failures ---------------------------------------------------------------------------------------

    def on_peer_lost(self, peer: int) -> None:
        """Fail the pending calls to a lost peer."""
        self._fail(self.pending.lose(peer), self._loss_error)

    def _loss_error(self, call: PendingCall) -> PeerLostError:
        place = locate(self._hooks.tracer, call)
        return self._worker.loss_of(call.peer, f"{call.describe()} ({place})" if place else call.describe())

    def fail_all(self, error: RpcError) -> None:
        """Fail every pending call with ``error``."""
        self._fail(self.pending.drain(), lambda _: error)

    def _fail(self, calls: list[PendingCall], make_error: Callable[[PendingCall], RpcError]) -> None:
        """End each of ``calls``, which are not pending any more, whatever fails for another one."""
        tracer = self._hooks.tracer
        for call in calls:
            try:
                error = make_error(call)
                if tracer is not None:
                    tracer.call_failed(call.peer, call.message_id, type(error).__name__)
            except Exception as e:
                logger.exception("%s cannot tell how call %d failed", self._worker.name, call.message_id)
                error = RpcError(
                    f"a call to worker {call.peer} failed; telling how raised {type(e).__name__}"
                )
            call.promise.set_exception(error)


def _end_span(span: tap.OutgoingSpan, reply: Promise[Inbound]) -> None:
    error = reply.exception()
    if error is not None:
        span.end(f"{type(error).__name__}: {error}")
        return
    message = reply.result().message
    span.end(f"{message.kind}: {message.text}" if isinstance(message, ExceptionReply) else "")
