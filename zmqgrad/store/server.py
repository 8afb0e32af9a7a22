"""The store's server: a port, perhaps a journal, and the one thread in which queries are answered.

What is done with them stands in :mod:`~zmqgrad.store.service`.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack

from zmqgrad.errors import StoreError
from zmqgrad.runtime.clock import MONOTONIC, Clock, Deadline
from zmqgrad.store.answers import Answers
from zmqgrad.store.askers import MAX_WAITING
from zmqgrad.store.contents import Contents
from zmqgrad.store.journal import Journal
from zmqgrad.store.service import StoreService
from zmqgrad.store.state import State
from zmqgrad.transport.requests.server import MAX_CLIENTS, RequestServer
from zmqgrad.transport.security import keys_of

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long closing may take; it is a matter of milliseconds, too."""


class StoreServer:
    """Serves a store at ``address`` (see :func:`~zmqgrad.store.addresses.listening_address`).

    Args:
        journal: the file that makes the store durable (see :mod:`~zmqgrad.store.journal`); it is read first.
        sync: flush each change of it to the disk.
        secret: only who has it is answered; None: as the environment says (ZMQGRAD_SECRET).
        listen_fd: a socket that was bound to the port of ``address`` already; the server's from then on.
        max_clients: how many connections are served; a client has one for each of its threads that ask.
        max_waiting: how many queries may wait at a time, of all clients together.

    Raises:
        AddressInUseError, ConfigurationError, TransportError: if it cannot listen there.
        JournalError: if the journal is damaged, in use, or cannot be opened.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "zmqgrad-store",
        journal: str | os.PathLike[str] | None = None,
        sync: bool = False,
        secret: str | bytes | None = None,
        listen_fd: int | None = None,
        max_clients: int = MAX_CLIENTS,
        max_waiting: int = MAX_WAITING,
        clock: Clock = MONOTONIC,
    ) -> None:
        keys = keys_of(secret)
        self.name = name
        contents = Contents()
        self._state = State(contents)
        answers = Answers()
        self._journal = None if journal is None else Journal(journal, sync=sync)
        with ExitStack() as undo:
            if self._journal is not None:
                undo.callback(self._journal.close)
                self._journal.load(contents, answers)
            self._requests = RequestServer(
                name, address, keys=keys, listen_fd=listen_fd, max_clients=max_clients, clock=clock
            )
            undo.pop_all()
        self._service = StoreService(
            self._requests, self._state, answers, self._journal, max_waiting=max_waiting, clock=clock
        )
        self._thread = threading.Thread(target=self._run, name=f"{name}-server", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where it listens, as ZeroMQ writes it."""
        return self._requests.endpoint

    @property
    def port(self) -> int:
        """The tcp port at which it listens."""
        return self._requests.port

    def _run(self) -> None:
        try:
            self._requests.serve(self._service)
        except Exception:
            logger.exception("the store at %s is lost", self.endpoint)
        finally:
            if self._journal is not None:
                self._journal.close()

    @property
    def serves(self) -> bool:
        """Does it still? It ends when it is closed, and should it fail."""
        return self._thread.is_alive()

    def refuse_newcomers(self) -> None:
        """Answer no pings from now on: a client's first question, and a new watch's."""
        self._service.refuses_newcomers = True

    def close(self) -> None:
        """Stop serving; who waits is refused. Idempotent; waits for the thread and the sockets.

        Raises:
            StoreError: if the thread does not end in time.
        """
        self._requests.stop()
        self._thread.join(Deadline.after(CLOSE_SECONDS).left_or_none())
        if self._thread.is_alive():
            raise StoreError(f"the thread {self._thread.name} has not ended within {CLOSE_SECONDS} s")

    def statistics(self) -> dict[str, int]:
        """Counters and sizes, read without a lock: each is right, all together perhaps not of one moment."""
        requests = self._requests
        return {
            **self._state.statistics(),
            "clients": requests.clients,
            "pending": requests.pending,
            "requests": requests.requests,
            "malformed": requests.malformed,
            "undeliverable": requests.undeliverable,
            "published": self._service.published,
        }

    def __repr__(self) -> str:
        return f"<StoreServer at {self.endpoint}: {self._state.statistics()}>"
