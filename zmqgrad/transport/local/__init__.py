"""The fast path between processes of one host and user: small messages by ``SOCK_SEQPACKET``, past libzmq.

libzmq hands every message to an I/O thread, which wakes the reader: the two wake-ups cost more than the
message. So messages of one frame and at most :data:`MAX_PACKET_BYTES` go by a Unix socket beside the
ROUTER. The kernel keeps message boundaries and tells the peer's user (``SO_PEERCRED``), so there is no
framing and no handshake of ours but one packet each way, by which a process of another job is refused
(:mod:`~zmqgrad.transport.local.connection`). The names lie in Linux's abstract namespace: they end with
their process, and are private to the network namespace.

A process accepts connections by a :class:`LocalListener`, which its reader polls. A thread that waits for a
reply may own one itself, a :class:`~zmqgrad.transport.local.channels.ReplyChannel`, and so reads the reply
without another thread. Sends never block: what the kernel does not accept waits in order behind a
:class:`~zmqgrad.transport.local.writer.BacklogWriter`.

Mailboxes and the store use the same classes. Where this is not available (:func:`supported`) or switched off,
everything goes through ZeroMQ, and nothing above transport can tell.
"""

from __future__ import annotations

from zmqgrad.transport.local.connection import (
    MAX_PACKET_BYTES,
    LocalConnection,
    accepts_us,
    connect,
    is_same_user,
    supported,
    unix_name,
)
from zmqgrad.transport.local.listener import LocalListener

__all__ = [
    "MAX_PACKET_BYTES",
    "LocalConnection",
    "LocalListener",
    "accepts_us",
    "connect",
    "is_same_user",
    "supported",
    "unix_name",
]
