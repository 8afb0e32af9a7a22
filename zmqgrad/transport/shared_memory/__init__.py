"""Shared memory between the workers of one host and user: the sender copies once, the receiver not at all.

A mailbox uses :class:`~zmqgrad.transport.shared_memory.transport.SharedMemoryTransport`. Its sending side,
the arena (:mod:`~zmqgrad.transport.shared_memory.arena`), leases blocks of sealed segments
(:mod:`~zmqgrad.transport.shared_memory.segment`) to peers. Its receiving side
(:mod:`~zmqgrad.transport.shared_memory.mapped_blocks`) builds frames on blocks of peers and releases them.

Guarantees:

- A block is not written again before its reader has released it, or has unmapped its segment.
- Frames that cannot use shared memory go through a socket.
- Nothing is left behind, however a process ends.
"""
