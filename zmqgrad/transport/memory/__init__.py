"""Mailboxes in memory: the same contract as over ZeroMQ, in one process, with a record and with faults.

Ships with the product, for :mod:`zmqgrad.testing`. Each message is encoded and decoded like a real one
and its frames are copied into fresh memory, so nobody shares an object by accident. Each mailbox
delivers in a thread of its own named ``<name>-receiver``; messages between two workers arrive in the
order sent, unless a fault (:mod:`~zmqgrad.transport.memory.faults`) says otherwise. A peer whose mailbox is
closed loses what is sent to it, like a dead process.
"""

from __future__ import annotations

from zmqgrad.transport.memory.mailbox import MemoryMailbox
from zmqgrad.transport.memory.network import MemoryNetwork

__all__ = ["MemoryMailbox", "MemoryNetwork"]
