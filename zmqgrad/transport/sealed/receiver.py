"""The receiving half: one ROUTER for the channels of all peers, and the reader of its own that it has.

Both start with the first channel. The reader's thread, ``<name>-bulk``, opens records: chunks straight into
the memory of their frame, other messages to be passed to the mailbox's reader. It has handled all chunks
of a message by then. So neither decrypting nor copying delays the thread that reads small messages.

Whoever knows the password can connect, and an observer of the network knows it; what he sends costs a counter
and a log line. A session changes only by records that were opened.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq

from zmqgrad.errors import ProtocolError
from zmqgrad.runtime.clock import MONOTONIC, Deadline
from zmqgrad.transport.base import Buffer
from zmqgrad.transport.bind_policy import tcp_address
from zmqgrad.transport.bulk import Reassembler
from zmqgrad.transport.reader import Reader
from zmqgrad.transport.sealed.records import AVAILABLE, KEY_BYTES, Cipher, Head, NullCipher, read_head
from zmqgrad.transport.security import ZapAuthenticator, password_server
from zmqgrad.transport.session import Incoming
from zmqgrad.transport.sessions import Sessions
from zmqgrad.transport.sockets import connection_fd, set_up, use_io_thread
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


@dataclass(eq=False, slots=True)
class _Channel:
    """The receiving half of one channel of worker ``peer`` in ``incarnation``."""

    number: int
    peer: int
    incarnation: int
    cipher: Cipher | NullCipher
    incoming: Incoming = field(default_factory=Incoming)
    heard: bytes = b""  # the connection by which its last record came


class ChannelReceiver:
    """Receives the channels of all peers of one mailbox.

    Args:
        host: address to listen on; None: there are no channels.
        zap: authenticator of ``context``; None: there is no secret, so records are not sealed.
        pass_on: called with the frames of each message that is no chunk.
        reassembler: of the mailbox.
        reply: sends a message to a peer over CURVE; does not raise because of the peer.
        sessions: of the mailbox: their name and incarnation.
        end: ends the link to a peer, for a reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str | None,
        zap: ZapAuthenticator | None,
        pass_on: Callable[[bytes, Sequence[Buffer]], None],
        reassembler: Reassembler,
        reply: Callable[..., None],
        sessions: Sessions,
        end: Callable[[int, str], None],
    ) -> None:
        self._context = context
        self._host = host
        self._zap = zap
        self._pass_on = pass_on
        self._reassembler = reassembler
        self._reply = reply
        self._sessions = sessions
        self._end_link = end
        self._lock = threading.Lock()  # guards _channels, _ended and _port
        self._channels: dict[int, _Channel] = {}
        self._ended: set[int] = set()  # numbers of channels whose links have ended
        self._port = 0
        self._token = b"" if zap is None else secrets.token_hex(16).encode()
        self._reader: Reader | None = None
        # Used by its thread:
        self._router: zmq.Socket[bytes]
        self._listener: TcpListener
        self._acknowledges_at = math.inf
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
                cipher = Cipher(message.key, message.channel, source.incarnation, self._sessions.incarnation)
            with self._lock:
                channel = _Channel(message.channel, source.source, source.incarnation, cipher)
                self._channels[channel.number] = channel
                own = [n for n, channel in self._channels.items() if channel.peer == source.source]
                for number in own[:-MAX_CHANNELS_PER_PEER]:
                    del self._channels[number]
        ready = BulkReady(message.channel, 0 if why else self._port, b"" if why else self._token, why)
        self._reply(source.source, ready, source.message_id)

    def _start(self) -> str:
        """Binds the ROUTER, and starts to read it. Returns why that is not possible."""
        if self._reader is not None:
            return ""
        if self._host is None:
            return f"{self._sessions.name} does not listen on tcp"
        if self._zap is not None and not AVAILABLE:
            return f"{self._sessions.name} has no package cryptography"
        try:
            with ExitStack() as undo:
                self._router = router = self._context.socket(zmq.ROUTER)
                undo.callback(router.close, linger=0)
                reader = Reader(f"{self._sessions.name}-bulk", partial(router.close, linger=0))
                undo.callback(reader.close)
                set_up(router)
                router.rcvhwm = MAX_QUEUED_RECORDS
                use_io_thread(router, bulk=True)
                if self._zap is not None:
                    password_server(router)
                address = tcp_address(self._host, "*")  # as the mailbox's
                self._listener = TcpListener(router, address, reader, secured=True)
                bytearray(MALLOC_REUSES_BYTES)  # once one is freed, glibc keeps blocks of this size and less
                reader.read_router(router, self._receive)
                reader.start()
                undo.pop_all()
        except (RuntimeError, OSError, zmq.ZMQError) as e:  # there is no port, descriptor or thread left
            logger.warning("%s cannot receive large messages by channels: %s", self._sessions.name, e)
            return str(e)
        if self._zap is not None:
            self._zap.passwords.add(self._token)
        self._port = self._listener.port
        self._reader = reader
        return ""

    def end(self, peer: int, ended: Callable[[], None]) -> bool:
        """Calls ``ended``, in the thread, behind everything that has arrived from ``peer``.

        Returns:
            False if nothing was received from it.
        """
        if not any(channel.peer == peer for channel in list(self._channels.values())):
            return False
        assert self._reader is not None
        self._reader.post(partial(self._reader.call_when_empty, ended))
        return True

    # ---- receiving, in the thread ----------------------------------------------------------------------

    def _receive(self) -> None:
        """Handles the next record, behind the identity of its connection."""
        receive = self._router.recv
        identity = receive()
        frame = head_frame = receive(copy=False)
        record: list[Buffer] = [frame.buffer]
        while frame.more:
            frame = receive(copy=False)
            record.append(frame.buffer)
        channel: _Channel | None = None
        try:
            head = read_head(record)
            channel = self._channels.get(head.channel)
            if channel is None:
                if head.channel in self._ended:
                    return  # its sender did not know yet that its link has ended
                raise ProtocolError(f"unknown channel {head.channel:#x}")
            self._open(channel, head, record)
            if channel.heard != identity:
                channel.heard = identity
                self._listener.hear(connection_fd(head_frame))  # a record that came by it was opened
            self._acknowledge_at(channel.incoming.due)
        except ProtocolError as e:
            self._refuse(e)
            if channel is not None and channel.cipher.is_forged:
                self._drop(channel)
        except Exception:
            logger.exception("%s: handling a sealed record failed", self._sessions.name)

    def _open(self, channel: _Channel, head: Head, record: Sequence[Buffer]) -> None:
        incoming, cipher, now = channel.incoming, channel.cipher, MONOTONIC.now()
        size = sum(map(len, record))
        first = cipher.open(record, 0)  # authenticates the head, too
        if head.sequence != incoming.delivered + 1:
            incoming.receive(head.sequence, size, now)
            logger.debug(
                "%s: record %d of %r is not the next one", self._sessions.name, head.sequence, cipher
            )
            return
        try:
            envelope, _, message = decode_all(first)
            if (envelope.source, envelope.incarnation) != (channel.peer, channel.incarnation):
                raise ProtocolError(f"worker {channel.peer} sent a message as worker {envelope.source}")
            if isinstance(message, Chunk):
                length = len(record[2]) - cipher.tag_bytes if len(record) == 3 else 0
                target = self._reassembler.reserve(channel.peer, message, length)
        except ProtocolError:
            incoming.receive(head.sequence, size, now)  # the sender's mistake; it would be resent forever
            raise
        if isinstance(message, Chunk):
            if target is not None:
                cipher.open_into(record, 1, target)
            self._reassembler.advance(channel.peer, message, length)
            self.bytes_in += length
        else:
            self._pass_on(first, [self._open_frame(cipher, record, i) for i in range(1, head.parts)])
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
            logger.warning("%s: refused a sealed record (%s)", self._sessions.name, error)

    def _drop(self, channel: _Channel) -> None:
        """Opens nothing more with the key of ``channel``. What was still to come is lost with its link."""
        with self._lock:
            if self._channels.pop(channel.number, None) is None:
                return
        self.keys_dropped += 1
        logger.warning(
            "%s: dropped a key: too many records of %r were forged", self._sessions.name, channel.cipher
        )
        self._end_link(channel.peer, "too many of its sealed records were forged on their way")

    def _acknowledge_at(self, due: float) -> None:
        if due <= MONOTONIC.now():
            self._acknowledge()
        elif due < self._acknowledges_at:
            assert self._reader is not None
            self._acknowledges_at = due
            self._reader.call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._acknowledges_at = math.inf  # here alone: else timers that each set the next one were ever more
        self._acknowledge()

    def _acknowledge(self) -> None:
        """Sends the acknowledgements that are due."""
        now, due = MONOTONIC.now(), math.inf
        for channel in list(self._channels.values()):
            if channel.incoming.due <= now:
                sequence = channel.incoming.acknowledgement()
                self._reply(channel.peer, BulkAck(channel.number, sequence), 0)
            due = min(due, channel.incoming.due)
        if due < math.inf:
            self._acknowledge_at(due)

    # ---- closing ---------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Drops the channels of ``peer``, and the records that it still sends."""
        with self._lock:
            for number in [n for n, channel in self._channels.items() if channel.peer == peer]:
                del self._channels[number]
                self._ended.add(number)

    def join(self, deadline: Deadline) -> list[str]:
        """Ends reading, when no more channels can open. Returns a name if it goes on after ``deadline``."""
        if self._reader is None:
            return []
        self._reader.close()
        return self._reader.join(deadline)

    def statistics(self) -> dict[str, Any]:
        """Returns counts of records refused, received twice and after a gap, and of keys dropped."""
        incoming = [channel.incoming for channel in list(self._channels.values())]
        return {
            "refused": self.refused,
            "keys_dropped": self.keys_dropped,
            "duplicates": sum(each.duplicates for each in incoming),
            "gaps": sum(each.gaps for each in incoming),
        }
