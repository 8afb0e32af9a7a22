"""Queries and replies between many light clients and one server: what a store speaks.

:mod:`~zmqgrad.transport.query.server` is a ROUTER, :mod:`~zmqgrad.transport.query.client` a pool of
DEALERs; within a host both use the fast path (:mod:`~zmqgrad.transport.local`). Notifications go the other
way, from an XPUB to SUBs: :mod:`~zmqgrad.transport.query.publisher` and
:mod:`~zmqgrad.transport.query.subscriber`.

Reliability lies with the client, which repeats a query until the reply comes. So the server never has to
notice that a client is gone, and nothing depends on a connection.
"""

from __future__ import annotations

import zmq

from zmqgrad import environment
from zmqgrad.runtime.spinning import SpinBudget
from zmqgrad.transport.zap import HANDSHAKE_MS
from zmqgrad.wire.frames import MAX_HEADER

LOCAL_JOB = b"store"
"""What the fast path's hello says for a job: clients of a store need not belong to one."""

SPIN_SECONDS = 1e-4
"""How long either side spins before it blocks: to be woken up takes as long where a processor was idle."""

RECENTLY_SECONDS = 1e-3
"""If nothing has come for this long, the other side does not spin any more: so block at once."""

ZERO_COPY_BYTES = 256 << 10
"""Frames of at least this size are handed to libzmq without a copy."""


def spin_budget() -> SpinBudget:
    """What one side spins with: for SPIN_SECONDS, or less if ``ZMQGRAD_SPIN_US`` says so.

    Raises:
        ConfigurationError: if that is malformed.
    """
    allowed = environment.spin_us()
    return SpinBudget(SPIN_SECONDS if allowed is None else min(SPIN_SECONDS, allowed * 1e-6))


def set_up(socket: zmq.Socket[bytes]) -> None:
    """What every socket is given at birth, on both sides."""
    socket.linger = 0
    socket.handshake_ivl = HANDSHAKE_MS
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_HEADER)
    # A host that vanished without a word is noticed within 40 s.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 20
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 4
