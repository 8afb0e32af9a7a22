"""What a request server serves: the contract between the connections and what is said on them."""

from __future__ import annotations

from typing import Protocol

from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.short import Handler
from zmqgrad.wire.messages import Message


class Service(Protocol):
    """What a server serves; called in the server's thread alone."""

    def handler(self, kind: type[Message]) -> Handler:
        """What answers requests of ``kind``, by the server's ``reply``, now or in a later call."""
        ...

    def misunderstood(self, client: Client, message_id: int, why: str) -> None:
        """A request of ours was malformed; it has been logged."""
        ...

    def unwelcome(self, client: Client, message_id: int, limit: int) -> None:
        """A request came from a client beyond the ``limit``: say so."""
        ...

    def gone(self, client: Client) -> None:
        """The connection has ended; answers to it are dropped."""
        ...

    def settle(self) -> None:
        """What had come has been handled; more is waited for after this."""
        ...

    def do_due(self, now: float) -> float:
        """Do what was due by ``now``. Gives the moment when something is due next; infinite for never."""
        ...

    def stopping(self) -> None:
        """The last chance to reply."""
        ...
