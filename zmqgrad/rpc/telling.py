"""Control messages that must arrive: each is said until it is answered, less and less often.

Hearing one twice has to be harmless. Nothing is said to who is lost, or after :meth:`Telling.close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from zmqgrad.errors import NotInitializedError, PeerLostError, RpcTimeoutError, TransportError
from zmqgrad.runtime.future import Promise
from zmqgrad.transport.base import Inbound
from zmqgrad.wire.messages import Message

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""A control message that nobody answers is sent again after so long, then after twice as long, and so on: who
cannot keep up must not be sent the more."""

MOST_PATIENCE = 16
"""But never later than after so many times ``RETRY_SECONDS``."""


def more(patience: int) -> int:
    """How patiently to wait the next time, in multiples of :data:`RETRY_SECONDS`."""
    return min(2 * patience, MOST_PATIENCE)


class Telling:
    """Tells others what ``worker`` has to say, and has them acknowledge it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._closed = False

    def tell(
        self, peer: int, message: Message, acknowledged: Callable[[], None] | None = None, patience: int = 1
    ) -> None:
        """Send ``message`` to ``peer`` until it is answered; then call ``acknowledged``.

        ``patience``: the answer is waited for so many times :data:`RETRY_SECONDS`.
        """

        def settled(outcome: Promise[Inbound]) -> None:
            if outcome.exception() is None:
                if acknowledged is not None:
                    acknowledged()
            elif isinstance(outcome.exception(), RpcTimeoutError) and not self._closed:
                logger.info("%s: worker %d did not answer %s, again", self._worker.name, peer, message)
                self.tell(peer, message, acknowledged, more(patience))

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

    def close(self) -> None:
        """Say nothing more."""
        self._closed = True
