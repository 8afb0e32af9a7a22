"""What one node has seen of the shared state, timed by its own monotonic clock. Pure.

A node counts as dead if its heartbeat has not changed for ``settings.expiry_seconds`` of the observer's
clock, which count from the moment when the observer first saw that heartbeat. So a clock that is wrong
affects no other node, and a node that starts to observe grants every other node the whole time. The clocks of
all nodes must advance at the same rate, within the margin that an agent keeps below the expiry.
"""

from __future__ import annotations

import math

from zmqgrad.elastic.settings import RendezvousSettings
from zmqgrad.elastic.state import NodeDesc, RendezvousState


class Observer:
    """When the heartbeats and the last call changed, as seen by one node."""

    def __init__(self) -> None:
        self._heartbeats: dict[NodeDesc, tuple[int, float]] = {}
        self._ended: dict[NodeDesc, int] = {}  # the last heartbeats of nodes that are known to have ended
        self._last_call: tuple[int | None, float] = (None, 0.0)

    def observe(self, state: RendezvousState, now: float) -> None:
        """Note what has changed in ``state`` since the call before."""
        seen = self._heartbeats
        self._heartbeats = {
            node: seen[node] if node in seen and seen[node][0] == count else (count, now)
            for node, count in state.last_heartbeats.items()
        }
        if self._last_call[0] != state.deadline:
            self._last_call = (state.deadline, now)

    def declare_dead(self, node: NodeDesc) -> None:
        """Count ``node`` as dead from now on, unless a later heartbeat of it appears."""
        if node in self._heartbeats:
            self._ended[node] = self._heartbeats[node][0]

    def heartbeat_age(self, node: NodeDesc, now: float) -> float:
        """Seconds since the heartbeat of ``node`` changed; infinite if it has none."""
        seen = self._heartbeats.get(node)
        return math.inf if seen is None else now - seen[1]

    def last_call_age(self, now: float) -> float:
        """Seconds since the running last call began; 0 if none is running."""
        number, began = self._last_call
        return 0.0 if number is None else now - began

    def next_expiry(self, settings: RendezvousSettings, now: float) -> float:
        """Seconds until the next heartbeat expires unless it is renewed; infinite if there is none."""
        left = (since + settings.expiry_seconds - now for _, since in self._heartbeats.values())
        return min((seconds for seconds in left if seconds >= 0), default=math.inf)

    def dead(self, settings: RendezvousSettings, now: float) -> list[NodeDesc]:
        """The nodes whose heartbeats have expired, or that were declared dead, sorted."""
        return sorted(
            node
            for node, (count, since) in self._heartbeats.items()
            if now - since > settings.expiry_seconds or self._ended.get(node) == count
        )
