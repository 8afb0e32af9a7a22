"""What the I/O threads of libzmq do: listen, connect, shake hands, and carry messages."""

from __future__ import annotations

import errno
import socket as real
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from zmqgrad.testing.simulation.network.kernel import failure
from zmqgrad.testing.simulation.network.stream import READ, Parcel, Socket
from zmqgrad.testing.simulation.network.zmq_pipes import End, Frame, Message, connect
from zmqgrad.testing.simulation.network.zmq_sockets import Core, Subscriber

ZAP = "inproc://zeromq.zap.01"


class Zmtp(Parcel):
    """A greeting, a command or a message of ZMTP."""

    def __init__(self, kind: str, *content: Any, size: int = 64) -> None:
        self.kind = kind
        self.content = content
        self.size = size


class _Failed(Exception):
    """The connection must be closed. ``final``: libzmq does not try again."""

    def __init__(self, final: bool, event: int = 0, value: int = 0) -> None:
        self.final, self.event, self.value = final, event, value


def mechanism(core: Core) -> str:
    """Returns how ``core`` authenticates."""
    options = core.options
    if options[zmq.CURVE_SERVER] or options.get(zmq.CURVE_SERVERKEY):
        return "CURVE"
    if options[zmq.PLAIN_SERVER] or zmq.PLAIN_USERNAME in options:
        return "PLAIN"
    return "NULL"


def raw_key(key: bytes) -> bytes:
    """Returns a key of 32 bytes, also of its text."""
    return z85.decode(key) if len(key) == 40 else key


def public_key(private: bytes) -> bytes:
    """Returns the public key of a private one."""
    return z85.decode(zmq.curve_public(z85.encode(raw_key(private))))


class ZapRequest:
    """A question to the authenticator of the context, and its answer."""

    def __init__(
        self, session: Session, answered: Callable[[bytes, bytes], None], frames: list[bytes]
    ) -> None:
        self._session = session
        self._answered = answered
        self._over = False
        handler = session.core.context.names.get(ZAP)
        if not isinstance(handler, Core) or handler.closed:
            raise _Failed(False, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EFAULT)
        self._end, theirs = connect(self, handler, 0, 0)
        handler.command(lambda: handler.attach(theirs))
        self._end.write([Frame(frame, i < len(frames) - 1) for i, frame in enumerate(frames)])
        self._end.has_message()

    def command(self, act: Callable[[], None]) -> None:
        """As :class:`Owner`."""
        self._session.core.context.io.post(act)

    def on_readable(self, end: End) -> None:
        """As :class:`Owner`."""
        reply = end.read()
        if reply is not None and not self._over:
            self._over = True
            end.leave()
            self._answered(reply[3].bytes, reply[5].bytes)

    def on_writable(self, end: End) -> None:
        """As :class:`Owner`."""

    def on_gone(self, end: End) -> None:
        """As :class:`Owner`: the authenticator has been closed."""
        if not self._over:
            self._over = True
            self._session.fail(_Failed(False, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EFAULT))


class Session:
    """One connection of a socket by TCP, or of a :class:`Connector` one after the other."""

    def __init__(self, core: Core, endpoint: str, server: bool) -> None:
        self.core = core
        self.endpoint = endpoint
        self.server = server
        self.context = core.context
        self.process = core.context.process
        self.end: End | None = None  # of the pipe to the socket
        self.file: Socket | None = None
        self.fd = -1
        self.ready = False  # the handshake has succeeded
        self.over = False
        self._attempt = 0  # distinguishes connections
        self._scheduled = False
        self._started = False  # to shake hands, over the current connection
        self._peer_identity = b""
        self._user: dict[str, str] = {}  # what the authenticator calls the peer
        self.context.sessions.add(self)

    # ---- the connection ---------------------------------------------------------------------------------

    def start(self, file: Socket, fd: int) -> None:
        """Begins to shake hands over a connection."""
        self.file, self.fd = file, fd
        self.ready, self._started = False, True
        file.blocking = False
        self._attempt += 1
        attempt, limit = self._attempt, self.core.options[zmq.HANDSHAKE_IVL]
        if limit:
            self.process.soon(lambda: self._on_timeout(attempt), limit / 1000)
        file.on_change = self.schedule
        self._send(Zmtp("greeting", mechanism(self.core)))
        self.schedule()

    def _on_timeout(self, attempt: int) -> None:
        if attempt == self._attempt and self.file is not None and not self.ready:
            self.fail(_Failed(False, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ETIMEDOUT))

    def schedule(self) -> None:
        """Lets the I/O thread look at the connection."""
        if not self._scheduled and not self.over:
            self._scheduled = True
            self.context.io.post(self._run)

    def _run(self) -> None:
        self._scheduled = False
        if self.file is None or self.over or not self._started:
            return
        try:
            self._read(self.file)
            if self.ready and self.file is not None:
                self._write(self.file)
        except _Failed as e:
            self.fail(e)

    def _read(self, file: Socket) -> None:
        while self.file is file:
            if self.ready and self.end is not None and not self.end.has_room() and self.end.alive:
                return  # the socket does not read
            if not file.received:
                if file.error or file.shut & READ:
                    raise _Failed(False)
                return
            parcel = file.take_parcel()
            if not isinstance(parcel, Zmtp):
                raise _Failed(False)
            self._handle(parcel)

    def _write(self, file: Socket) -> None:
        while self.file is file and self.end is not None and file.sending < file.send_buffer:
            message = self.end.read()
            if message is None:
                return
            size = sum(len(frame) + 9 for frame in message)
            # Only now is the memory of a frame that was not copied read for the last time.
            self._send(Zmtp("message", [frame.bytes for frame in message], size=size))

    def _send(self, parcel: Zmtp) -> None:
        assert self.file is not None
        try:
            if self.file.shut or self.file.error:
                raise failure(errno.EPIPE)
            before, self.file.send_buffer = self.file.send_buffer, 1 << 62  # a parcel is sent in one piece
            try:
                self.file.send(parcel, False)
            finally:
                self.file.send_buffer = before
        except OSError:
            self.schedule()  # the error shows when it is read

    # ---- the handshake ----------------------------------------------------------------------------------

    def _handle(self, parcel: Zmtp) -> None:
        if self.ready:
            if parcel.kind == "message":
                self._deliver(parcel.content[0])
            return
        getattr(self, f"_on_{parcel.kind}", self._on_unexpected)(*parcel.content)

    def _on_unexpected(self, *content: Any) -> None:
        raise _Failed(True, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_UNEXPECTED_COMMAND)

    def _on_greeting(self, theirs: str) -> None:
        own, options = mechanism(self.core), self.core.options
        if theirs != own:
            mismatch = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
            raise _Failed(True, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, mismatch)
        if own == "NULL":
            self._send(Zmtp("ready", options[zmq.IDENTITY]))
        elif self.server:
            return
        elif own == "CURVE":
            self._send(Zmtp("hello", raw_key(options[zmq.CURVE_SERVERKEY])))
        else:
            password = options.get(zmq.PLAIN_PASSWORD, b"")
            self._send(Zmtp("hello", options[zmq.PLAIN_USERNAME], password))

    def _on_hello(self, *proof: bytes) -> None:
        if mechanism(self.core) == "CURVE":
            if proof != (public_key(self.core.options[zmq.CURVE_SECRETKEY]),):
                cryptographic = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
                raise _Failed(True, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, cryptographic)
            self._send(Zmtp("welcome"))
        else:
            self._ask("PLAIN", proof, lambda: self._send(Zmtp("welcome")))

    def _on_welcome(self) -> None:
        options = self.core.options
        key = raw_key(options.get(zmq.CURVE_PUBLICKEY, b"\0" * 32))
        self._send(Zmtp("initiate", options[zmq.IDENTITY], key))

    def _on_initiate(self, identity: bytes, key: bytes) -> None:
        self._peer_identity = identity

        def accept() -> None:
            self._send(Zmtp("ready", self.core.options[zmq.IDENTITY]))
            self._succeed()

        if mechanism(self.core) == "CURVE":
            self._ask("CURVE", (key,), accept)
        else:
            accept()

    def _on_ready(self, identity: bytes) -> None:
        self._peer_identity = identity
        self._succeed()

    def _on_error(self, code: bytes) -> None:
        raise _Failed(True, zmq.EVENT_HANDSHAKE_FAILED_AUTH, int(code))

    def _ask(self, kind: str, proof: tuple[bytes, ...], accept: Callable[[], None]) -> None:
        assert self.file is not None
        options, attempt = self.core.options, self._attempt
        if self.context.names.get(ZAP) is None and not options[zmq.ZAP_DOMAIN]:
            accept()
            return

        def answered(code: bytes, user: bytes) -> None:
            if attempt != self._attempt or self.file is None:
                return
            try:
                if code == b"200":
                    self._user = {"User-Id": user.decode()} if user else {}
                    accept()
                else:
                    self._send(Zmtp("error", code))
                    raise _Failed(False, zmq.EVENT_HANDSHAKE_FAILED_AUTH, int(code))
            except _Failed as e:
                self.fail(e)
            self.schedule()

        address = self.file.peer_name[0].encode()
        domain = options[zmq.ZAP_DOMAIN]
        ZapRequest(
            self,
            answered,
            [b"", b"1.0", b"1", domain, address, options[zmq.IDENTITY], kind.encode(), *proof],
        )

    def _succeed(self) -> None:
        self.ready = True
        self.core.event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, self.endpoint)
        if self.end is None:
            core = self.core
            self.end, theirs = connect(self, core, core.options[zmq.RCVHWM], core.options[zmq.SNDHWM])
            theirs.identity = self._peer_identity
            core.command(lambda: core.attach(theirs))

    def _deliver(self, data: list[bytes]) -> None:
        limit = self.core.options[zmq.MAXMSGSIZE]
        if limit >= 0 and any(len(part) > limit for part in data):
            raise _Failed(True)
        assert self.end is not None
        assert self.file is not None
        known, last = {"Peer-Address": self.file.peer_name[0]} | self._user, len(data) - 1
        message: Message = [Frame(bytearray(part), i < last, self.fd, known) for i, part in enumerate(data)]
        if self.end.alive:
            self.end.write(message)

    # ---- the end ----------------------------------------------------------------------------------------

    def fail(self, why: _Failed) -> None:
        """Closes the connection, and reports it."""
        if self.file is None:
            return
        if why.event:
            self.core.event(why.event, why.value, self.endpoint)
        elif not self.ready and not why.final:
            error = self.file.error or errno.EPIPE
            self.core.event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, error, self.endpoint)
        self.core.event(zmq.EVENT_DISCONNECTED, self.fd, self.endpoint)
        self.disconnect()
        self.on_disconnected(why.final)

    def disconnect(self) -> None:
        """Closes the connection."""
        file, fd, self.file, self.fd = self.file, self.fd, None, -1
        self.ready = self._started = False
        self._attempt += 1
        if file is not None:
            file.on_change = None
            if self.process.table.get(fd) is file:
                self.process.close(fd)

    def on_disconnected(self, final: bool) -> None:
        """Called when the connection has broken."""
        self.finish()

    def finish(self, *, drop: bool = False) -> None:
        """Ends for good. Idempotent."""
        if self.over:
            return
        self.disconnect()
        self.over = True
        self.context.sessions.discard(self)
        if self.end is not None:
            self.end.leave(drop=drop)
        self.process.network.scheduler.notify(self.context.contents)

    def close(self, linger: int) -> None:
        """The socket is closed: sends what is queued, for at most ``linger`` ms (negative: no limit)."""
        if linger == 0 or self.end is None:
            self.context.io.post(self.finish)
        elif linger > 0:
            self.process.soon(self.finish, linger / 1000)

    # ---- as the owner of an end -------------------------------------------------------------------------

    def command(self, act: Callable[[], None]) -> None:
        """As :class:`Owner`."""
        self.context.io.post(act)

    def on_readable(self, end: End) -> None:
        """As :class:`Owner`."""
        self.schedule()

    def on_writable(self, end: End) -> None:
        """As :class:`Owner`."""
        self.schedule()

    def on_gone(self, end: End) -> None:
        """As :class:`Owner`: the socket has left, and everything was sent."""
        self.finish()


class Connector(Session):
    """Connects a socket to an endpoint, again and again."""

    def __init__(self, core: Core, endpoint: str, address: tuple[str, int]) -> None:
        super().__init__(core, endpoint, False)
        self._address = address
        self._interval = core.options[zmq.RECONNECT_IVL]
        own, theirs = connect(self, core, core.options[zmq.RCVHWM], core.options[zmq.SNDHWM])
        self.end = own
        core.attach(theirs)
        self.context.io.post(self._open)

    def _open(self) -> None:
        if self.over:
            return
        network = self.process.network
        file = Socket(network, self.process, real.AF_INET, real.SOCK_STREAM)
        file.blocking = False
        self.file, self.fd = file, self.process.install(file)
        self._attempt += 1
        attempt, limit = self._attempt, self.core.options[zmq.CONNECT_TIMEOUT]
        file.on_change = lambda: self.context.io.post(lambda: self._on_outcome(attempt))
        if limit:
            self.process.soon(lambda: self._give_up(attempt), limit / 1000)
        network.connect_tcp(file, self._address)
        file.on_change()

    def _on_outcome(self, attempt: int) -> None:
        if attempt != self._attempt or self.file is None or self.file.connecting:
            return
        if not self.file.connected:
            self._give_up(attempt)
            return
        self.core.event(zmq.EVENT_CONNECTED, self.fd, self.endpoint)
        self._interval = self.core.options[zmq.RECONNECT_IVL]
        self.start(self.file, self.fd)

    def _give_up(self, attempt: int) -> None:
        if attempt == self._attempt and self.file is not None and not self.over:
            self.core.event(zmq.EVENT_CLOSED, self.fd, self.endpoint)
            self.disconnect()
            if self.core.options[zmq.RECONNECT_IVL] > 0:
                self._retry()

    def _retry(self) -> None:
        options, rng = self.core.options, self.process.network.scheduler.rng
        interval = self._interval + rng.randrange(max(1, options[zmq.RECONNECT_IVL]))
        self.core.event(zmq.EVENT_CONNECT_RETRIED, interval, self.endpoint)
        if options[zmq.RECONNECT_IVL_MAX] > options[zmq.RECONNECT_IVL]:
            self._interval = min(2 * self._interval, options[zmq.RECONNECT_IVL_MAX])
        self.process.soon(self._open, interval / 1000)

    def on_disconnected(self, final: bool) -> None:
        """As :class:`Session`: connects again, if that is wanted."""
        if final or self.core.options[zmq.RECONNECT_IVL] <= 0:
            self.finish()
            return
        core, end = self.core, self.end
        if isinstance(core, Subscriber) and end is not None:
            end.other.clear_outbound()
            core.command(lambda: core.subscribe_all(end.other))
        self._retry()


class Listener:
    """Accepts the connections of a socket at a port."""

    def __init__(self, core: Core, address: tuple[str, int]) -> None:
        self.core = core
        process = core.context.process
        self._process = process
        self._sessions: list[Session] = []
        given = core.options[zmq.USE_FD]
        if given >= 0:
            found = process.get(given)
            if not isinstance(found, Socket):
                raise zmq.ZMQError(zmq.ENOTSOCK)
            self._file, self.fd = found, given
        else:
            self._file = Socket(process.network, process, real.AF_INET, real.SOCK_STREAM)
            self.fd = process.install(self._file)
            try:
                self._file.bind(address)
                self._file.listen(core.options[zmq.BACKLOG])
            except OSError as e:
                process.close(self.fd)
                raise zmq.ZMQError(e.errno) from None
        self._file.blocking = False
        host, port = self._file.name[:2]
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._file.on_change = self._schedule
        core.event(zmq.EVENT_LISTENING, self.fd, self.endpoint)
        self._schedule()

    def _schedule(self) -> None:
        self.core.context.io.post(self._accept)

    def _accept(self) -> None:
        if not self._file.pending or self.fd < 0:
            return
        accepted = self._file.accept()
        fd = self._process.install(accepted)
        self._process.network.embryos.discard(accepted)
        self.core.event(zmq.EVENT_ACCEPTED, fd, self.endpoint)
        session = Session(self.core, self.endpoint, True)
        self._sessions = [one for one in self._sessions if not one.over]
        self._sessions.append(session)
        session.start(accepted, fd)

    def close(self, linger: int) -> None:
        """Stops listening, and closes the connections that were accepted."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._file.on_change = None
            self.core.event(zmq.EVENT_CLOSED, fd, self.endpoint)
            self._process.close(fd)
        for session in self._sessions:
            if not session.over:
                session.close(linger)
