"""What a request server says: answers, and notices that nobody asked for. All is written at once.

What the other end does not take is kept, and nothing more is read from there until it has; so who asks
without reading waits for himself, and costs others nothing. A notice waits for nobody for long: who leaves
too many unread is hung up on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from zmqgrad.transport.requests.connection import Client
from zmqgrad.transport.requests.pipes import ELSEWHERE, LARGEST
from zmqgrad.transport.requests.ready import READ, WRITE, Poller
from zmqgrad.transport.requests.whole import LONG_FLAG, STARTS, write, write_long, write_short
from zmqgrad.transport.security import Keys
from zmqgrad.transport.zmtp import HEAD_ROOM, LARGE, write_head
from zmqgrad.wire.codec import encode, encode_around, header_of
from zmqgrad.wire.frames import ENVELOPE_SIZE
from zmqgrad.wire.messages import Message, StoreValue

logger = logging.getLogger(__name__)

MAX_UNREAD = 1000
"""How many notices wait for one who does not read them."""


class Outgoing:
    """Writes to clients, whose connections are registered with ``poller``. In the server's thread alone.

    Args:
        name: of the server, for log lines.
        incarnation: of the server, which each message names.
        keys: what is spoken is protected by them; None: by nothing.
        end: closes a client.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        keys: Keys | None,
        poller: Poller,
        end: Callable[[Client], None],
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._keys = keys
        self._poller = poller
        self._end = end
        self.undeliverable = 0
        """How many answers were dropped, as the client had gone."""

    def reply(self, client: Client, message_id: int, message: Message) -> None:
        """Send an answer; only in the server's thread. It is dropped, and counted, if the client has gone."""
        pipe = client.pipe
        if pipe is None:
            self._reply_by_connection(client, message_id, message)
            return
        said = ELSEWHERE
        if type(message) is not StoreValue or len(message.value) < LARGEST:
            header = header_of(message)
            size = len(header) + ENVELOPE_SIZE
            if size < 256:
                said = write_short(size, STARTS[type(message)], self._incarnation, message_id) + header
            elif size <= LARGEST - HEAD_ROOM:
                start = STARTS[type(message)]
                said = write_long(LONG_FLAG, size, start, self._incarnation, message_id) + header
        try:
            if pipe(said) != len(said):
                logger.warning("%s: hung up on %s, which reads no answers", self._name, client.address)
                self._end(client)
        except OSError:
            self.undeliverable += 1
            return  # it is about to be found to have gone
        if said is ELSEWHERE:
            self._reply_by_connection(client, message_id, message)

    def _reply_by_connection(self, client: Client, message_id: int, message: Message) -> None:
        if client.closed:
            self.undeliverable += 1
            return
        if self._keys is not None:
            frame = encode(message, 0, self._incarnation, message_id, room=HEAD_ROOM)
            data: bytes | bytearray = client.unpacker.pack(frame)
        elif type(message) is StoreValue and len(message.value) >= LARGE:
            # The store's own copy of the value is sent: another would cost more than all the rest.
            before, after = encode_around(message, 0, self._incarnation, message_id, room=HEAD_ROOM)
            write_head(before, len(message.value) + len(after))
            self.send(client, before, message.value, after)
            return
        else:
            data = write(message, self._incarnation, message_id)
        self.send(client, data)

    def notify(self, clients: Iterable[Client], message: Message) -> None:
        """Send ``message``, which nobody asked for, to ``clients``; only in the server's thread.

        Who has left ``MAX_UNREAD`` of them is hung up on: he will look himself, once he can.
        """
        frame = encode(message, 0, self._incarnation, 0, room=HEAD_ROOM)
        plain = write_head(frame) if self._keys is None else None
        for client in clients:
            if len(client.out) >= MAX_UNREAD:
                logger.warning("%s: hung up on %s, which reads no notices", self._name, client.address)
                self._end(client)
            elif not client.closed:
                self.send(client, client.unpacker.pack(frame) if plain is None else plain)

    def send(self, client: Client, data: bytes | bytearray, *more: bytes | bytearray) -> None:
        """Send ``data`` and ``more``, now or in :meth:`flush`."""
        sent = 0
        try:
            if not client.out:
                sent = client.socket.sendmsg((data, *more)) if more else client.socket.send(data)
                if sent == len(data) and not more:
                    return  # as nearly always
        except BlockingIOError:
            pass
        except OSError:
            self.undeliverable += 1
            return  # it is about to be read from, and found to have gone
        client.keep(sent, data, *more)
        if client.out:
            self.wait_to(client)

    def wait_to(self, client: Client) -> None:
        """Wait for ``client`` to take what is kept for it, and only otherwise for what it asks next."""
        self._poller.modify(client.socket.fileno(), WRITE if client.out else READ)
        if client.ends is not None and not client.stranger:
            self._poller.modify(client.ends[0].fileno(), 0 if client.out else READ)

    def flush(self, client: Client) -> None:
        """``client`` takes more: send what has been kept for it, as far as it does."""
        try:
            client.flush()
        except OSError:
            self._end(client)
            return
        if not client.out:
            self.wait_to(client)
