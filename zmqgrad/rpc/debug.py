"""The state of a worker for debugging: ``rpc.get_debug_info()``.

Nothing here waits or queries another worker; the snapshot may be out of date when it is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqgrad.rpc.worker import Worker


def debug_info(worker: Worker) -> dict[str, Any]:
    """The whole state, as plain dictionaries, lists, strings and numbers.

    Returns:
        ``worker``: name, id, requests sent and served. ``pending_calls``: the calls without a reply, with the
        seconds left. ``peers``: the members of the group, their state, the bytes in flight to them
        (``on_the_way``) and what is ``waiting`` for credit. ``threads``: of the thread pool, by state.
        ``references``: values kept for other workers, forks that these hold, references held here. Upper
        layers add entries of their own (``autograd``: contexts).
    """
    sent, served, _ = worker.counts()
    return {
        "worker": {
            "name": worker.name,
            "id": worker.id,
            "closed": worker.closed,
            "timeout": worker.default_timeout,
            "requests_sent": sent,
            "requests_served": served,
        },
        "pending_calls": _pending(worker),
        "peers": _peers(worker),
        "threads": worker.pool.statistics(),
        "references": worker.references.statistics(),
        **{name: collect() for name, collect in worker.hooks.debug.items()},
    }


def _pending(worker: Worker) -> list[dict[str, Any]]:
    now = worker.clock.now()
    return [
        {
            "call": call.describe(),
            "to": worker.membership.name_of(call.peer),
            "seconds_left": None if call.deadline == math.inf else round(call.deadline - now, 3),
        }
        for call in worker.client.pending.all()
    ]


def _peers(worker: Worker) -> list[dict[str, Any]]:
    inflight = worker.mailbox.statistics().get("inflight", {"bytes": {}, "waiting": {}})
    return [
        {
            "name": record.name,
            "id": record.id,
            "state": _state(worker, record.id),
            "host": record.host,
            "on_the_way": inflight["bytes"].get(record.id, 0),
            "waiting": inflight["waiting"].get(record.id, {}),
        }
        for record in sorted(worker.membership.all_known(), key=lambda r: r.id)
    ]


def _state(worker: Worker, peer: int) -> str:
    if peer == worker.id:
        return "this worker"
    if peer in worker.lost:
        return f"lost: {worker.lost[peer]}"
    if peer in worker.silent:
        return f"silent for {worker.clock.now() - worker.silent[peer]:.1f} s"
    return "up"
