"""Heartbeats: who lives is asked on small sockets of their own, in a thread named ``<name>-liveness``.

On a connection of its own a ping waits behind no message, however large, and its kernel tells what libzmq
keeps to itself: that the process at the other end has ended, or that its host is out of reach. What is
heard becomes a judgement in :mod:`~zmqgrad.transport.liveness`.

Each worker watches others (:mod:`~zmqgrad.transport.pulse.watch`) and is watched by them
(:mod:`~zmqgrad.transport.pulse.guests`), both in that one thread; what is said, and where, stands in
:mod:`~zmqgrad.transport.pulse.speech`.
"""

from __future__ import annotations

from zmqgrad.transport.pulse.guests import Listener
from zmqgrad.transport.pulse.speech import SCHEME, SUFFIX, TOKEN_SIZE, pulse_of
from zmqgrad.transport.pulse.watch import Watch

__all__ = ["SCHEME", "SUFFIX", "TOKEN_SIZE", "Listener", "Watch", "pulse_of"]
