"""Events of a rendezvous, as JSON lines on the logger ``zmqgrad.elastic.events`` (level INFO)."""

from __future__ import annotations

import logging
from enum import Enum

import msgspec

from zmqgrad.elastic.state import NodeDesc

logger = logging.getLogger(__name__)


class NodeState(Enum):
    """What a node does."""

    INIT = "INIT"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class RdzvEvent(msgspec.Struct, frozen=True):
    """Something that happened to a node of a rendezvous. The fields are those of torchelastic's events."""

    name: str
    run_id: str
    message: str
    hostname: str
    pid: int
    node_state: NodeState
    master_endpoint: str = ""
    rank: int | None = None
    local_id: int | None = None
    error_trace: str = ""


def record(
    run_id: str,
    node: NodeDesc,
    name: str,
    message: str,
    node_state: NodeState = NodeState.RUNNING,
    rank: int | None = None,
    error_trace: str = "",
) -> None:
    """Log an event of ``node``, if anything listens."""
    if logger.isEnabledFor(logging.INFO):
        event = RdzvEvent(
            name,
            run_id,
            message,
            node.fqdn,
            node.pid,
            node_state,
            rank=rank,
            local_id=node.local_id,
            error_trace=error_trace,
        )
        logger.info("%s", msgspec.json.encode(event).decode())
