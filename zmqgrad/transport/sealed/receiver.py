"""The receiving half: one ROUTER for the channels of all peers, and the thread that reads it.

Both start with the first channel. The thread, ``<name>-bulk``, opens records: chunks straight into the memory
of their frame, other messages to be passed to the mailbox's own ROUTER over inproc. It has handled all chunks
of a message by then. So neither decrypting nor copying delays the thread that reads small messages. It ends
with the context.

Whoever knows the password can connect, and an observer of the network knows it; what he sends costs a counter
and a log line. A session changes only by records that were opened.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmqgrad.errors import ProtocolError, TransportError
from zmqgrad.runtime.clock import MONOTONIC
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.bind_policy import bind_tcp, tcp_address
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.sealed.records import AVAILABLE, KEY_BYTES, Cipher, Head, NullCipher, read_head
from zmqgrad.transport.security import ZapAuthenticator, password_server
from zmqgrad.transport.session import Incoming, Verdict
from zmqgrad.transport.sockets import connection_fd, send_all, set_up, use_io_thread
from zmqgrad.transport.tcp_listener import TcpListener
from zmqgrad.wire.codec import decode_all
from zmqgrad.wire.frames import Envelope
from zmqgrad.wire.messages import BulkAck, BulkOpen, BulkReady, Chunk

logger = logging.getLogger(__name__)

MAX_QUEUED_RECORDS = 16
"""Records that libzmq reads ahead for each connection. The memory of few records stays in the cache."""

MALLOC_REUSES_BYTES = 31 << 20
"""Just below glibc's limit. Smaller blocks are mapped anew each time until one of this size was freed."""

MAX_CHANNELS_PER_PEER = 2
"""The current channel of a peer, and the one that it replaces."""

MAX_LOGGED = 100
"""Refused records beyond this many are only counted."""


class _Channel:
    """The receiving half of one channel of worker ``peer`` in ``incarnation``."""

    __slots__ = ("cipher", "incarnation", "incoming", "number", "peer")

    def __init__(self, peer: int, incarnation: int, cipher: Cipher | NullCipher) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.number = cipher.channel
        self.cipher = cipher
        self.incoming = Incoming()


class ChannelReceiver:
    """Receives the channels of all peers of one mailbox.

    Args:
        name, incarnation: of the worker.
        host: address to listen on; None: there are no channels.
        zap: authenticator of ``context``; None: there is no secret, so records are not sealed.
        mailbox: returns the inproc endpoint of the mailbox's ROUTER.
        reassembler: of the mailbox.
        reply: sends a message to a peer over CURVE; does not raise because of the peer.
        end: ends the link to a peer, for a reason.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str | None,
        zap: ZapAuthenticator | None,
        mailbox: str,
        reassembler: Reassembler,
        reply: Callable[..., None],
        end: Callable[[int, str], None],
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._context = context
        self._host = host
        self._zap = zap
        self._mailbox = mailbox
        self._reassembler = reassembler
        self._reply = reply
        self._end_link = end
        self._lock = threading.Lock()  # guards _channels and _port
        self._channels: dict[int, _Channel] = {}
        self._port = 0
        self._token = b"" if zap is None else secrets.token_hex(16).encode()
        self._thread: threading.Thread | None = None
        self._listener: TcpListener | None = None  # used by the thread
        self._jobs: list[tuple[float, Callable[[], None]]] = []  # used by the thread
        self._inproc = f"inproc://{name}-bulk-{secrets.token_hex(16)}"
        self._ends: deque[tuple[int, bytes]] = deque()
        self.refused = 0
        self.keys_dropped = 0
        self.bytes_in = 0

    # ---- opening, in the reading thread -----------------------------------------------------------------

    def on_open(self, source: Envelope, message: BulkOpen) -> None:
        """Handles a peer's message that opens a channel.

        Raises:
            ProtocolError: if its key is too short: with a secret, there is no channel that does not seal.
        """
        expected = 0 if self._zap is None else KEY_BYTES
        if len(message.key) != expected and self._host is not None:
            raise ProtocolError(f"a channel's key of {len(message.key)} bytes (expected {expected})")
        why = self._start()
        if not why:
            cipher: Cipher | NullCipher = NullCipher(message.channel)
            if self._zap is not None:
                cipher = Cipher(message.key, message.channel, source.incarnation, self._incarnation)
            with self._lock:
                self._channels[message.channel] = _Channel(source.source, source.incarnation, cipher)
                own = [n for n, channel in self._channels.items() if channel.peer == source.source]
                for number in own[:-MAX_CHANNELS_PER_PEER]:
                    del self._channels[number]
        ready = BulkReady(message.channel, 0 if why else self._port, b"" if why else self._token, why)
        self._reply(source.source, ready, source.message_id)

    def _start(self) -> str:
        """Binds the ROUTER, and starts the thread. Returns why that is not possible."""
        if self._thread is not None:
            return ""
        if self._host is None:
            return f"{self._name} does not listen on tcp"
        if self._zap is not None and not AVAILABLE:
            return f"{self._name} has no package cryptography"
        router = self._context.socket(zmq.ROUTER)
        try:
            set_up(router)
            router.rcvhwm = MAX_QUEUED_RECORDS
            use_io_thread(router, bulk=True)
            router.bind(self._inproc)
            if self._zap is not None:
                password_server(router)
            address = tcp_address(self._host, "*")
            self._listener = listener = TcpListener(
                router,
                lambda fd: bind_tcp(router, address, secured=True, listen_fd=fd),  # as the mailbox's
                self._call_later,
            )
        except (OSError, TransportError) as e:
            router.close(linger=0)
            logger.warning("%s cannot receive large messages by channels: %s", self._name, e)
            return str(e)
        bytearray(MALLOC_REUSES_BYTES)  # once one is freed, glibc keeps blocks of this size and less
        if self._zap is not None:
            self._zap.passwords.add(self._token)
        self._port = int(listener.endpoint.rpartition(":")[2])
        self._thread = threading.Thread(
            target=self._run, args=(router, listener), name=f"{self._name}-bulk", daemon=True
        )
        self._thread.start()
        return ""

    def end(self, peer: int, token: bytes) -> bool:
        """Passes ``token`` to the mailbox behind everything that has arrived from ``peer``.

        Returns:
            False if nothing was received from it.
        """
        if not any(channel.peer == peer for channel in list(self._channels.values())):
            return False
        self._ends.append((peer, token))
        with self._context.socket(zmq.DEALER) as waker:
            waker.linger = -1  # inproc: delivered in memory, at once
            waker.connect(self._inproc)
            waker.send(b"")
        return True

    # ---- receiving, in the thread ----------------------------------------------------------------------

    def _call_later(self, seconds: float, job: Callable[[], None]) -> None:
        self._jobs.append((MONOTONIC.now() + seconds, job))

    def _do_jobs(self, now: float) -> float:
        """Does what is due. Returns when something is due next."""
        due = [job for moment, job in self._jobs if moment <= now]
        self._jobs = [entry for entry in self._jobs if entry[0] > now]
        for job in due:
            job()
        return min((moment for moment, _ in self._jobs), default=math.inf)

    def _run(self, router: zmq.Socket[bytes], listener: TcpListener) -> None:
        forward = self._context.socket(zmq.DEALER)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(listener.fd, zmq.POLLIN)
        try:
            set_up(forward)
            forward.sndhwm = 0
            forward.connect(self._mailbox)
            due = math.inf
            while True:
                now = MONOTONIC.now()
                if due <= now:
                    due = self._acknowledge(now)
                if self._ends and not router.poll(0):  # everything that has arrived was handled
                    peer, token = self._ends.popleft()
                    _pass_on(forward, token, [peer.to_bytes(2, "big")])
                    continue
                until = min(due, self._do_jobs(now)) - now
                ready = poller.poll(None if until == math.inf else math.ceil(1000 * until))
                for source, _ in ready:
                    if source is not router:
                        listener.read()
                        continue
                    frames = router.recv_multipart(copy=False)
                    if len(frames) != 2 or len(frames[1]):  # otherwise it only wakes this thread
                        due = min(due, self._receive(frames, forward))
        except zmq.ContextTerminated:
            pass  # the mailbox has been closed
        finally:
            listener.close()
            router.close(linger=0)
            forward.close(linger=0)

    def _receive(self, frames: Sequence[zmq.Frame], forward: zmq.Socket[bytes]) -> float:
        """Handles a record, behind the identity of its connection. Returns when to acknowledge it."""
        record: list[Buffer] = [frame.buffer for frame in frames[1:]]
        channel: _Channel | None = None
        try:
            head = read_head(record)
            channel = self._channels.get(head.channel)
            if channel is None:
                raise ProtocolError(f"unknown channel {head.channel:#x}")
            self._open(channel, head, record, forward)
            self._hear(connection_fd(frames[1]))
            return channel.incoming.due
        except ProtocolError as e:
            self._refuse(e)
            if channel is not None and channel.cipher.is_forged:
                self._drop(channel)
        except Exception:
            logger.exception("%s: handling a sealed record failed", self._name)
        return math.inf

    def _hear(self, fd: int) -> None:
        """Notes that a connection belongs to a peer: a record that came by it was opened."""
        assert self._listener is not None
        if not self._listener.hear(fd):
            self._listener.read()
            self._listener.hear(fd)

    def _open(
        self, channel: _Channel, head: Head, record: Sequence[Buffer], forward: zmq.Socket[bytes]
    ) -> None:
        incoming, cipher, now = channel.incoming, channel.cipher, MONOTONIC.now()
        size = sum(map(len, record))
        first = cipher.open(record, 0)  # authenticates the head, too
        if head.sequence != incoming.delivered + 1:
            verdict = incoming.receive(head.sequence, size, now)
            assert verdict is not Verdict.DELIVER  # a channel has one epoch
            logger.debug("%s: record %d of %r: %s", self._name, head.sequence, cipher, verdict.name)
            return
        try:
            target = None
            envelope, _, message = decode_all(first)
            if (envelope.source, envelope.incarnation) != (channel.peer, channel.incarnation):
                raise ProtocolError(f"worker {channel.peer} sent a message as worker {envelope.source}")
            if isinstance(message, Chunk):
                length = len(record[2]) - cipher.tag_bytes if len(record) == 3 else 0
                target = self._reassembler.reserve(channel.peer, message, length)
        except ProtocolError:
            incoming.receive(head.sequence, size, now)  # the sender's mistake; it would be resent forever
            raise
        if target is not None and isinstance(message, Chunk):
            cipher.open_into(record, 1, target)
            self._reassembler.advance(channel.peer, message, len(target))
            self.bytes_in += len(target)
        else:
            _pass_on(forward, first, [self._open_frame(cipher, record, i) for i in range(1, head.parts)])
        incoming.receive(head.sequence, size, now)

    def _open_frame(self, cipher: Cipher | NullCipher, record: Sequence[Buffer], index: int) -> Buffer:
        """Returns a frame in memory that the handler of the message may write to."""
        if not cipher.encrypts:
            return record[1 + index]
        size = max(0, len(record[1 + index]) - cipher.tag_bytes)
        if not size:
            return cipher.open(record, index)
        target = self._reassembler.buffers.empty(size)
        cipher.open_into(record, index, target)
        return target

    def _refuse(self, error: ProtocolError) -> None:
        self.refused += 1
        if self.refused <= MAX_LOGGED:
            logger.warning("%s: refused a sealed record (%s)", self._name, error)

    def _drop(self, channel: _Channel) -> None:
        """Opens nothing more with the key of ``channel``. What was still to come is lost with its link."""
        with self._lock:
            if self._channels.pop(channel.number, None) is None:
                return
        self.keys_dropped += 1
        logger.warning("%s: dropped a key: too many records of %r were forged", self._name, channel.cipher)
        self._end_link(channel.peer, "too many of its sealed records were forged on their way")

    def _acknowledge(self, now: float) -> float:
        """Sends the acknowledgements that are due. Returns when the next one is."""
        due = math.inf
        for channel in list(self._channels.values()):
            if channel.incoming.due <= now:
                sequence = channel.incoming.acknowledgement()
                self._reply(channel.peer, BulkAck(channel.number, sequence), 0)
            due = min(due, channel.incoming.due)
        return due

    # ---- closing ---------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Drops the channels of ``peer``; their records are refused from now on."""
        with self._lock:
            for number in [n for n, channel in self._channels.items() if channel.peer == peer]:
                del self._channels[number]

    def statistics(self) -> dict[str, Any]:
        """Returns counts of records refused, received twice and after a gap, and of keys dropped."""
        incoming = [channel.incoming for channel in list(self._channels.values())]
        return {
            "refused": self.refused,
            "keys_dropped": self.keys_dropped,
            "duplicates": sum(each.duplicates for each in incoming),
            "gaps": sum(each.gaps for each in incoming),
        }


def _pass_on(forward: zmq.Socket[bytes], first: bytes, frames: Sequence[Buffer]) -> None:
    try:
        send_all(forward, first, frames)
    except zmq.Again:
        logger.debug("something arrived by a channel when the mailbox was closed")
