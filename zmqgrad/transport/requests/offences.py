"""What clients of a request server did wrong: counted, and logged once for each of their addresses (P5)."""

from __future__ import annotations

import logging

from zmqgrad.transport.requests.connection import Client

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1000
"""How many addresses that sent garbage are remembered, so that each is logged once."""


class Offences:
    """Of the clients of server ``name`` at ``endpoint``. In the server's thread alone, but for ``count``."""

    def __init__(self, name: str, endpoint: str) -> None:
        self._name = name
        self._endpoint = endpoint
        self._strangers: set[str] = set()
        self.count = 0

    def note(self, client: Client, why: str) -> None:
        """``client`` sent what is no request."""
        self.count += 1
        host = client.address.rpartition(":")[0]
        if host not in self._strangers and len(self._strangers) < MAX_STRANGERS:
            self._strangers.add(host)
            logger.warning(
                "%s at %s: dropped a malformed request from %s (%s); more from there will only be counted",
                self._name,
                self._endpoint,
                client.address,
                why,
            )
