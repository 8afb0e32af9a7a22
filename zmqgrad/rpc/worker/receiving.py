"""What comes in to a worker: answers for who waits, control messages, and requests for engine threads."""

from __future__ import annotations

import logging
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

import torch

from zmqgrad.errors import ClosedError, PeerLostError, RpcTimeoutError
from zmqgrad.rpc.dispatch import Doors, RequestHandler
from zmqgrad.rpc.serving import ServedCall, serve, serve_no_more
from zmqgrad.runtime.thread_pool import Task
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import RESPONSE, Cancel, Goodbye, MessageType, RemoteCall
from zmqgrad.wire.tensors.modes import function_modes

if TYPE_CHECKING:
    from zmqgrad.rpc.worker.worker import Worker

logger = logging.getLogger(__name__)

is_grad_enabled = torch.is_grad_enabled


def _forget_modes() -> None:
    """A function that ran in this thread before has left them on: ``torch.set_grad_enabled(False)``, ...

    What is served next must not depend on which thread is free.
    """
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


class Receiving:
    """Takes what others send to ``worker``, from whichever thread has read it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._doors = worker.doors
        self._calls = worker.calls
        self._serving = worker.serving
        self._lost = worker.lost
        self._completer = worker.answers.completer
        self.served = 0

    def install(self, doors: Doors) -> None:
        """Hear of callers that give up."""
        doors.control[MessageType.CANCEL] = self._on_cancel
        doors.control[MessageType.GOODBYE] = self._on_goodbye

    def on_message(self, inbound: Inbound) -> Task | None:
        """In the thread that reads; gives what is to be done in an engine thread."""
        kind: MessageType = inbound.envelope.type  # type: ignore[assignment]
        if self._lost and inbound.envelope.source in self._lost:
            self._refuse(inbound)
            return None
        control = self._doors.control.get(kind)
        if control is not None:
            self.served += not kind & RESPONSE
            try:
                control(inbound)
            except (ClosedError, PeerLostError) as e:  # this worker ends just now, or the other has
                logger.debug("%s: nobody to answer %r: %s", self._worker.name, inbound.message, e)
            return None
        if kind & RESPONSE:
            call = self._calls.take(inbound.envelope.message_id)
            if call is None:
                self._worker.drop_unread(inbound)
                return None
            if call.future is not None:
                call.future.in_crowd = True
            call.outcome.set_result(inbound)
            return None
        self.served += 1
        self._completer.pass_on()  # what this thread does next may take long
        handler = self._doors.requests.get(kind)
        if handler is None:
            logger.warning("%s: nobody here answers %s", self._worker.name, type(inbound.message).__name__)
            return None
        return partial(self._serve, handler, inbound, self._serving.begin(inbound))

    def on_stray(self, inbound: Inbound) -> None:
        """What came in by a channel for nobody who waits there."""
        task = self.on_message(inbound)
        self._completer.pass_on()
        if task is not None:
            try:
                self._worker.submit(task)
            except ClosedError:
                logger.debug("%s: a request came while closing", self._worker.name)

    def serve_here(self, handler: RequestHandler, inbound: Inbound) -> None:
        """In the thread that waits at a channel: a request that came by it, as part of what it waits for.

        ``handler`` answers for its own errors; those of the system (Ctrl-C) reach the caller.
        """
        if inbound.envelope.source in self._lost:
            self._refuse(inbound)
            return
        self.served += 1
        handler(inbound)

    def _serve(self, handler: RequestHandler, inbound: Inbound, served: ServedCall | None) -> None:
        """In an engine thread."""
        token = serve(served)
        if not is_grad_enabled() or function_modes():
            _forget_modes()
        try:
            if served is not None and served.is_over():
                self._too_late(inbound)
            else:
                copy_context().run(handler, inbound)  # what it sets there is gone with it
        except BaseException as e:
            self._worker.reply_error(inbound, e)
        finally:
            if served is not None:
                self._serving.end(served)
            serve_no_more(token)

    def _too_late(self, inbound: Inbound) -> None:
        """A call whose caller gave up while it waited for a thread: it is not run."""
        message = getattr(inbound.message, "wrapped", inbound.message)
        error = RpcTimeoutError(
            f"RPC ran for more than set timeout and will now be marked with an error: its caller had given "
            f"up before {self._worker.name} could run it, so it was not run"
        )
        self._worker.drop_unread(inbound)
        if isinstance(message, RemoteCall):
            references = self._worker.references
            references.expect(inbound.envelope.source, message.rref_id, message.fork_id).set_exception(error)
            references.made(message.rref_id)
        raise error

    def _refuse(self, inbound: Inbound) -> None:
        """A message of a worker that is gone: one that was on its way, or of one that was only frozen."""
        self._worker.drop_unread(inbound)
        self._worker.refuse(inbound)

    def _on_goodbye(self, inbound: Inbound) -> None:
        """The sender has declared this worker lost, which is final: nothing will come of it any more."""
        message = inbound.message
        assert isinstance(message, Goodbye)
        self._worker.lose(inbound.envelope.source, message.reason)

    def _on_cancel(self, inbound: Inbound) -> None:
        message = inbound.message
        assert isinstance(message, Cancel)
        self._serving.cancel(inbound.envelope.source, message.call)
