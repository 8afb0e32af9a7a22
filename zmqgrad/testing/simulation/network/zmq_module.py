"""The stand-in for module ``zmq``: what pyzmq makes of libzmq."""

from __future__ import annotations

import errno
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import zmq

from zmqgrad.testing.simulation.network.kernel import IN, OUT, Process
from zmqgrad.testing.simulation.network.polling import Poll
from zmqgrad.testing.simulation.network.zmq_context import ContextCore
from zmqgrad.testing.simulation.network.zmq_engine import Connector, Listener
from zmqgrad.testing.simulation.network.zmq_pipes import Frame
from zmqgrad.testing.simulation.network.zmq_sockets import Core, Monitor, Subscriber

_OWN = ("context",)
_ADDRESS_ANY = "0.0.0.0"


def _option(name: str) -> int:
    try:
        return int(getattr(zmq, name.upper()))
    except AttributeError:
        raise AttributeError(f"a socket of the simulation has no {name!r}") from None


class SimZmqSocket:
    """As ``zmq.Socket``."""

    context: SimContext
    _core: Core

    def __init__(self, context: SimContext, kind: int) -> None:
        vars(self)["context"] = context
        vars(self)["_core"] = context.core.open(kind)

    def __class_getitem__(cls, item: object) -> type[SimZmqSocket]:
        return cls

    # ---- options ----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        self.setsockopt(_option(name), value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.getsockopt(_option(name))

    def setsockopt(self, option: int, value: Any) -> None:
        """As ``Socket.setsockopt``."""
        self._check("setsockopt")
        core = self._core
        if option in (zmq.SUBSCRIBE, zmq.UNSUBSCRIBE):
            core.take_commands()
            if not isinstance(core, Subscriber):
                raise zmq.ZMQError(zmq.EINVAL)
            topic = value.encode() if isinstance(value, str) else bytes(value)
            (core.subscribe if option == zmq.SUBSCRIBE else core.unsubscribe)(topic)
            return
        if isinstance(value, str):
            value = value.encode()
        core.options[option] = value if isinstance(value, bytes) else int(value)

    def getsockopt(self, option: int) -> Any:
        """As ``Socket.getsockopt``."""
        self._check("getsockopt")
        core = self._core
        if option == zmq.FD:
            return core.fd
        if option == zmq.RCVMORE:
            return int(core.more)
        if option == zmq.EVENTS:
            core.take_commands()
            return self._events()
        if option == zmq.TYPE:
            return core.kind
        if option not in core.options:
            raise NotImplementedError(f"option {option} of sockets in the simulation")
        return core.options[option]

    set, get = setsockopt, getsockopt

    def getsockopt_string(self, option: int) -> str:
        """As ``Socket.getsockopt_string``."""
        value: bytes = self.getsockopt(option)
        return value.decode()

    def subscribe(self, topic: str | bytes) -> None:
        """As ``Socket.subscribe``."""
        self.setsockopt(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, topic: str | bytes) -> None:
        """As ``Socket.unsubscribe``."""
        self.setsockopt(zmq.UNSUBSCRIBE, topic)

    @property
    def closed(self) -> bool:
        """As ``Socket.closed``."""
        return self._core.closed

    def fileno(self) -> int:
        """As ``Socket.fileno``."""
        return self._core.fd

    def _check(self, what: str) -> None:
        self._core.context.process.network.scheduler.point(f"zmq {what}")
        if self._core.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    def _events(self) -> int:
        core = self._core
        found = int(zmq.POLLIN) if core.receiving or core.can_receive() else 0
        return found | (int(zmq.POLLOUT) if core.can_send() else 0)

    # ---- endpoints --------------------------------------------------------------------------------------

    def _address(self, endpoint: str, binding: bool) -> tuple[str, int]:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        if not endpoint.startswith("tcp://") or not host or not (port == "*" or port.isdigit()):
            raise zmq.ZMQError(zmq.EINVAL)
        if binding and host == "*":
            return _ADDRESS_ANY, int(port.replace("*", "0"))
        if not binding and not port.strip("0*"):
            raise zmq.ZMQError(zmq.EINVAL)
        ip = host if ":" in host else self._core.context.process.network.resolve(host)
        if ip is None:
            raise zmq.ZMQError(errno.ENODEV if binding else zmq.EINVAL)
        return ip, int(port.replace("*", "0"))

    def bind(self, endpoint: str) -> None:
        """As ``Socket.bind``."""
        self._check("bind")
        core = self._core
        core.take_commands()
        if endpoint.startswith("inproc://"):
            core.context.bind_name(endpoint, core)
            core.inproc.append(endpoint)
            core.options[zmq.LAST_ENDPOINT] = endpoint.encode()
            return
        listener = Listener(core, self._address(endpoint, True))
        core.listeners[listener.endpoint] = listener
        core.options[zmq.LAST_ENDPOINT] = listener.endpoint.encode()

    def unbind(self, endpoint: str) -> None:
        """As ``Socket.unbind``."""
        self._check("unbind")
        self._core.take_commands()
        listener = self._core.listeners.pop(endpoint, None)
        if listener is None:
            raise zmq.ZMQError(errno.ENOENT)
        listener.close(self._core.options[zmq.LINGER])

    def connect(self, endpoint: str) -> None:
        """As ``Socket.connect``."""
        self._check("connect")
        core = self._core
        core.take_commands()
        if endpoint.startswith("inproc://"):
            core.context.connect_name(endpoint, core)
        else:
            core.connectors.append(Connector(core, endpoint, self._address(endpoint, False)))
        core.options[zmq.LAST_ENDPOINT] = endpoint.encode()

    # ---- messages ---------------------------------------------------------------------------------------

    def _wait(self, flags: int, timeout: int) -> None:
        """Waits for commands, and takes them."""
        core = self._core
        if flags & zmq.NOBLOCK or timeout == 0:
            raise zmq.Again()
        scheduler = core.context.process.network.scheduler
        deadline = None if timeout < 0 else scheduler.now() + timeout / 1000

        def has_command() -> bool:
            return bool(core.file.waiting or core.context.terminated)

        if not scheduler.wait_until(has_command, deadline, core.file):
            raise zmq.Again()
        core.take_commands()

    def send(self, data: Any, flags: int = 0, copy: bool = True, track: bool = False) -> None:
        """As ``Socket.send``."""
        self._check("send")
        core = self._core
        if core.context.terminated:
            raise zmq.ContextTerminated()
        core.take_commands_perhaps()
        if isinstance(data, Frame):
            data = data.buffer
        frame = Frame(bytes(data) if copy else data, bool(flags & zmq.SNDMORE))
        while not core.put(frame):
            self._wait(flags, core.options[zmq.SNDTIMEO])

    def send_multipart(self, parts: Sequence[Any], flags: int = 0, copy: bool = True, **other: Any) -> None:
        """As ``Socket.send_multipart``."""
        for part in parts[:-1]:
            self.send(part, flags | zmq.SNDMORE, copy)
        self.send(parts[-1], flags, copy)

    def recv(self, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        """As ``Socket.recv``."""
        self._check("recv")
        core = self._core
        if core.context.terminated:
            raise zmq.ContextTerminated()
        if not core.receiving:
            message = core.take()
            if message is None:
                core.take_commands()
                message = core.take()
            while message is None:
                self._wait(flags, core.options[zmq.RCVTIMEO])
                message = core.take()
            core.receiving.extend(message)
        frame = core.receiving.popleft()
        core.more = frame.more
        return frame.bytes if copy else frame

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Any]:
        """As ``Socket.recv_multipart``."""
        parts = [self.recv(flags, copy)]
        while self._core.more:
            parts.append(self.recv(flags, copy))
        return parts

    def poll(self, timeout: float | None = None, flags: int = zmq.POLLIN) -> int:
        """As ``Socket.poll``."""
        poller = SimPoller(self._core.context.process)
        poller.register(self, flags)
        return sum(seen for _, seen in poller.poll(timeout))

    # ---- monitors, and the end --------------------------------------------------------------------------

    def monitor(self, address: str | None, events: int = zmq.EVENT_ALL) -> None:
        """As ``Socket.monitor``."""
        self._check("monitor")
        core = self._core
        core.stop_monitor()
        if address is not None:
            monitor = Monitor(core, events)
            core.context.bind_name(address, monitor)
            core.monitor = monitor

    def disable_monitor(self) -> None:
        """As ``Socket.disable_monitor``."""
        self.monitor(None, 0)

    def close(self, linger: int | None = None) -> None:
        """As ``Socket.close``."""
        core = self._core
        if core.closed:
            return
        core.context.process.network.scheduler.point("zmq close")
        milliseconds = core.options[zmq.LINGER] if linger is None else linger
        core.stop_monitor()
        core.closed = True
        core.context.forget_name(core)
        for end in list(core.ends):
            end.leave()
        for listener in core.listeners.values():
            listener.close(milliseconds)
        for connector in core.connectors:
            connector.close(milliseconds)
        core.context.process.close(core.fd)
        core.context.cores.remove(core)
        core.context.process.network.scheduler.notify(core.context.contents)

    def __enter__(self) -> SimZmqSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SimPoller:
    """As ``zmq.Poller``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._masks: dict[Any, int] = {}

    def register(self, socket: Any, flags: int = zmq.POLLIN | zmq.POLLOUT) -> None:
        """As ``Poller.register``."""
        self._masks[socket] = int(flags)

    modify = register

    def unregister(self, socket: Any) -> None:
        """As ``Poller.unregister``."""
        del self._masks[socket]

    def _now(self) -> list[tuple[Any, int]]:
        found: list[tuple[Any, int]] = []
        for one, mask in self._masks.items():
            if isinstance(one, SimZmqSocket):
                seen = one.getsockopt(zmq.EVENTS) & mask
            else:
                poll = Poll(self._process)
                poll.register(one, (IN if mask & zmq.POLLIN else 0) | (OUT if mask & zmq.POLLOUT else 0))
                seen = sum(int(zmq.POLLIN) if ev & ~OUT else int(zmq.POLLOUT) for _, ev in poll.poll(0))
            if seen:
                found.append((one, seen))
        return found

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """As ``Poller.poll``."""
        scheduler = self._process.network.scheduler
        limited = timeout is not None and timeout >= 0
        deadline = scheduler.now() + (timeout or 0) / 1000 if limited else None
        waiting = Poll(self._process)
        for one, mask in self._masks.items():
            waiting.register(one, IN if isinstance(one, SimZmqSocket) or mask & zmq.POLLIN else OUT)
        while not (found := self._now()):
            left = None if deadline is None else deadline - scheduler.now()
            if left is not None and left <= 0:
                break
            waiting.poll(None if left is None else left * 1000)
        return found


class SimContext:
    """As ``zmq.Context``."""

    def __init__(self, process: Process, io_threads: int = 1) -> None:
        self.core = ContextCore(process)
        self._sockets: weakref.WeakValueDictionary[int, SimZmqSocket] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._options = {
            int(zmq.IO_THREADS): io_threads,
            int(zmq.MAX_SOCKETS): 1023,
            int(zmq.SOCKET_LIMIT): 65535,
        }

    @property
    def closed(self) -> bool:
        """As ``Context.closed``."""
        return self.core.terminated

    def socket(self, kind: int, **other: Any) -> SimZmqSocket:
        """As ``Context.socket``."""
        self.core.process.network.scheduler.point("zmq socket")
        if len(self.core.cores) >= self._options[int(zmq.MAX_SOCKETS)]:
            raise zmq.ZMQError(errno.EMFILE)
        made = self._sockets[next(self._numbers)] = SimZmqSocket(self, kind)
        return made

    def set(self, option: int, value: int) -> None:
        """As ``Context.set``."""
        self._options[int(option)] = value

    def get(self, option: int) -> int:
        """As ``Context.get``."""
        return self._options[int(option)]

    def term(self) -> None:
        """As ``Context.term``."""
        self.core.process.network.scheduler.point("zmq term")
        self.core.terminate()

    def destroy(self, linger: int | None = None) -> None:
        """As ``Context.destroy``."""
        for socket in list(self._sockets.values()):
            socket.close(linger)
        self.term()

    def __enter__(self) -> SimContext:
        return self

    def __exit__(self, *error: object) -> None:
        self.term()


class _ContextMaker:
    """Takes the place of the class: makes the contexts of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __call__(self, io_threads: int = 1, **other: Any) -> SimContext:
        return SimContext(self._process, io_threads)

    def __getitem__(self, item: object) -> _ContextMaker:
        return self


class ZmqModule:
    """The stand-in for module ``zmq`` in one process: constants and errors are those of pyzmq."""

    Socket = SimZmqSocket
    Frame = Frame

    def __init__(self, process: Process) -> None:
        self._process = process
        self.Context = _ContextMaker(process)

    def Poller(self) -> SimPoller:
        """As ``zmq.Poller``."""
        return SimPoller(self._process)

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)
