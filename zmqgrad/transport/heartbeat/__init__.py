"""Heartbeats between workers, on sockets of their own, in the worker's service thread.

On a separate connection a ping never waits behind a large message, and the kernel reports what libzmq does
not: that the peer process has ended, or that its host is unreachable.
:mod:`~zmqgrad.transport.heartbeat.failure_detector` decides what that means.

Each worker monitors its peers (:mod:`~zmqgrad.transport.heartbeat.monitor`) and replies to their pings
(:mod:`~zmqgrad.transport.heartbeat.server`). :mod:`~zmqgrad.transport.heartbeat.protocol`
describes the protocol.
"""

from __future__ import annotations

from zmqgrad.transport.heartbeat.monitor import HeartbeatMonitor
from zmqgrad.transport.heartbeat.protocol import SCHEME, SUFFIX, TOKEN_SIZE, heartbeat_endpoint
from zmqgrad.transport.heartbeat.server import HeartbeatListener

__all__ = ["SCHEME", "SUFFIX", "TOKEN_SIZE", "HeartbeatListener", "HeartbeatMonitor", "heartbeat_endpoint"]
