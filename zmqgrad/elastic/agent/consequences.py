"""Whether a worker most likely failed as a consequence of another failure, judged by its traceback. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

UNKNOWN = -1
"""A lost peer that the traceback does not name."""

_LOST_STORE = re.compile(r"zmqgrad\.errors\.\w+: .*(the store no longer replies|no store answered)")
_LOST_CONNECTION = re.compile(r"RuntimeError: .*\bgloo/transport/\S*\] Connection (closed|reset) by peer")
_LOST_PEER = re.compile(r"zmqgrad\.errors\.PeerLostError\b(?:.*?\(worker (\d+)\))?")

_WORDS_OF_LOSS = (b"PeerLostError", b"no longer replies", b"no store answered", b"by peer")


def may_tell_of_loss(output: bytes) -> bool:
    """Whether ``output`` may have an error of which :func:`lost_peer` names the cause."""
    return any(words in output for words in _WORDS_OF_LOSS)


def lost_peer(lines: Sequence[str]) -> int | None:
    """The rank of the worker whose loss made a worker fail, or UNKNOWN; None: no loss did.

    Args:
        lines: the traceback of the worker that failed.
    """
    for last in reversed(lines):
        if _LOST_CONNECTION.match(last):
            return UNKNOWN
        if last.startswith("zmqgrad.errors."):
            break
    else:
        return None
    if _LOST_STORE.match(last):
        return 0  # it serves the store
    lost = _LOST_PEER.match(last)
    return None if lost is None else int(lost[1] or UNKNOWN)
