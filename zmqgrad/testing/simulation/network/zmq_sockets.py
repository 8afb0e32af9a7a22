"""The sockets of libzmq: what each type does with messages. A program sees them by ``zmq_module``."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from zmqgrad.testing.simulation.network.kernel import IN, Description
from zmqgrad.testing.simulation.network.zmq_pipes import End, Frame, Message, connect

if TYPE_CHECKING:
    from zmqgrad.testing.simulation.network.zmq_context import ContextCore
    from zmqgrad.testing.simulation.network.zmq_engine import Connector, Listener

DEFAULTS: dict[int, Any] = {
    zmq.LINGER: -1,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.RCVTIMEO: -1,
    zmq.SNDTIMEO: -1,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 0,
    zmq.HANDSHAKE_IVL: 30_000,
    zmq.CONNECT_TIMEOUT: 0,
    zmq.TCP_MAXRT: 0,
    zmq.MAXMSGSIZE: -1,
    zmq.BACKLOG: 100,
    zmq.USE_FD: -1,
    zmq.IDENTITY: b"",
    zmq.LAST_ENDPOINT: b"",
    zmq.CURVE_SERVER: 0,
    zmq.PLAIN_SERVER: 0,
    zmq.ZAP_DOMAIN: b"",
    zmq.AFFINITY: 0,
    zmq.IPV6: 0,
    zmq.IMMEDIATE: 0,
}


LOOK_SECONDS = 0.001
"""Who sends, and has taken no command for as long, takes them."""


class MailboxFile(Description):
    """What the descriptor of a socket refers to: readable while commands wait."""

    waiting: deque[Callable[[], None]]

    def events(self) -> int:
        """As :class:`Description`."""
        return IN if self.waiting else 0


class Core:
    """A socket of libzmq. Used by one thread at a time, and by I/O threads through :meth:`command` only."""

    def __init__(self, context: ContextCore, kind: int) -> None:
        self.context = context
        self.kind = kind
        self.options = dict(DEFAULTS)
        self.closed = False
        self.ends: list[End] = []
        self.active: deque[End] = deque()
        """Those of :attr:`ends` that may have messages; the first is read next."""
        self.listeners: dict[str, Listener] = {}
        self.connectors: list[Connector] = []
        self.inproc: list[str] = []  # bound names
        self.monitor: Monitor | None = None
        self.sending: list[Frame] = []  # of an unfinished message
        self.receiving: deque[Frame] = deque()
        self.more = False  # whether the frame received last is followed by another one
        self._looked = 0.0  # when commands were taken
        self._current: End | None = None  # where the message that is sent goes
        self.file = MailboxFile(context.process.network)
        self.file.waiting = deque()
        self.fd = context.process.install(self.file)

    # ---- commands ---------------------------------------------------------------------------------------

    def command(self, act: Callable[[], None]) -> None:
        """As :class:`Owner`: makes the descriptor readable."""
        if not self.closed:
            self.file.waiting.append(act)
            self.file.changed()

    def take_commands_perhaps(self) -> None:
        """As :meth:`take_commands`, for who sends: libzmq looks at most once in a while."""
        scheduler = self.context.process.network.scheduler
        if scheduler.now() - self._looked >= LOOK_SECONDS or scheduler.rng.random() < 0.5:
            self.take_commands()

    def take_commands(self) -> None:
        """Does what others have asked for."""
        self._looked = self.context.process.network.scheduler.now()
        while self.file.waiting:
            self.file.waiting.popleft()()
        if self.context.terminated:
            raise zmq.ContextTerminated()

    # ---- pipes ------------------------------------------------------------------------------------------

    def attach(self, end: End) -> None:
        """Adds a pipe. In the thread of the socket."""
        self.ends.append(end)
        self.active.append(end)

    def on_readable(self, end: End) -> None:
        """As :class:`Owner`."""
        if end not in self.active and end in self.ends:
            self.active.append(end)

    def on_writable(self, end: End) -> None:
        """As :class:`Owner`."""

    def on_gone(self, end: End) -> None:
        """As :class:`Owner`."""
        if end in self.ends:
            self.ends.remove(end)
        if end in self.active:
            self.active.remove(end)

    # ---- messages ---------------------------------------------------------------------------------------

    def next_message(self) -> tuple[End, Message] | None:
        """Returns the next message, of each pipe in turn."""
        while self.active:
            end = self.active[0]
            message = end.read()
            if message is not None:
                self.active.rotate(-1)
                return end, message
            if self.active and self.active[0] is end:
                self.active.popleft()
        return None

    def take(self) -> Message | None:
        """Returns the next message as the program sees it; None if there is none."""
        found = self.next_message()
        return None if found is None else found[1]

    def can_receive(self) -> bool:
        """Returns whether a message can be received."""
        while self.active:
            end = self.active[0]
            if end.has_message():
                return True
            if self.active and self.active[0] is end:
                self.active.popleft()
        return False

    def can_send(self) -> bool:
        """Returns whether a message can be sent."""
        return any(end.has_room() for end in self.ends)

    def put(self, frame: Frame) -> bool:
        """Sends a frame. Returns False if there is no room for its message."""
        if not self.sending:
            self._current = self.choose()
            if self._current is None:
                return False
        self.sending.append(frame)
        if not frame.more:
            message, self.sending = self.sending, []
            if self._current in self.ends and self._current is not None and self._current.alive:
                self._current.write(message)
        return True

    def choose(self) -> End | None:
        """Returns the pipe for the next message: each that has room in turn."""
        for _ in range(len(self.ends)):
            end = self.ends[0]
            self.ends.append(self.ends.pop(0))
            if end.has_room():
                return end
        return None

    def stop_monitor(self) -> None:
        """Ends the monitor, if there is one."""
        before, self.monitor = self.monitor, None
        if before is not None:
            self.context.forget_name(before)
            before.close()

    def event(self, kind: int, value: int, endpoint: str) -> None:
        """Reports an event to the monitor. From any thread."""
        if self.monitor is not None:
            self.monitor.report(kind, value, endpoint)


class Dealer(Core):
    """DEALER: sends in turn, receives in turn."""


class Pair(Core):
    """PAIR: one pipe."""

    def attach(self, end: End) -> None:
        """As :class:`Core`: a second one is refused."""
        if self.ends:
            end.leave(drop=True)
        else:
            super().attach(end)


class Router(Core):
    """ROUTER: the first frame names the connection."""

    def __init__(self, context: ContextCore, kind: int) -> None:
        super().__init__(context, kind)
        self._routes: dict[bytes, End] = {}
        self._next = context.process.network.scheduler.rng.getrandbits(32)
        self._drops = False

    def attach(self, end: End) -> None:
        """As :class:`Core`: names the connection."""
        if not end.identity:
            end.identity = b"\0" + (self._next & 0xFFFFFFFF).to_bytes(4, "big")
            self._next += 1
        if end.identity in self._routes:
            if not self.options.get(zmq.ROUTER_HANDOVER):
                return  # it stays without a name, and is not read
            before = self._routes.pop(end.identity)
            before.leave(drop=True)
            super().on_gone(before)
        self._routes[end.identity] = end
        super().attach(end)

    def on_gone(self, end: End) -> None:
        """As :class:`Core`."""
        super().on_gone(end)
        if self._routes.get(end.identity) is end:
            del self._routes[end.identity]

    def take(self) -> Message | None:
        """As :class:`Core`: with the name in front."""
        found = self.next_message()
        if found is None:
            return None
        end, message = found
        return [Frame(end.identity, True), *message]

    def can_send(self) -> bool:
        """As :class:`Core`."""
        return not self.options.get(zmq.ROUTER_MANDATORY) or super().can_send()

    def put(self, frame: Frame) -> bool:
        """As :class:`Core`.

        Raises:
            zmq.ZMQError: with ROUTER_MANDATORY, if there is no such connection.
        """
        if self._current is None and not self._drops:
            if not frame.more:
                return True  # a name, and nothing to be sent there
            end = self._routes.get(frame.bytes)
            mandatory = self.options.get(zmq.ROUTER_MANDATORY)
            if end is None or not end.has_room():
                if mandatory and end is not None and end.is_full():
                    return False
                if mandatory:
                    raise zmq.ZMQError(zmq.EHOSTUNREACH)
                self._drops = True
                return True
            self._current = end
            return True
        self.sending.append(frame)
        if not frame.more:
            message, self.sending = self.sending, []
            end, self._current, self._drops = self._current, None, False
            if end is not None and end in self.ends and end.alive:
                end.write(message)
        return True


class Rep(Core):
    """REP, of which each request gets one reply."""

    _envelope: tuple[End, Message] | None = None

    def take(self) -> Message | None:
        """As :class:`Core`: without what precedes the empty frame."""
        if self._envelope is not None:
            raise zmq.ZMQError(zmq.EFSM)
        found = self.next_message()
        if found is None:
            return None
        end, message = found
        first = next(i for i, frame in enumerate(message) if not len(frame)) + 1
        self._envelope = end, message[:first]
        return message[first:]

    def can_receive(self) -> bool:
        """As :class:`Core`."""
        return self._envelope is None and super().can_receive()

    def can_send(self) -> bool:
        """As :class:`Core`."""
        return self._envelope is not None

    def put(self, frame: Frame) -> bool:
        """As :class:`Core`."""
        if self._envelope is None:
            raise zmq.ZMQError(zmq.EFSM)
        self.sending.append(frame)
        if not frame.more:
            (end, envelope), self._envelope = self._envelope, None
            message, self.sending = self.sending, []
            if end.alive:
                end.write([*envelope, *message])
        return True


class Publisher(Core):
    """XPUB, and PUB, which does not show subscriptions."""

    def __init__(self, context: ContextCore, kind: int) -> None:
        super().__init__(context, kind)
        self._topics: dict[bytes, dict[End, None]] = {}
        self._shown: deque[Message] = deque()

    def attach(self, end: End) -> None:
        """As :class:`Core`: reads what it subscribes to."""
        super().attach(end)
        self.on_readable(end)

    def on_readable(self, end: End) -> None:
        """As :class:`Core`."""
        while end in self.ends and (message := end.read()) is not None:
            data, frame = message[0].bytes, message[0]
            topic, known = data[1:], self._topics.get(data[1:], {})
            if data[:1] == b"\1":
                self._topics.setdefault(topic, {})[end] = None
                if not known:
                    self._shown.append([frame])
            elif data[:1] == b"\0" and end in known:
                self._unsubscribe(topic, end, frame)
            elif data[:1] not in (b"\0", b"\1"):
                self._shown.append(message)

    def _unsubscribe(self, topic: bytes, end: End, frame: Frame) -> None:
        del self._topics[topic][end]
        if not self._topics[topic]:
            del self._topics[topic]
            self._shown.append([frame])

    def on_gone(self, end: End) -> None:
        """As :class:`Core`: a subscriber that has left unsubscribes."""
        super().on_gone(end)
        for topic in sorted(topic for topic, ends in self._topics.items() if end in ends):
            self._unsubscribe(topic, end, Frame(b"\0" + topic, False))

    def take(self) -> Message | None:
        """As :class:`Core`: a subscription."""
        return self._shown.popleft() if self._shown and self.kind == zmq.XPUB else None

    def can_receive(self) -> bool:
        """As :class:`Core`."""
        return bool(self._shown) and self.kind == zmq.XPUB

    def can_send(self) -> bool:
        """As :class:`Core`."""
        return True

    def put(self, frame: Frame) -> bool:
        """As :class:`Core`: who has subscribed to a prefix of the first frame, and has room, gets it."""
        self.sending.append(frame)
        if not frame.more:
            message, self.sending = self.sending, []
            first = message[0].bytes
            for end in list(self.ends):
                if end.has_room() and any(
                    end in self._topics.get(first[:n], ()) for n in range(len(first) + 1)
                ):
                    end.write(message)
        return True


class Subscriber(Core):
    """SUB."""

    def __init__(self, context: ContextCore, kind: int) -> None:
        super().__init__(context, kind)
        self._topics: dict[bytes, int] = {}

    def attach(self, end: End) -> None:
        """As :class:`Core`: sends the subscriptions."""
        super().attach(end)
        self.subscribe_all(end)

    def subscribe_all(self, end: End) -> None:
        """Sends all subscriptions, as over a new connection."""
        for topic in sorted(self._topics):
            end.write([Frame(b"\1" + topic, False)])

    def subscribe(self, topic: bytes) -> None:
        """As ``zmq.SUBSCRIBE``."""
        self._topics[topic] = self._topics.get(topic, 0) + 1
        self._tell(b"\1" + topic)

    def unsubscribe(self, topic: bytes) -> None:
        """As ``zmq.UNSUBSCRIBE``."""
        count = self._topics.get(topic, 0)
        if count > 1:
            self._topics[topic] = count - 1
        elif count:
            del self._topics[topic]
            self._tell(b"\0" + topic)

    def _tell(self, data: bytes) -> None:
        for end in self.ends:
            if end.alive:
                end.write([Frame(data, False)])

    def _matches(self, message: Message) -> bool:
        first = message[0].bytes
        return any(first.startswith(topic) for topic in self._topics)

    def take(self) -> Message | None:
        """As :class:`Core`: what is still subscribed to."""
        while (found := self.next_message()) is not None:
            if self._matches(found[1]):
                return found[1]
        return None

    def can_receive(self) -> bool:
        """As :class:`Core`."""
        if not self.receiving and (message := self.take()) is not None:
            self.receiving.extend(message)
        return bool(self.receiving)

    def can_send(self) -> bool:
        """As :class:`Core`."""
        return False

    def put(self, frame: Frame) -> bool:
        """As :class:`Core`."""
        raise zmq.ZMQError(zmq.ENOTSUP)


class Monitor:
    """Reports the events of a socket to a PAIR (``zmq_socket_monitor(3)``)."""

    def __init__(self, core: Core, events: int) -> None:
        self._core = core
        self._events = events
        self._end: End | None = None
        self._before: list[Message] = []

    def connected(self, peer: Core) -> End:
        """Returns the end of ``peer``, a PAIR that has connected."""
        self._end, theirs = connect(self, peer, peer.options[zmq.RCVHWM], 0)
        before, self._before = self._before, []
        for message in before:
            self._end.write(message)
        return theirs

    def report(self, kind: int, value: int, endpoint: str) -> None:
        """Reports an event, if it was asked for."""
        if not kind & self._events and kind != zmq.EVENT_MONITOR_STOPPED:
            return
        message = [
            Frame(struct.pack("=HI", kind, value & 0xFFFFFFFF), True),
            Frame(endpoint.encode(), False),
        ]
        if self._end is None:
            self._before.append(message)
        elif self._end.has_room():
            self._end.write(message)

    def close(self) -> None:
        """Reports the end, and nothing more."""
        if self._events & zmq.EVENT_MONITOR_STOPPED:
            self.report(zmq.EVENT_MONITOR_STOPPED, 0, "")
        if self._end is not None:
            self._end.leave()

    def command(self, act: Callable[[], None]) -> None:
        """As :class:`Owner`."""
        act()

    def on_readable(self, end: End) -> None:
        """As :class:`Owner`."""

    def on_writable(self, end: End) -> None:
        """As :class:`Owner`."""

    def on_gone(self, end: End) -> None:
        """As :class:`Owner`."""


TYPES: dict[int, type[Core]] = {
    zmq.DEALER: Dealer,
    zmq.PAIR: Pair,
    zmq.ROUTER: Router,
    zmq.REP: Rep,
    zmq.XPUB: Publisher,
    zmq.PUB: Publisher,
    zmq.SUB: Subscriber,
}
