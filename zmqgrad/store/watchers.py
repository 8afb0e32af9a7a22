"""Who watches what, of a server's clients: by the connections on which they hear notices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from zmqgrad.store.topics import Target

Ear = TypeVar("Ear", bound=Hashable)


class Watchers(Generic[Ear]):
    """Connections for notices, the names by which they are known, and what is to be heard on them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Ear] = {}
        self._names: dict[Ear, str] = {}
        self._of: dict[Target, dict[Ear, None]] = {}
        self._targets: dict[Ear, dict[Target, None]] = {}

    def introduce(self, ear: Ear, name: str) -> None:
        """``ear`` is known as ``name`` from now on."""
        self._by_name.pop(self._names.get(ear, ""), None)
        self._by_name[name], self._names[ear] = ear, name

    def known(self, name: str) -> Ear | None:
        """The one that is known as ``name``; None if nobody is (any more)."""
        return self._by_name.get(name)

    def add(self, target: Target, ear: Ear) -> None:
        """``ear`` is to hear of ``target``."""
        self._of.setdefault(target, {})[ear] = None
        self._targets.setdefault(ear, {})[target] = None

    def of(self, target: Target) -> Collection[Ear]:
        """Who is to hear of ``target``."""
        return list(self._of.get(target, ()))

    def remove(self, target: Target, ear: Ear) -> bool:
        """``ear`` is to hear of ``target`` no more. Was it the last one?"""
        ears = self._of.get(target)
        if ears is None or ear not in ears:
            return False
        del ears[ear], self._targets[ear][target]
        if not ears:
            del self._of[target]
        return not ears

    def forget(self, ear: Ear) -> list[Target]:
        """``ear`` has gone. Gives what it was the last one to hear of."""
        self._by_name.pop(self._names.pop(ear, ""), None)
        abandoned = [target for target in list(self._targets.get(ear, ())) if self.remove(target, ear)]
        self._targets.pop(ear, None)
        return abandoned
