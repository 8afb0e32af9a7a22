"""Watches of a server's clients. Each is a lease, which expires unless the client renews it. Pure."""

from __future__ import annotations

from zmqgrad.store.watch_targets import Target

LEASE_SECONDS = 20.0
"""A watch expires unless it is renewed within this time. Clients renew every 5 s."""


class WatchLeases:
    """Expiry times by target and watcher."""

    def __init__(self) -> None:
        self._leases: dict[Target, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, target: Target, watcher: int, now: float) -> None:
        """Begin or extend the lease of ``watcher`` on ``target``."""
        self._leases.setdefault(target, {})[watcher] = now + LEASE_SECONDS

    def renew(self, target: Target, watcher: int, now: float) -> bool:
        """Extend a lease. Returns False if it has expired, so that the watcher may have missed changes."""
        leases = self._leases.get(target)
        if leases is None or watcher not in leases:
            return False
        leases[watcher] = now + LEASE_SECONDS
        return True

    def remove(self, target: Target, watcher: int) -> bool:
        """End a lease. Returns whether it was the last one on ``target``."""
        leases = self._leases.get(target)
        if leases is None or leases.pop(watcher, None) is None or leases:
            return False
        del self._leases[target]
        return True

    def expire(self, now: float) -> list[Target]:
        """End the leases that were not renewed. Returns the targets without any left."""
        late = [
            (target, watcher)
            for target, leases in self._leases.items()
            for watcher, expires in leases.items()
            if expires <= now
        ]
        return [target for target, watcher in late if self.remove(target, watcher)]
