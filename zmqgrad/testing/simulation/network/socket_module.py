"""The stand-in for module ``socket``."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import socket as real
import struct
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.testing.simulation.network.kernel import FIRST_FD, EventFd, Process, RealFd, failure
from zmqgrad.testing.simulation.network.stream import READ, WRITE, Passed, Socket

_INT = struct.Struct("@i")
_HOW = {real.SHUT_RD: READ, real.SHUT_WR: WRITE, real.SHUT_RDWR: READ | WRITE}
_DOUBLED = (real.SO_SNDBUF, real.SO_RCVBUF)


class SimSocket:
    """As ``socket.socket``, of one process."""

    _process: Process

    def __init__(
        self,
        family: int = real.AF_INET,
        type: int = real.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
    ) -> None:
        process = self._process
        if fileno is None:
            self._file = Socket(process.network, process, family, type)
            self._fd = process.install(self._file)
        else:
            found = process.get(fileno)
            if not isinstance(found, Socket):
                raise failure(errno.ENOTSOCK)
            self._file, self._fd = found, fileno
        self._timeout: float | None = None if self._file.blocking else 0.0
        self._files = 0  # of makefile, as whose part the socket stays open
        self._closed = False

    # ---- about it ---------------------------------------------------------------------------------------

    @property
    def family(self) -> real.AddressFamily:
        """As ``socket.family``."""
        return real.AddressFamily(self._file.family)

    @property
    def type(self) -> real.SocketKind:
        """As ``socket.type``."""
        return real.SocketKind(self._file.kind)

    @property
    def proto(self) -> int:
        """As ``socket.proto``."""
        return 0

    def fileno(self) -> int:
        """As ``socket.fileno``."""
        return self._fd

    def _open(self, what: str) -> Socket:
        if self._fd < 0:
            raise failure(errno.EBADF)
        self._process.network.scheduler.point(what)
        if self._fd < 0:  # closed meanwhile
            raise failure(errno.EBADF)
        return self._file

    def getsockname(self) -> Any:
        """As ``socket.getsockname``."""
        file = self._open("getsockname")
        if file.name is None:
            return ("0.0.0.0", 0) if file.is_tcp else ""
        return _shown(file.name)

    def getpeername(self) -> Any:
        """As ``socket.getpeername``."""
        file = self._open("getpeername")
        over = file.is_tcp and file.shut == READ | WRITE
        if not file.connected or over:
            raise failure(errno.ENOTCONN)
        return "" if file.peer_name is None else _shown(file.peer_name)

    # ---- options ----------------------------------------------------------------------------------------

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """As ``socket.setsockopt``."""
        file = self._open("setsockopt")
        if (level, option) == (real.SOL_SOCKET, real.SO_SNDBUF) and isinstance(value, int):
            file.send_buffer = 2 * min(value, 212_992)
        file.options[level, option] = value

    def getsockopt(self, level: int, option: int, size: int = 0) -> int | bytes:
        """As ``socket.getsockopt``."""
        file = self._open("getsockopt")
        if level == real.SOL_SOCKET:
            if option == real.SO_PEERCRED:
                return struct.pack("@3i", *file.peer_credentials)[:size]
            if option == real.SO_ERROR:
                error, file.error = file.error, 0
                return error
            if option == real.SO_SNDBUF:
                return file.send_buffer
            if option == real.SO_TYPE:
                return file.kind
            if option == real.SO_ACCEPTCONN:
                return int(file.listening)
        value = file.options.get((level, option), 0)
        if size and isinstance(value, int):
            return _INT.pack(value)[:size]
        return value[:size] if isinstance(value, bytes) and size else value

    def setblocking(self, flag: bool) -> None:
        """As ``socket.setblocking``."""
        self.settimeout(None if flag else 0.0)

    def getblocking(self) -> bool:
        """As ``socket.getblocking``."""
        return self._timeout != 0

    def settimeout(self, value: float | None) -> None:
        """As ``socket.settimeout``."""
        file = self._open("settimeout")
        self._timeout = value
        file.blocking = value is None

    def gettimeout(self) -> float | None:
        """As ``socket.gettimeout``."""
        return self._timeout

    # ---- connecting -------------------------------------------------------------------------------------

    def bind(self, address: Any) -> None:
        """As ``socket.bind``."""
        self._open("bind").bind(address)

    def listen(self, backlog: int = 128) -> None:
        """As ``socket.listen``."""
        self._open("listen").listen(backlog)

    def accept(self) -> tuple[SimSocket, Any]:
        """As ``socket.accept``."""
        file = self._open("accept")
        self._wait(file, lambda: bool(file.pending))
        accepted = file.accept()
        fd = self._process.install(accepted)
        file.network.embryos.discard(accepted)
        made = type(self)(fileno=fd)
        peer = "" if accepted.peer_name is None else _shown(accepted.peer_name)
        return made, peer

    def connect(self, address: Any) -> None:
        """As ``socket.connect``."""
        file = self._open("connect")
        if not file.is_tcp:
            file.network.connect_unix(file, address)
            return
        if file.connecting:
            raise failure(errno.EALREADY)
        if file.connected:
            raise failure(errno.EISCONN)
        file.network.connect_tcp(file, address)
        if self._timeout == 0:
            raise failure(errno.EINPROGRESS)
        deadline = None if self._timeout is None else file.network.scheduler.now() + self._timeout
        if not file.block(lambda: not file.connecting, True, deadline):
            raise TimeoutError("timed out")
        file.raise_error()

    def connect_ex(self, address: Any) -> int:
        """As ``socket.connect_ex``."""
        try:
            self.connect(address)
        except OSError as e:
            return e.errno or errno.EIO
        return 0

    # ---- data -------------------------------------------------------------------------------------------

    def _wait(self, file: Socket, ready: Any) -> None:
        """Waits as long as Python does, with a timeout of :meth:`settimeout`."""
        if self._timeout:
            deadline = file.network.scheduler.now() + self._timeout
            if not file.block(ready, True, deadline):
                raise TimeoutError("timed out")

    def _may_block(self, flags: int) -> bool:
        return self._timeout is None and not flags & real.MSG_DONTWAIT

    def send(self, data: Any, flags: int = 0) -> int:
        """As ``socket.send``."""
        file = self._open("send")
        self._wait(file, lambda: bool(file.is_writable() or file.shut or file.error))
        return file.send(bytes(data), self._may_block(flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """As ``socket.sendall``."""
        rest = bytes(data)
        while rest:
            rest = rest[self.send(rest, flags) :]

    def sendmsg(self, buffers: Sequence[Any], ancdata: Sequence[Any] = (), flags: int = 0) -> int:
        """As ``socket.sendmsg``: with descriptors."""
        file = self._open("sendmsg")
        data = b"".join(bytes(buffer) for buffer in buffers)
        passed: list[Passed] = []
        for level, kind, value in ancdata:
            if (level, kind) != (real.SOL_SOCKET, real.SCM_RIGHTS):
                raise failure(errno.EINVAL)
            raw = bytes(value)
            for (fd,) in _INT.iter_unpack(raw[: len(raw) // _INT.size * _INT.size]):
                passed.append(self._process.get(fd) if fd >= FIRST_FD else RealFd(os.dup(fd)))
        try:
            return file.send(data, self._may_block(flags), passed)
        except OSError:
            for one in passed:
                if isinstance(one, RealFd):
                    os.close(one.fd)
            raise

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As ``socket.recv``."""
        file = self._open("recv")
        self._wait(file, lambda: bool(file.received or file.shut or file.error))
        peek = bool(flags & real.MSG_PEEK)
        data, passed, _ = file.receive(bufsize, self._may_block(flags), peek)
        if not peek:
            for one in passed:
                self._discard(one)
        return bytes(data)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As ``socket.recv_into``."""
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view), flags)
        view[: len(data)] = data
        return len(data)

    def recvmsg(self, bufsize: int, ancbufsize: int = 0, flags: int = 0) -> tuple[bytes, list[Any], int, Any]:
        """As ``socket.recvmsg``: with descriptors."""
        file = self._open("recvmsg")
        peek = bool(flags & real.MSG_PEEK)
        data, passed, size = file.receive(bufsize, self._may_block(flags), peek)
        room = max(0, ancbufsize - real.CMSG_LEN(0)) // _INT.size
        found = real.MSG_EOR if file.kind == real.SOCK_SEQPACKET and data else 0
        if size > len(data):
            found |= real.MSG_TRUNC
        if len(passed) > room:
            found |= real.MSG_CTRUNC
        fds: list[int] = []
        for index, one in enumerate(passed):
            if index >= room:
                if not peek:
                    self._discard(one)
            elif isinstance(one, RealFd):
                fds.append(os.dup(one.fd) if peek else one.fd)
            else:
                fds.append(self._process.install(one))
                if not peek:
                    one.references -= 1
        ancillary = [(real.SOL_SOCKET, real.SCM_RIGHTS, b"".join(map(_INT.pack, fds)))] if fds else []
        return bytes(data), ancillary, found, None

    def _discard(self, one: Passed) -> None:
        if isinstance(one, RealFd):
            os.close(one.fd)
        else:
            self._process.drop(one)

    # ---- the end ----------------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        """As ``socket.shutdown``."""
        self._open("shutdown").shutdown(_HOW[how])

    def detach(self) -> int:
        """As ``socket.detach``."""
        fd, self._fd = self._fd, -1
        return fd

    def makefile(self, mode: str = "r", buffering: int | None = None) -> io.BufferedReader:
        """As ``socket.makefile``, for reading bytes."""
        if mode != "rb":
            raise NotImplementedError(f"makefile({mode!r}) in the simulation")
        reader: Any = real.SocketIO(self, "r")  # type: ignore[arg-type]
        self._files += 1
        return io.BufferedReader(reader)

    def _decref_socketios(self) -> None:
        self._files -= 1
        if self._closed:
            self.close()

    def close(self) -> None:
        """As ``socket.close``."""
        self._closed = True
        if self._files > 0:
            return
        fd = self.detach()
        if fd >= 0:
            self._process.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) in self._process.table:
            self.close()

    def dup(self) -> SimSocket:
        """As ``socket.dup``."""
        return type(self)(fileno=self._process.install(self._open("dup")))

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SimSocket {self._fd} of process {self._process.pid}>"


def _shown(name: Any) -> Any:
    if isinstance(name, bytes):
        return name if name.startswith(b"\0") else name.decode()
    return name


class SocketModule:
    """The stand-in for module ``socket`` in one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.socket: type[SimSocket] = type("socket", (SimSocket,), {"_process": process})
        self.SocketType = self.socket

    def socketpair(
        self, family: int = real.AF_UNIX, type: int = real.SOCK_STREAM, proto: int = 0
    ) -> tuple[SimSocket, SimSocket]:
        """As ``socket.socketpair``."""
        one, two = self.socket(family, type), self.socket(family, type)
        one._file.join(two._file)
        for end in (one, two):
            end._file.peer_credentials = self._process.network.credentials(self._process)
        return one, two

    def create_connection(
        self, address: tuple[str, int], timeout: float | None = None, **other: Any
    ) -> SimSocket:
        """As ``socket.create_connection``."""
        made = self.socket(real.AF_INET, real.SOCK_STREAM)
        try:
            made.settimeout(timeout)
            made.connect(address)
        except BaseException:
            made.close()
            raise
        return made

    def create_server(self, address: tuple[str, int], *, backlog: int = 128, **other: Any) -> SimSocket:
        """As ``socket.create_server``."""
        made = self.socket(real.AF_INET, real.SOCK_STREAM)
        try:
            made.bind(address)
            made.listen(backlog)
        except BaseException:
            made.close()
            raise
        return made

    def has_dualstack_ipv6(self) -> bool:
        """As ``socket.has_dualstack_ipv6``: hosts have IPv4 only."""
        return False

    def gethostname(self) -> str:
        """As ``socket.gethostname``."""
        return self._process.host

    def getfqdn(self, name: str = "") -> str:
        """As ``socket.getfqdn``."""
        return name or self._process.host

    def getaddrinfo(
        self, host: str | None, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[Any, ...]]:
        """As ``socket.getaddrinfo``, of IPv4."""
        if family not in (0, real.AF_INET):
            raise real.gaierror(real.EAI_NONAME, "Name or service not known")
        ip = self._process.network.resolve(host or "127.0.0.1")
        if ip is None:
            raise real.gaierror(real.EAI_NONAME, "Name or service not known")
        kind = real.SocketKind(type or real.SOCK_STREAM)
        return [(real.AF_INET, kind, real.IPPROTO_TCP, "", (ip, int(port or 0)))]

    def gethostbyname(self, host: str) -> str:
        """As ``socket.gethostbyname``."""
        found: str = self.getaddrinfo(host, None)[0][4][0]
        return found

    def __getattr__(self, name: str) -> Any:
        value = getattr(real, name)
        if callable(value) and not isinstance(value, type) and name not in _HARMLESS:
            raise AttributeError(f"module 'socket' of the simulation has no {name!r}")
        return value


_HARMLESS = ("CMSG_LEN", "CMSG_SPACE", "inet_ntoa", "inet_aton", "inet_pton", "inet_ntop", "htons", "ntohs")


class _Library:
    """The C library: two functions of it. As they keep the GIL, no other thread runs meanwhile."""

    def __init__(self, module: CtypesModule) -> None:
        self._get = module.process.get
        self.send = _Function(module, self._send)
        self.eventfd_write = _Function(module, self._eventfd_write)

    def _send(self, fd: int, data: bytes, size: int, flags: int) -> int:
        file = self._get(fd)
        if not isinstance(file, Socket):
            raise failure(errno.ENOTSOCK)
        return file.send(data[:size], file.blocking and not flags & real.MSG_DONTWAIT)

    def _eventfd_write(self, fd: int, value: int) -> int:
        file = self._get(fd)
        if not isinstance(file, EventFd):
            raise failure(errno.EINVAL)
        file.write(value.to_bytes(8, "little"))
        return 0


class _Function:
    def __init__(self, module: CtypesModule, call: Callable[..., int]) -> None:
        self._module = module
        self._call = call
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        try:
            return self._call(*args)
        except OSError as e:
            self._module.errno = e.errno or errno.EIO
            return -1


class CtypesModule:
    """The stand-in for module ``ctypes``: the C library of the process is that of the simulation."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.errno = 0

    def PyDLL(self, name: str | None, **other: Any) -> Any:
        """As ``ctypes.PyDLL``."""
        return _Library(self) if name is None else ctypes.PyDLL(name, **other)

    def get_errno(self) -> int:
        """As ``ctypes.get_errno``."""
        return self.errno

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)
