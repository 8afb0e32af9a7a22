"""The server of a worker: dispatches incoming messages, runs requests in engine threads, and replies.

A message is one of three kinds: a reply, which the client gets; a control message, handled at once in the
thread that reads; or a request, which becomes a task of the thread pool.
"""

from __future__ import annotations

import logging
import threading
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

from zmqgrad.errors import ClosedError, PeerLostError, RpcError, RpcTimeoutError, TransportError
from zmqgrad.rpc.client import Client
from zmqgrad.rpc.core import WorkerCore
from zmqgrad.rpc.futures import CompletionQueue
from zmqgrad.rpc.hooks import RequestHandler
from zmqgrad.rpc.in_flight import InFlightRequest, InFlightRequests, cancelled, end_serving, start_serving
from zmqgrad.rpc.remote_errors import describe_exception, show_exception
from zmqgrad.rpc.rref.table import ReferenceTable
from zmqgrad.rpc.serialization.context import SERIALIZED_NONE, SerializedPayload
from zmqgrad.runtime.blocking import may_wait_for_others
from zmqgrad.runtime.repeat_log import RepeatLog
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import RESPONSE, Cancel, Message, MessageType, RemoteCall
from zmqgrad.wire.tensors.torch_internals import function_modes

logger = logging.getLogger(__name__)

is_grad_enabled = torch.is_grad_enabled


def _reset_torch_modes() -> None:
    """Undo what an earlier function left set in this thread: ``torch.set_grad_enabled(False)``, ...

    What a request sees must not depend on the thread that serves it.
    """
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


class Server:
    """Handles what others send to ``worker``, in the thread that has read it. Thread-safe.

    Args:
        worker: the core of the worker.
        client: gets the replies.
        references: releases the RRefs of messages that are not read or not sent.
        completions: the futures whose replies have arrived.
    """

    def __init__(
        self, worker: WorkerCore, client: Client, references: ReferenceTable, completions: CompletionQueue
    ) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._mailbox = worker.mailbox
        self._hooks = worker.hooks
        self._lost = worker.lost
        self._on_reply = client.on_reply
        self._references = references
        self._completions = completions
        self.in_flight = InFlightRequests(worker.clock)
        self._counting = threading.RLock()  # guards the next
        self.served = 0
        self.repeats = RepeatLog(logger, worker.name)
        self._lock = threading.Lock()  # guards _held
        self._held: list[Task] | None = None  # requests that arrive before serve(); None: they run at once
        self._control, self._requests = worker.hooks.control, worker.hooks.requests
        self._reports = worker.hooks.reports
        self._control[MessageType.CANCEL] = self._on_cancel

    # ---- dispatch ---------------------------------------------------------------------------------------

    def on_message(self, inbound: Inbound) -> Task | None:
        """Handle a message in the thread that reads; returns the task for an engine thread, if any."""
        kind: MessageType = inbound.envelope.type  # type: ignore[assignment]
        control = self._control.get(kind)
        if control is not None:
            if not kind & RESPONSE:
                self._count_served()
            try:
                control(inbound)
            except (ClosedError, PeerLostError) as e:  # this worker is just closing, or the peer is lost
                logger.debug("%s: cannot reply to %r: %s", self._worker.name, inbound.message, e)
            return None
        if kind & RESPONSE:
            self._on_reply(inbound)
            return None
        with self._counting:  # threads at reply ports count, too
            self.served += 1
        handler = self._requests.get(kind)
        if handler is None:
            self.repeats.warning(f"{self._worker.name}: no handler for {type(inbound.message).__name__}")
            return None
        message = inbound.message
        if kind in self._reports:
            self._reports[kind](inbound)
        message = getattr(message, "wrapped", message)
        payload = getattr(message, "payload", None)
        if payload is not None and payload.forks:
            self._references.register(payload.forks)
        task = partial(self._serve, handler, inbound, self.in_flight.begin(inbound.envelope, message))
        return task if self._held is None else self._hold(task)

    def hold(self) -> None:
        """Keep requests that arrive until :meth:`serve` is called."""
        self._held = []

    def _hold(self, task: Task) -> Task | None:
        with self._lock:
            if self._held is None:
                return task
            self._held.append(task)
            return None

    def serve(self) -> None:
        """Serve requests from now on, those that were kept included. Idempotent.

        Raises:
            ClosedError: if the worker is closed.
        """
        with self._lock:
            held, self._held = self._held or [], None
        for task in held:
            self._worker.submit(task)

    def on_unexpected(self, inbound: Inbound) -> None:
        """Handle a message that arrived at a reply port whose thread did not wait for it."""
        task = self.on_message(inbound)
        self._completions.flush()
        if task is not None:
            try:
                self._worker.submit(task)
            except ClosedError:
                logger.debug("%s: a request arrived while closing", self._worker.name)

    def serve_here(self, handler: RequestHandler, inbound: Inbound) -> None:
        """Serve a request that arrived at a reply port, in the thread that waits there for its effect.

        ``handler`` replies with its own errors; those of the system (Ctrl-C) reach the caller.
        """
        self._count_served()
        handler(inbound)

    def _count_served(self) -> None:
        with self._counting:  # threads at reply ports count, too
            self.served += 1

    def _serve(self, handler: RequestHandler, inbound: Inbound, request: InFlightRequest | None) -> None:
        """Serve a request in an engine thread, which may wait for the store if the sender is unknown here."""
        envelope, failed = inbound.envelope, False
        record = self._membership.find_known(envelope.source)
        if (record is None or record.incarnation != envelope.incarnation) and not self._is_member(envelope):
            if self._membership.is_current() or envelope.source in self._lost:
                self._refuse_stranger(inbound, request)
            elif request is not None and request.is_over():
                self.in_flight.end(request)  # nobody waits for it
            else:
                self._serve_later(handler, inbound, request)
            return
        tracer = self._hooks.tracer
        if tracer is not None:
            tracer.request_started(envelope.source, envelope.message_id)
        token = start_serving(request)
        if not is_grad_enabled() or function_modes():
            _reset_torch_modes()
        try:
            if request is not None and request.is_over():
                self._reject_expired(inbound)
            else:
                copy_context().run(handler, inbound)  # context variables that it sets end with it
        except BaseException as e:
            failed = True
            self.reply_error(inbound, e)
        finally:
            if tracer is not None:
                tracer.request_finished(envelope.source, envelope.message_id, failed)
            if request is not None and not request.is_deferred:
                self.in_flight.end(request)
            end_serving(token)

    def _is_member(self, envelope: Envelope) -> bool:
        """Whether the sender of a message is the worker that it claims to be. May query the store."""
        try:
            return self._membership.record(envelope.source).incarnation == envelope.incarnation
        except RpcError as e:
            logger.debug("%s does not know the sender of a request: %s", self._worker.name, e)
            return False

    def _serve_later(
        self, handler: RequestHandler, inbound: Inbound, request: InFlightRequest | None
    ) -> None:
        """Serve a request once the store, which does not reply just now, can say who has sent it."""
        self.repeats.warning(
            f"{self._worker.name} serves {type(inbound.message).__name__} later: the store, which has to say "
            f"who worker {inbound.envelope.source} is, does not reply"
        )
        self._worker.retry(partial(self._serve, handler, inbound, request))

    def _refuse_stranger(self, inbound: Inbound, request: InFlightRequest | None) -> None:
        """Drop a request unread whose sender is not the member of the group that it claims to be."""
        source = inbound.envelope.source
        self.repeats.warning(
            f"{self._worker.name} refused {type(inbound.message).__name__}: its sender claims to be worker "
            f"{source}, and is another process"
        )
        inbound.release_frames()
        if request is not None:
            self.in_flight.end(request)

    def _reject_expired(self, inbound: Inbound) -> None:
        """Reject a call whose caller stopped waiting while it was queued."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        error = RpcTimeoutError(
            f"RPC ran for more than set timeout and will now be marked with an error: its caller had given "
            f"up before {self._worker.name} could run it, so it was not run"
        )
        self._references.release_unread(inbound)
        if isinstance(message, RemoteCall):
            source, references = inbound.envelope.source, self._references
            references.create_pending(source, message.rref_id, message.fork_id).set_exception(error)
            references.value_ready(message.rref_id)
        raise error

    def _on_cancel(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, Cancel)
        self.in_flight.cancel(inbound.envelope.source, message.call)

    # ---- replies ----------------------------------------------------------------------------------------

    def reply(
        self,
        inbound: Inbound,
        message: Message,
        serialized: SerializedPayload = SERIALIZED_NONE,
        description: str = "",
    ) -> None:
        """Send ``message`` as the reply to ``inbound``.

        Raises:
            PeerLostError: if the requester is lost.
            TransportError: if the reply cannot be sent.
        """
        envelope = inbound.envelope
        source = envelope.source
        if self._membership.find_known(source) is None and not may_wait_for_others():
            # To find its address is to ask the store, and the calling thread reads for all others.
            again = partial(self._reply_to_stranger, inbound, message, serialized, description)
            self._worker.submit(again)
            return
        try:
            if source in self._lost:
                raise self._worker.loss_of(source, f"the reply to {description}")
            if self._hooks.request_interceptor is not None:
                message = self._hooks.request_interceptor(source, message, serialized.tensors, description)
            port = envelope.channel
            if port and cancelled():  # no thread waits at the port any more; the receiver reads it instead
                port = 0
            if self._hooks.tracer is not None:
                serialized.tell(self._hooks.tracer, source, envelope.message_id, is_reply=True)
            self._mailbox.send(source, message, envelope.message_id, serialized.frames, port)
        except BaseException:
            self._references.unfork_all(serialized.payload.forks)
            raise

    def _reply_to_stranger(self, inbound: Inbound, *reply: Any) -> None:
        """Reply in an engine thread, which may wait for the store."""
        try:
            self.reply(inbound, *reply)
        except (RpcError, TransportError, ClosedError) as e:
            logger.debug("%s: cannot reply to %r: %s", self._worker.name, inbound.message, e)

    def reply_error(self, inbound: Inbound, error: BaseException) -> None:
        """Reply to ``inbound`` with an exception. Failures to send it are logged.

        If there is no connection to the requester and none can be opened now, this is tried again later.
        """
        source, own = inbound.envelope.source, self._worker.name
        if source in self._lost:
            logger.debug("%s: worker %d is lost and does not get %r", own, source, error)
            return
        if self._worker.closed and isinstance(error, ClosedError):  # raised by the failed send of the reply
            logger.debug("%s is closed: worker %d does not get %r", own, source, error)
            return
        try:
            self._send_error(inbound, error)
        except (TransportError, RpcError) as e:
            self.repeats.warning(f"{own} cannot send {show_exception(error)} to worker {source}: {e}")
            if type(e) is TransportError:  # such as no free descriptor: the call would never end
                self._worker.retry(partial(self.reply_error, inbound, error))

    def _send_error(self, inbound: Inbound, error: BaseException) -> None:
        envelope = inbound.envelope
        same_program = self._membership.runs_the_same(envelope.source)
        reply = describe_exception(error, repr(self._membership.own.info), same_program)
        self.log_failure(envelope.source, reply.traceback)
        self._mailbox.send(envelope.source, reply, envelope.message_id, (), envelope.channel)

    def log_failure(self, source: int, trace: str) -> None:
        """Log what a call raised: its caller may never read its future. Equal tracebacks are counted."""
        self.repeats.warning(
            f"On {self._membership.own.info}, for {self._membership.name_of(source)}:\n{trace}"
        )
