"""A device for tests: its memory is main memory, and its work is done when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from zmqgrad.transport.devices.port import Unshareable
from zmqgrad.wire.unwritten import OnDevice

MB = 1 << 20


class Moment:
    """An event, or a copy."""

    numbers = itertools.count(1)

    def __init__(self, port: StandIn) -> None:
        self.handle = b"event %d" % next(self.numbers)
        self.port = port
        self.after: tuple[Moment, ...] = ()
        self.come = False

    def done(self) -> bool:
        """As of an event that was never recorded, true of one whose device is idle."""
        return self.come or not self.port.busy

    def wait(self) -> None:
        """The device does what is queued."""
        self.come = True


class StandInFrame(OnDevice):
    """``data`` on ``device``."""

    def __init__(self, data: bytes, device: str = "gpu:0") -> None:
        OnDevice.made = True
        self.data = data
        self._device = device

    def __len__(self) -> int:
        return len(self.data)

    @property
    def device(self) -> str:
        return self._device

    def write_to(self, room: memoryview) -> None:
        room[:] = self.data

    def written(self) -> bytes:
        return self.data


class StandInMemory:
    """A bytearray, which whoever knows its handle can open."""

    def __init__(self, port: StandIn, device: str, size: int) -> None:
        self.port = port
        self.device = f"uuid of {device}"
        self.data = bytearray(size)
        self.events: dict[bytes, Moment] = {}
        self.shared: list[bytes] = []
        self.unshared: list[bytes] = []
        self.closed = False

    def share(self) -> bytes:
        if self.port.unshareable:
            raise Unshareable("operation not supported")
        handle = b"handle %d" % next(Moment.numbers)
        self.shared.append(handle)
        self.port.everything[handle] = self
        return handle

    def unshare(self, handle: bytes) -> None:
        self.unshared.append(handle)

    def new_event(self) -> Moment:
        event = Moment(self.port)
        self.events[event.handle] = event
        return event

    def write(self, frames: Iterable[tuple[int, OnDevice]], event: Any, after: Iterable[Any]) -> None:
        if self.port.broken:
            raise RuntimeError("CUDA error: misaligned address")
        event.come, event.after = False, tuple(after)
        for offset, frame in frames:
            self.data[offset : offset + len(frame)] = frame.written()

    def close(self, after: Iterable[Any]) -> None:
        self.closed = True


class StandInOpened:
    """``memory``, as another process sees it."""

    def __init__(self, memory: StandInMemory) -> None:
        self.memory = memory

    def copy(self, offset: int, ready: bytes, tensor: Any) -> Moment:
        """``tensor`` is a bytearray."""
        if self.memory.port.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        copied = Moment(self.memory.port)
        copied.after = (self.memory.events[ready],)
        tensor[:] = self.memory.data[offset : offset + len(tensor)]
        return copied


class StandIn:
    """Devices ``gpu:0``, ``gpu:1`` and so on. While ``busy``, nothing that is queued is done."""

    everything: dict[bytes, StandInMemory] = {}  # of all processes, so to speak

    def __init__(self, limit: int = 16 * MB) -> None:
        self._limit = limit
        self.busy = False
        self.unshareable = False
        self.invisible = False
        self.broken = False
        self.full = False
        self.memories: list[StandInMemory] = []
        self.opened_as_own: list[bool] = []

    def limit(self, device: str) -> int:
        return self._limit

    def allocate(self, device: str, size: int) -> StandInMemory:
        if self.full:
            raise OSError("CUDA out of memory")
        memory = StandInMemory(self, device, size)
        self.memories.append(memory)
        return memory

    def open(self, device: str, handle: bytes, size: int, own: bool) -> StandInOpened:
        self.opened_as_own.append(own)
        memory = self.everything.get(handle)
        if self.invisible or memory is None or memory.device != device:
            raise OSError("this process does not see that device")
        return StandInOpened(memory)
