"""The ZeroMQ context that all store clients of a process share, so that a client costs no thread of its own.

It lives as long as somebody uses it: afterwards no thread is left. Mailboxes and servers have their own.
"""

from __future__ import annotations

import os
import threading

import zmq

_lock = threading.Lock()  # guards all below
_context: zmq.Context[zmq.Socket[bytes]] | None = None
_users = 0


def acquire_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The shared context. Call :func:`release_context` when all sockets that were made of it are closed."""
    global _context, _users
    with _lock:
        if _context is None:
            _context = zmq.Context(1)
            _context.set(zmq.MAX_SOCKETS, _context.get(zmq.SOCKET_LIMIT))
        _users += 1
        return _context


def release_context() -> None:
    """The caller does not use it any more; the last one ends it."""
    global _context, _users
    with _lock:
        _users -= 1
        if _users:
            return
        ending, _context = _context, None
    if ending is not None:
        ending.term()


def _forget_context() -> None:
    """In a fork: the context and its threads are the other process's."""
    global _lock, _context, _users
    _lock, _context, _users = threading.Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_context)
