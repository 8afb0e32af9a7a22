"""Control messages that must arrive: each is resent with exponential backoff until it is acknowledged.

Receivers must tolerate duplicates. Nothing is sent to lost peers, or after :meth:`ReliableSender.close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from zmqgrad.errors import NotInitializedError, PeerLostError, RpcTimeoutError, TransportError
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import Message

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""How long the first attempt waits for its acknowledgement. Each further attempt waits twice as long, so that
a slow peer does not get more messages."""

MAX_BACKOFF = 16
"""The longest wait, in multiples of ``RETRY_SECONDS``."""


def next_backoff(backoff: int) -> int:
    """The backoff of the next attempt, in multiples of :data:`RETRY_SECONDS`."""
    return min(2 * backoff, MAX_BACKOFF)


class Requester(Protocol):
    """What this module needs of a worker."""

    name: str

    @property
    def request(self) -> Callable[..., Any]:
        """:meth:`zmqgrad.rpc.client.Client.request`."""


class ReliableSender:
    """Sends control messages of ``worker`` until they are acknowledged."""

    def __init__(self, worker: Requester) -> None:
        self._worker = worker
        self._closed = False

    def send(
        self, peer: int, message: Message, on_ack: Callable[[], None] | None = None, backoff: int = 1
    ) -> None:
        """Send ``message`` to ``peer`` until it is acknowledged.

        Args:
            on_ack: called when the acknowledgement arrives.
            backoff: how long this attempt waits for it, in multiples of :data:`RETRY_SECONDS`.
        """

        def on_done(promise: Promise[Inbound]) -> None:
            error = promise.exception()
            if error is None:
                if on_ack is not None:
                    on_ack()
            elif isinstance(error, RpcTimeoutError) and not self._closed:
                logger.info(
                    "%s: worker %d did not acknowledge %s: resending", self._worker.name, peer, message
                )
                self.send(peer, message, on_ack, next_backoff(backoff))

        if self._closed:
            return
        try:
            self._worker.request(
                peer,
                message,
                seconds=backoff * RETRY_SECONDS,
                description=type(message).__name__,
                on_done=on_done,
            )
        except (TransportError, NotInitializedError, PeerLostError) as e:
            logger.debug("%s: cannot send %s to worker %d: %s", self._worker.name, message, peer, e)

    def close(self) -> None:
        """Send and resend nothing more."""
        self._closed = True
