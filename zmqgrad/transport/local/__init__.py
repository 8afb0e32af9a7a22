"""The fast path between processes of one host and user: small messages by ``SOCK_SEQPACKET``, past libzmq.

libzmq passes every message to an I/O thread, which wakes the reader: the two wake-ups cost more than the
message. So messages of one frame and at most :data:`MAX_PACKET_BYTES` use a Unix socket beside the ROUTER.
The kernel preserves message boundaries and reports the peer's user (``SO_PEERCRED``): no framing is needed.

The reader of a process polls a :class:`LocalListener`. A thread that waits for a reply may own a
:class:`~zmqgrad.transport.local.channels.ReplyChannel` and read the reply itself. Sends never block: what the
kernel does not accept, :class:`~zmqgrad.transport.local.writer.BacklogWriter` sends later. Mailboxes and the
store use the same classes. Where the fast path is not :func:`supported`, everything uses ZeroMQ.
"""

from __future__ import annotations

from zmqgrad.transport.local.connection import (
    MAX_PACKET_BYTES,
    LocalConnection,
    can_connect,
    connect,
    is_same_user,
    supported,
    unix_name,
)
from zmqgrad.transport.local.descriptors import abstract_endpoint, check_can_open
from zmqgrad.transport.local.listener import LocalListener

__all__ = [
    "MAX_PACKET_BYTES",
    "LocalConnection",
    "LocalListener",
    "abstract_endpoint",
    "can_connect",
    "check_can_open",
    "connect",
    "is_same_user",
    "supported",
    "unix_name",
]
