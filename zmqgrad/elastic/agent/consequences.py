"""Whether a worker most likely failed as a consequence of another failure, judged by its traceback. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

STORE_EXTRA_SECONDS = 3.0
"""By how much a worker that lost only the store is held longer than one that lost a peer.

It often ends first, as a process that failed closes its sockets a second or two before it exits.
"""

_LOST_STORE = re.compile(r"zmqgrad\.errors\.\w+: .*(the store no longer replies|no store answered)")
_LOST_PEER = re.compile(r"zmqgrad\.errors\.PeerLostError\b")


def hold_seconds(lines: Sequence[str]) -> float | None:
    """How much longer than it takes to notice a lost node a failure is held; None: it is not held.

    Args:
        lines: the traceback of the worker.
    """
    last = next((line for line in reversed(lines) if line.startswith("zmqgrad.errors.")), "")
    if _LOST_STORE.match(last):
        return STORE_EXTRA_SECONDS
    return 0.0 if _LOST_PEER.match(last) else None
