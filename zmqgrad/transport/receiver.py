"""The receiving half of a mailbox: one thread that owns one ROUTER.

It reads, decodes and hands on; it never runs user code and never stops for what a stranger sends (P5).
It blocks in one ``recv`` and needs no poll: closing is a message to itself over ``inproc``, known by a
token that nobody outside the process can have.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from typing import TYPE_CHECKING

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.transport.base import Buffer, Handler, Inbound
from zmqgrad.wire.codec import decode

if TYPE_CHECKING:
    from zmqgrad.runtime.clock import Deadline

logger = logging.getLogger(__name__)

MAX_STRANGERS = 1000
"""How many senders of garbage are remembered, so that each is logged once."""


class Receiver:
    """Reads ``socket`` in a thread named ``<name>-receiver`` and calls ``handler`` for each message."""

    def __init__(self, name: str, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        self._name = name
        self._context = context
        self._socket = socket
        self._stop_token = secrets.token_bytes(16)
        self._inproc = f"inproc://{name}-{self._stop_token.hex()}"
        self._handler: Handler | None = None
        self._strangers: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name=f"{name}-receiver", daemon=True)
        self._closed = False
        self.messages = 0
        self.bytes = 0
        self.malformed = 0
        socket.bind(self._inproc)

    def start(self, handler: Handler) -> None:
        """Begin to read."""
        self._handler = handler
        self._thread.start()

    def _run(self) -> None:
        with contextlib.closing(self._socket):
            while True:
                try:
                    identity = self._socket.recv()
                    first = self._socket.recv()
                    frames = self._rest() if self._socket.rcvmore else ()
                except zmq.ContextTerminated:
                    return
                if first == self._stop_token:
                    return
                self._deliver(identity, first, frames)

    def _rest(self) -> list[Buffer]:
        """The frames after the first: ours, writable, and received without a copy."""
        frames: list[Buffer] = []
        while True:
            frame = self._socket.recv(copy=False)
            frames.append(frame.buffer)
            if not frame.more:
                return frames

    def _deliver(self, identity: bytes, first: bytes, frames: list[Buffer] | tuple[()]) -> None:
        try:
            envelope, message = decode(first)
        except ProtocolError as e:
            self._refuse(identity, e)
            return
        self.messages += 1
        size = len(first)
        for frame in frames:
            size += len(frame)
        self.bytes += size
        assert self._handler is not None
        try:
            self._handler(Inbound(envelope, message, frames, size))
        except Exception:
            logger.exception("%s: handling %s from worker %d failed", self._name, message, envelope.source)

    def _refuse(self, identity: bytes, error: ProtocolError) -> None:
        self.malformed += 1
        if identity in self._strangers or len(self._strangers) >= MAX_STRANGERS:
            return
        self._strangers.add(identity)
        logger.warning("%s: dropped a malformed message (%s)", self._name, error)

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._thread.is_alive():
            self._socket.close(linger=0)
            return
        with self._context.socket(zmq.DEALER) as waker:
            waker.linger = -1  # inproc: delivered in memory, at once
            waker.connect(self._inproc)
            waker.send(self._stop_token)

    def join(self, deadline: Deadline) -> list[str]:
        """Wait for the thread; gives its name if it has not ended by ``deadline``."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_or_none())
        return [self._thread.name] if self._thread.is_alive() else []
