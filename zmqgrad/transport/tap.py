"""The hook of a tracer: it is called with every message that is sent or received.

A tap must be quick and must not raise; it runs in the sending or the receiving thread. With no tap the
cost is one comparison with None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import Message


class Tapped(NamedTuple):
    """A message on its way. ``peer`` is the other worker, ``size`` all bytes of all frames."""

    outgoing: bool
    peer: int
    envelope: Envelope
    message: Message
    size: int


Tap = Callable[[Tapped], None]
