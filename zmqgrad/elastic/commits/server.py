"""Serves the holder of an agent to the workers of its node: a thread accepts them, one serves each."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqgrad.elastic.agent.ranks import Placement
    from zmqgrad.elastic.commits.connection import Reply, Request
    from zmqgrad.elastic.commits.holder import Holder, Peers
    from zmqgrad.store import Store

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0

RETRY_SECONDS = 1.0
"""After which a connection that could not be accepted is tried again."""

_NAME = "commits"

_MAX_PATH_BYTES = 100
"""The kernel takes 107 for a unix socket."""


class CommitServer:
    """Holds the commits of the workers of one agent, from the first that connects until it is closed.

    What it needs is imported then: an agent whose workers commit nothing starts without.

    Args:
        directory: of the agent, which only this user can enter. The socket is there.
    """

    def __init__(self, directory: Path) -> None:
        self._lock = threading.Lock()  # guards all below
        self._holder: Holder | None = None
        self._place: Placement | None = None
        self._store: Store | None = None
        self._connections: set[socket.socket] = set()
        self._connection_of: dict[int, socket.socket] = {}  # by rank, of this round
        self._closed = threading.Event()
        self._directory = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        self.path = str(directory / _NAME)
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            self.path = f"/proc/{os.getpid()}/fd/{self._directory}/{_NAME}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, name="zmqgrad-agent-commits", daemon=True)
        self._thread.start()

    def begin_round(self, place: Placement, store: Store | None) -> None:
        """The workers of ``place`` are about to start. Those before have ended.

        Args:
            store: of the round; None: there is no other node.
        """
        with self._lock:
            for connection in self._connections:
                _shut(connection)
            self._connection_of.clear()
            self._place, self._store = place, store
            holder = self._holder
        if holder is not None:
            holder.begin_round(place.round, place.ranks, self._peers(holder))

    def _peers(self, holder: Holder) -> Peers:
        assert self._place is not None
        if self._store is None or self._place.num_nodes == 1:
            from zmqgrad.elastic.commits.holder import Alone

            return Alone(holder)
        from zmqgrad.elastic.commits.peers import OtherAgents

        return OtherAgents(holder, self._store, self._place.node_rank, self._place.num_nodes)

    def close(self) -> None:
        """Free the memory and end the threads. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for connection in self._connections:
                _shut(connection)
            holder = self._holder
        _shut(self._socket)
        if holder is not None:
            holder.close()
        self._thread.join(JOIN_SECONDS)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(_NAME, dir_fd=self._directory)
        os.close(self._directory)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as e:
                if self._closed.is_set():
                    return
                logger.warning("no worker can connect to commit: %s", e)
                self._closed.wait(RETRY_SECONDS)  # nothing tells when there is a free descriptor again
                continue
            with self._lock:
                if self._closed.is_set() or self._place is None:
                    connection.close()
                    continue
                self._connections.add(connection)
                if self._holder is None:
                    from zmqgrad.elastic.commits.holder import Holder

                    self._holder = Holder()
                    self._holder.begin_round(self._place.round, self._place.ranks, self._peers(self._holder))
            name = "zmqgrad-agent-commits-of-worker"
            threading.Thread(
                target=self._serve, args=(connection, self._holder), name=name, daemon=True
            ).start()

    def _serve(self, connection: socket.socket, holder: Holder) -> None:
        try:
            _Worker(connection, holder, partial(self._admit, connection)).serve()
        except OSError as e:
            logger.debug("a worker has gone: %s", e)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _admit(self, connection: socket.socket, rank: int, round: int) -> str:
        """Why a worker is not served; empty: it is, and another state of its process is not any more."""
        with self._lock:
            place = self._place
            if place is None or round != place.round or rank not in place.ranks:
                return f"rank {rank} of round {round} is no worker of this node now"
            before = self._connection_of.get(rank)
            self._connection_of[rank] = connection
        if before is not None:
            _shut(before)
        return ""


class _Worker:
    """Serves one worker."""

    def __init__(self, connection: socket.socket, holder: Holder, admit: Callable[[int, int], str]) -> None:
        self._connection = connection
        self._holder = holder
        self._admit = admit
        self._rank = -1

    def serve(self) -> None:
        """Serve it until it ends."""
        from msgspec import MsgspecError

        from zmqgrad.elastic.commits.connection import MAX_PACKET_BYTES, Done, Written, decode_request, encode
        from zmqgrad.errors import ZmqgradError

        while data := self._connection.recv(MAX_PACKET_BYTES):
            try:
                number, request = decode_request(data)
            except MsgspecError as error:
                logger.warning("a worker of another version is not served: %s", error)
                return
            try:
                reply, fds = self._reply(request)
            except ZmqgradError as error:
                reply, fds = Done(str(error)), []
            socket.send_fds(self._connection, [encode((number, reply))], fds)
            if isinstance(request, Written) and reply == Done():
                try:
                    self._holder.spread(self._rank, request.number, request.shards)
                except ZmqgradError as error:  # the next commit waits in vain, unless the round ends
                    logger.info("commit %d is not whole: %s", request.number, error)

    def _reply(self, request: Request) -> tuple[Reply, list[int]]:
        from zmqgrad.elastic.commits.connection import Done, Hello, reply_to

        if isinstance(request, Hello):
            refused = self._admit(request.rank, request.round)
            self._rank = -1 if refused else request.rank
            return Done(refused), []
        if self._rank < 0:
            return Done("who are you?"), []
        return reply_to(request, self._holder, self._rank)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
