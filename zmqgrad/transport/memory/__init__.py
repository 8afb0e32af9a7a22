"""Mailboxes in memory: the contract of those over ZeroMQ in one process, with a message log and faults.

They ship with the product, for :mod:`zmqgrad.testing`. Each message is encoded, and its frames are copied, so
workers share no objects by accident. Each mailbox delivers in a thread of its own, named ``<name>-receiver``.
Messages between two workers arrive in the order in which they were sent, unless a fault
(:mod:`~zmqgrad.transport.memory.faults`) is active. As with a dead process, messages to a closed mailbox are
lost.
"""

from __future__ import annotations

from zmqgrad.transport.memory.mailbox import MemoryMailbox
from zmqgrad.transport.memory.network import MemoryNetwork

__all__ = ["MemoryMailbox", "MemoryNetwork"]
