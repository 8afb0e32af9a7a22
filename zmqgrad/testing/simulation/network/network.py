"""The network of a simulation: hosts, processes, and who listens where."""

from __future__ import annotations

import errno
import os
import socket as real
from collections.abc import Collection
from typing import Any

from zmqgrad.testing.simulation.network.faults import Faults
from zmqgrad.testing.simulation.network.kernel import Process, failure
from zmqgrad.testing.simulation.network.polling import SelectModule
from zmqgrad.testing.simulation.network.scheduler import Scheduler
from zmqgrad.testing.simulation.network.socket_module import CtypesModule, SocketModule
from zmqgrad.testing.simulation.network.stream import Socket, Wire
from zmqgrad.testing.simulation.network.zmq_module import ZmqModule

FIRST_PORT, LAST_PORT = 32768, 60999
"""Ports that the system chooses."""

SYN_RETRY_SECONDS = 1.0
CONNECT_SECONDS = 127.0
"""When the kernel gives up to connect to a host that does not answer."""

ANY = ("0.0.0.0", "::")


class Network:
    """All hosts. ``scheduler`` runs the processes; ``faults`` decides what is late, or lost."""

    def __init__(self, scheduler: Scheduler, faults: Faults | None = None) -> None:
        self.scheduler = scheduler
        self.faults = faults or Faults(scheduler.rng)
        self.processes: list[Process] = []
        self.stalled: list[Wire] = []
        """Connections by which nothing passes until :meth:`heal`."""
        self.embryos: set[Socket] = set()
        """Connections that wait to be accepted."""
        self._hosts: dict[str, str] = {}  # addresses
        self._bound: dict[tuple[str, Any], Socket] = {}  # by host and name: port, or name of a unix socket
        self._left: set[tuple[str, Any]] = set()  # files of unix sockets that are closed
        self._next_port = FIRST_PORT

    def process(self, host: str, pid: int) -> Process:
        """Returns a new process of ``host``, which has an address of its own."""
        self.address(host)
        made = Process(self, host, pid)
        self.processes.append(made)
        return made

    def make_modules(self, process: Process) -> dict[str, Any]:
        """Returns the stand-ins for the modules by which ``process`` reaches the network."""
        return {
            "socket": SocketModule(process),
            "select": SelectModule(process),
            "ctypes": CtypesModule(process),
            "zmq": ZmqModule(process),
        }

    def address(self, host: str) -> str:
        """Returns the address of ``host``."""
        return self._hosts.setdefault(host, f"10.0.0.{len(self._hosts) + 1}")

    def credentials(self, process: Process) -> tuple[int, int, int]:
        """Returns what SO_PEERCRED tells of ``process``."""
        return process.pid, os.getuid(), os.getgid()

    # ---- faults -----------------------------------------------------------------------------------------

    def partition(self, ones: Collection[str], others: Collection[str], both: bool = True) -> None:
        """Lets nothing pass from the hosts ``ones`` to ``others``; ``both``: nor back."""
        self.faults.cut.update((one, other) for one in ones for other in others)
        if both:
            self.partition(others, ones, False)

    def heal(self) -> None:
        """Ends all partitions: what has been sent meanwhile arrives now."""
        self.faults.cut.clear()
        stalled, self.stalled = self.stalled, []
        for wire in stalled:
            wire.carry()

    def connections(self) -> list[Socket]:
        """Returns the connections between hosts, or within one by TCP: one end of each."""
        found: dict[Socket, None] = {}
        for process in self.processes:
            for end in process.table.values():
                if isinstance(end, Socket) and end.is_tcp and end.peer is not None and end.peer not in found:
                    found[end] = None
        return list(found)

    def drop(self, connection: Socket) -> None:
        """Breaks ``connection``: what is on its way is lost, and both ends are told."""
        for end in (connection, connection.peer):
            if end is not None:
                if end.wire is not None:
                    end.wire.cut = True
                end.reset(errno.ECONNRESET)

    def drop_connections(self, count: int = 1) -> int:
        """Breaks as many connections by TCP as there are, at most ``count``. Returns how many."""
        found = self.connections()
        chosen = self.scheduler.rng.sample(found, min(count, len(found)))
        for connection in chosen:
            self.drop(connection)
        return len(chosen)

    # ---- names ------------------------------------------------------------------------------------------

    def bind(self, socket: Socket, address: Any) -> Any:
        """Binds ``socket``. Returns its name."""
        host = socket.process.host
        if not socket.is_tcp:
            name = address.encode() if isinstance(address, str) else bytes(address)
            if (host, name) in self._bound or (host, name) in self._left:
                raise failure(errno.EADDRINUSE)
            self._bound[host, name] = socket
            return name
        ip, port = address[:2]
        ip = ip or ANY[0]
        if ip not in ANY and self.host_of(ip, host) != host:
            raise failure(errno.EADDRNOTAVAIL)
        port = port or self._free_port(host)
        if (host, port) in self._bound:
            raise failure(errno.EADDRINUSE)
        self._bound[host, port] = socket
        return (ip, port, *address[2:])

    def _free_port(self, host: str) -> int:
        while True:
            port = self._next_port
            self._next_port = FIRST_PORT if port == LAST_PORT else port + 1
            if (host, port) not in self._bound:
                return port

    def forget(self, socket: Socket) -> None:
        """Frees the name of ``socket``."""
        key = socket.process.host, socket.name if not socket.is_tcp else (socket.name or (0, 0))[1]
        if self._bound.get(key) is socket:
            del self._bound[key]
            if not socket.is_tcp and not socket.name.startswith(b"\0"):
                self._left.add(key)

    def host_of(self, ip: str, own: str) -> str | None:
        """Returns the host with address ``ip``, as host ``own`` sees it."""
        if ip in ANY or ip.startswith("127.") or ip in ("::1", "localhost"):
            return own
        return next((host for host, known in self._hosts.items() if ip in (known, host)), None)

    def resolve(self, name: str) -> str | None:
        """Returns the address of the host with that name or address; None if there is none."""
        if name == "localhost":
            return "127.0.0.1"
        if name in self._hosts:
            return self._hosts[name]
        parts = name.split(".")
        return name if len(parts) == 4 and all(part.isdigit() for part in parts) else None

    # ---- connecting -------------------------------------------------------------------------------------

    def connect_unix(self, socket: Socket, address: Any) -> None:
        """Connects a unix socket, and may wait until there is room for it."""
        name = address.encode() if isinstance(address, str) else bytes(address)
        key = socket.process.host, name

        def listener() -> Socket:
            found = self._bound.get(key)
            if found is None and not name.startswith(b"\0") and key not in self._left:
                raise failure(errno.ENOENT)
            if found is None or not found.listening:
                raise failure(errno.ECONNREFUSED)
            if found.kind != socket.kind:
                raise failure(errno.EPROTOTYPE)
            return found

        def has_room() -> bool:
            found = self._bound.get(key)
            return found is None or not found.listening or found.has_room()

        if socket.connected:
            raise failure(errno.EISCONN)
        if not listener().block(has_room, socket.blocking, socket.deadline(False)):
            raise failure(errno.EAGAIN)
        found = listener()
        accepted = Socket(self, found.process, socket.family, socket.kind)
        accepted.name = socket.peer_name = found.name
        accepted.peer_name = socket.name
        accepted.peer_credentials = self.credentials(socket.process)
        socket.peer_credentials = found.credentials
        socket.join(accepted)
        self.embryos.add(accepted)
        found.enqueue(accepted)

    def connect_tcp(self, socket: Socket, address: Any) -> None:
        """Starts to connect. The outcome shows at the socket."""
        ip, port = address[:2]
        target = self.host_of(ip, socket.process.host)
        if socket.name is None:
            own = "127.0.0.1" if target == socket.process.host else self.address(socket.process.host)
            socket.name = (own, self._free_port(socket.process.host), *address[2:])
        socket.peer_name = (self.address(target) if target and ip in ANY else ip, port, *address[2:])
        if socket.kind == real.SOCK_DGRAM:
            return  # that chooses a route, and sends nothing
        socket.connecting = True
        self._send_syn(socket, target, port, self.scheduler.now() + CONNECT_SECONDS)

    def _send_syn(self, socket: Socket, target: str | None, port: int, until: float) -> None:
        if not socket.connecting or not socket.references:
            return
        own, now = socket.process.host, self.scheduler.now()
        timeout = socket.options.get((real.IPPROTO_TCP, real.TCP_USER_TIMEOUT), 0)
        if isinstance(timeout, int) and timeout:
            until = min(until, now + timeout / 1000)
        if now >= until:
            socket.reset(errno.ETIMEDOUT)
            return
        lost = target is None or self.faults.is_cut(own, target) or self.faults.is_cut(target, own)
        found = None if target is None else self._bound.get((target, port))
        if lost or (found is not None and found.listening and not found.has_room()):
            again = min(until, now + SYN_RETRY_SECONDS)
            self.scheduler.call_at(again, lambda: self._send_syn(socket, target, port, until))
            return
        assert target is not None
        delay = self.faults.delay(own, target) + self.faults.delay(target, own)

        def answer() -> None:
            if not socket.connecting or not socket.references:
                return
            listener = self._bound.get((target, port))
            if listener is None or not listener.listening:
                socket.reset(errno.ECONNREFUSED)
                return
            accepted = Socket(self, listener.process, socket.family, socket.kind)
            accepted.name, accepted.peer_name = socket.peer_name, socket.name
            socket.connecting = False
            socket.join(accepted)
            self.embryos.add(accepted)
            listener.enqueue(accepted)
            socket.changed()

        if delay:
            self.scheduler.call_at(now + delay, answer)
        else:
            answer()
