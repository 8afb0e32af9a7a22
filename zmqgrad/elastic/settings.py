"""Settings of a rendezvous; equal on all its nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from zmqgrad.errors import ConfigurationError
from zmqgrad.runtime.arguments import check_integer, check_seconds

MAX_ATTEMPTS = 1_000_000
LEAST_INTERVAL_SECONDS = 0.01
"""With less, the nodes of a job would do nothing but write heartbeats."""


@dataclass(frozen=True)
class RendezvousTimeout:
    """Timeouts in seconds.

    Args:
        join: of a whole rendezvous.
        last_call: how long a rendezvous that has ``min_nodes`` waits for more nodes.
        close: for marking the rendezvous as closed.
        heartbeat: for one keep-alive.
    """

    join: float = 600.0
    last_call: float = 30.0
    close: float = 30.0
    heartbeat: float = 5.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            check_seconds(f"the timeout {name!r}", seconds)


@dataclass(frozen=True)
class RendezvousSettings:
    """Settings of a rendezvous.

    Args:
        run_id: identifies the job.
        min_nodes, max_nodes: how many nodes take part.
        timeout: see :class:`RendezvousTimeout`.
        keep_alive_interval: seconds between two keep-alives of a node.
        keep_alive_max_attempt: a node counts as dead after this many intervals without a keep-alive.

    Raises:
        ConfigurationError: if a value is invalid.

    Example:
        >>> RendezvousSettings("job", min_nodes=2, max_nodes=4).keep_alive_interval
        5.0
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout = field(default_factory=RendezvousTimeout)
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: int = 3

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ConfigurationError("the run id of a rendezvous must not be empty")
        check_integer("min_nodes", self.min_nodes, 1)
        check_integer("max_nodes", self.max_nodes, self.min_nodes)
        check_seconds("keep_alive_interval", self.keep_alive_interval, LEAST_INTERVAL_SECONDS)
        check_integer("keep_alive_max_attempt", self.keep_alive_max_attempt, 1, MAX_ATTEMPTS)

    @property
    def agreement(self) -> str:
        """What all nodes of the job must have in common, as text."""
        return (
            f"min_nodes={self.min_nodes}, max_nodes={self.max_nodes}, "
            f"last_call_timeout={self.timeout.last_call:g}, "
            f"keep_alive_interval={self.keep_alive_interval:g}, "
            f"keep_alive_max_attempt={self.keep_alive_max_attempt}"
        )

    @property
    def expiry_seconds(self) -> float:
        """Seconds without a keep-alive after which other nodes may remove a node."""
        return self.keep_alive_interval * self.keep_alive_max_attempt
