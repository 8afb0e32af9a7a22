"""Which workers of a cluster know a context."""

from __future__ import annotations

from tests.support.waiting import eventually
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.testing import Cluster


def known_by(c: Cluster) -> list[int]:
    """Ids of the workers that know any context."""
    return [w.id for w in c.workers if autograd_of(w).contexts.live()]


def wait_until_known_by(c: Cluster, *workers: int) -> None:
    """Waits until exactly ``workers`` know a context."""
    eventually(lambda: known_by(c), lambda known: known == list(workers))


def wait_until_released(c: Cluster) -> None:
    """Waits until no worker knows a context."""
    wait_until_known_by(c)
