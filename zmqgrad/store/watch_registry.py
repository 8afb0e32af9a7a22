"""Who watches what, of a server's clients. Watches are leases: what is not renewed is forgotten. Pure."""

from __future__ import annotations

from zmqgrad.store.watch_targets import Target

LEASE_SECONDS = 20.0
"""A watch that was not renewed for this long is forgotten; its client renews it every 5 s."""


class WatchRegistry:
    """Targets, their watchers, and until when each watches."""

    def __init__(self) -> None:
        self._leases: dict[Target, dict[int, float]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, target: Target, watcher: int, now: float) -> None:
        """``watcher`` watches ``target``."""
        self._leases.setdefault(target, {})[watcher] = now + LEASE_SECONDS

    def renew(self, target: Target, watcher: int, now: float) -> bool:
        """``watcher`` still watches ``target``. False if that was forgotten: it may have missed something."""
        leases = self._leases.get(target)
        if leases is None or watcher not in leases:
            return False
        leases[watcher] = now + LEASE_SECONDS
        return True

    def remove(self, target: Target, watcher: int) -> bool:
        """``watcher`` does not watch ``target`` any more. Was it the last one?"""
        leases = self._leases.get(target)
        if leases is None or leases.pop(watcher, None) is None or leases:
            return False
        del self._leases[target]
        return True

    def expire(self, now: float) -> list[Target]:
        """Forget the watches that were not renewed. Returns the targets that nobody watches any more."""
        late = [
            (target, watcher)
            for target, leases in self._leases.items()
            for watcher, expires in leases.items()
            if expires <= now
        ]
        return [target for target, watcher in late if self.remove(target, watcher)]
