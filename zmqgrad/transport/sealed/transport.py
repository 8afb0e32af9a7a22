"""Both halves of a mailbox's channels. With a secret but without ``cryptography``, no message uses one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import zmq

from zmqgrad.transport.base import Frame, Inbound
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.sealed.receiver import ChannelReceiver
from zmqgrad.transport.sealed.records import AVAILABLE
from zmqgrad.transport.sealed.sender import MIN_SEALED_BYTES, ChannelPool, ChannelSocket
from zmqgrad.transport.security import ZapAuthenticator
from zmqgrad.transport.sessions import Sessions
from zmqgrad.wire.messages import BulkAck, BulkOpen, BulkReady, MessageType

logger = logging.getLogger(__name__)

SEALED_TYPES = frozenset({MessageType.BULK_OPEN, MessageType.BULK_READY, MessageType.BULK_ACK})
"""Messages between sealed transports, which are not passed to the handler. They contain keys."""


class SealedTransport:
    """Sends and receives large messages in records, which are sealed if the job has a secret.

    Args:
        name, incarnation: of the worker.
        host: address that the mailbox listens on by tcp; None: it does not.
        secured: whether the job has a secret.
        zap: authenticator of ``context``; None if the job has no secret, or the mailbox does not listen.
        notify: sends a message to a peer over CURVE; does not raise because of the peer.
        inproc: endpoint of the mailbox's ROUTER.
        endpoint: returns the endpoint in use to a peer.
        may_wait: returns whether the calling thread may wait for messages.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str | None,
        secured: bool,
        zap: ZapAuthenticator | None,
        sessions: Sessions,
        reassembler: Reassembler,
        notify: Callable[..., None],
        inproc: str,
        endpoint: Callable[[int], str],
        may_wait: Callable[[], bool],
    ) -> None:
        self._receiver = ChannelReceiver(name, incarnation, context, host, zap, inproc, reassembler, notify)
        self._pool = ChannelPool(
            name, incarnation, context, sessions, notify, endpoint, reassembler.buffers, secured
        )
        self._may_wait = may_wait
        self._enabled = AVAILABLE or not secured
        self.send = self._pool.send
        self.unacknowledged = self._pool.unacknowledged
        self.end = self._receiver.end
        self._lacks_cipher = zap is not None and not AVAILABLE

    def to(self, peer: int, frames: Sequence[Frame]) -> ChannelSocket | None:
        """Returns the channel for a message with ``frames`` to ``peer``; None if it must not use one."""
        if not self._enabled:
            if self._lacks_cipher and sum(map(len, frames)) >= MIN_SEALED_BYTES:
                _log_unavailable()
            return None
        return self._pool.to(peer, sum(map(len, frames)), self._may_wait)

    def on_message(self, inbound: Inbound) -> None:
        """Handles one of the messages in ``SEALED_TYPES``."""
        envelope, message = inbound.envelope, inbound.message
        if isinstance(message, BulkAck):
            self._pool.on_ack(envelope.source, message)
        elif isinstance(message, BulkOpen):
            self._receiver.on_open(envelope, message)
        elif isinstance(message, BulkReady):
            self._pool.on_ready(envelope.source, envelope.incarnation, message)

    def forget(self, peer: int) -> None:
        """Drops the channels from and to ``peer``."""
        self._receiver.forget(peer)
        self._pool.forget(peer)

    def close(self, linger: int) -> None:
        """Closes the channels to all peers. The receiving thread ends with the context. Idempotent."""
        self._pool.close(linger)

    def bytes_in(self) -> int:
        """Returns how many bytes of chunks were received."""
        return self._receiver.bytes_in

    def statistics(self) -> dict[str, Any]:
        """Returns the state of the channels: parts sealed, records refused."""
        return {**self._pool.statistics(), **self._receiver.statistics()}


@lru_cache(maxsize=1)
def _log_unavailable() -> None:
    logger.warning(
        "large messages between hosts are encrypted by CURVE, at about 0.3 GB/s: `pip install "
        "zmqgrad[secure]` installs the package cryptography, which is several times as fast"
    )
