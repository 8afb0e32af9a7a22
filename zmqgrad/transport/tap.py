"""The hook for tracing: a tap is called with every message that is sent or received.

A tap runs in the sending or the receiving thread, so it must be quick and must not raise. Without a tap, the
cost is one comparison with None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message


class Tapped(NamedTuple):
    """A message that is sent or received. ``peer`` is the other worker, ``size`` the bytes of all frames."""

    outgoing: bool
    peer: int
    envelope: Envelope
    message: Message
    size: int


Tap = Callable[[Tapped], None]
