"""Local connections: between processes of one host and user, by ``SOCK_SEQPACKET``, past libzmq.

libzmq passes every message to an I/O thread, which wakes the reader: the two wake-ups cost more than the
message. A Unix socket preserves message boundaries, and the kernel reports the peer's user (``SO_PEERCRED``):
no framing is needed. It is reliable and ordered; what a process has sent can be read after its end.

The reader of a process polls a :class:`LocalListener`. A thread that waits for a reply may own a
:class:`~zmqgrad.transport.local.channels.ReplyChannel` and read the reply itself. Sends never block: when the
kernel accepts no more, another connection continues, or packets wait in the sender's memory. Tensors are in
shared memory, whose descriptors are sent, too. Mailboxes and the store use the same classes. Where this is
not :func:`supported`, everything uses ZeroMQ.
"""

from __future__ import annotations

from zmqgrad.transport.local.connection import (
    MAX_PACKET_BYTES,
    LocalConnection,
    check_is_of_system,
    connect,
    is_listening,
    is_same_user,
    process_of,
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
    "check_can_open",
    "check_is_of_system",
    "connect",
    "is_listening",
    "is_same_user",
    "process_of",
    "supported",
    "unix_name",
]
