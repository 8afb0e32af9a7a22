"""What a worker answers: values, what user code raised, and refusals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqgrad.errors import ClosedError, PeerLostError, RpcError, TransportError
from zmqgrad.rpc.remote_errors import describe_exception, shorten
from zmqgrad.rpc.serialization.context import SERIALIZED_NONE, SerializedPayload
from zmqgrad.rpc.serving import cancelled
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import REQUEST, Goodbye, Message, MessageType

if TYPE_CHECKING:
    from zmqgrad.rpc.worker.worker import Worker

logger = logging.getLogger(__name__)


class Replying:
    """Answers what others asked of ``worker``. Safe to use from any thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._membership = worker.membership
        self._mailbox = worker.mailbox
        self._doors = worker.doors
        self._lost = worker.lost

    def reply(
        self, inbound: Inbound, message: Message, packed: SerializedPayload = SERIALIZED_NONE, what: str = ""
    ) -> None:
        """Answer ``inbound``."""
        source = inbound.envelope.source
        envelope = inbound.envelope
        try:
            if source in self._lost:
                raise self._worker.loss_of(source, f"the answer to {what}")
            if self._doors.outgoing is not None:
                message = self._doors.outgoing(source, message, packed.tensors, what)
            channel = envelope.channel
            if channel and cancelled():  # nobody waits there any more, and would read it
                channel = 0
            self._mailbox.send(source, message, envelope.message_id, packed.frames, channel)
        except BaseException:
            self._worker.drop_unsent(source, packed)
            raise

    def reply_error(self, inbound: Inbound, error: BaseException) -> None:
        """Answer ``inbound`` by an exception."""
        source = inbound.envelope.source
        if source in self._lost:
            logger.debug("%s: worker %d died before it could be told of %r", self._worker.name, source, error)
            return
        if self._worker.closed and isinstance(error, ClosedError):  # of the answer that could not be sent
            logger.debug("%s is closed: worker %d is not told of %r", self._worker.name, source, error)
            return
        try:
            self._send_error(inbound, error)
        except (TransportError, RpcError) as e:
            logger.warning("%s cannot tell worker %d of %r: %s", self._worker.name, source, error, e)

    def refuse(self, inbound: Inbound) -> None:
        """Refuse what came of a worker that was declared lost and lives: so it loses this one, too."""
        source = inbound.envelope.source
        if inbound.envelope.type == MessageType.GOODBYE:  # both say so
            return
        name = self._membership.name_of(source)
        reason = (
            f"{self._worker.name} has declared {name} (worker {source}) lost: {self._lost[source]}; join anew"
        )
        try:
            if inbound.envelope.type & REQUEST:
                self._send_error(inbound, PeerLostError(reason))
            self._mailbox.send(source, Goodbye(shorten(reason)), 0)
        except (TransportError, RpcError) as e:  # so it is dead indeed
            logger.debug("%s: nobody to refuse: %s", self._worker.name, e)

    def _send_error(self, inbound: Inbound, error: BaseException) -> None:
        envelope = inbound.envelope
        same_program = self._membership.runs_the_same(envelope.source)
        reply = describe_exception(error, repr(self._membership.own.info), same_program)
        self.show_failure(envelope.source, reply.traceback)
        self._mailbox.send(envelope.source, reply, envelope.message_id, (), envelope.channel)

    def show_failure(self, source: int, trace: str) -> None:
        """What a call raised shows here as well: the caller may never look at its future."""
        logger.warning(
            "On %s, for %s:\n%s", self._membership.own.info, self._membership.name_of(source), trace
        )
