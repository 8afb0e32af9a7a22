"""Who takes the events of a watch: callbacks, of the forms that users write them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from zmqgrad.store.followers import WatchEvent

WatchCallback = Callable[[bytes | None, bytes | None], None]
"""Called with the old and the new value of a key; None where the key did not, or does not, exist."""

PrefixCallback = Callable[[str, bytes | None, bytes | None], None]
"""Called with a key, and its old and new value."""


class Taker(Protocol):
    """Takes events, one at a time. Two are the same watch if they are equal."""

    def __call__(self, event: WatchEvent) -> None:
        """Something changed."""
        ...

    def end(self) -> None:
        """Nothing more will come."""
        ...


@dataclass(frozen=True)
class OldNew:
    """Hands on what a callback of one key wants to know."""

    callback: WatchCallback

    def __call__(self, event: WatchEvent) -> None:
        self.callback(event.old, event.new)

    def end(self) -> None:
        """A callback is just not called any more."""


@dataclass(frozen=True)
class KeyOldNew:
    """Hands on what a callback of many keys wants to know."""

    callback: PrefixCallback

    def __call__(self, event: WatchEvent) -> None:
        self.callback(event.key, event.old, event.new)

    def end(self) -> None:
        """A callback is just not called any more."""


@dataclass(frozen=True)
class Nobody:
    """Wants nothing but that the key is followed."""

    def __call__(self, event: WatchEvent) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


NOBODY = Nobody()
