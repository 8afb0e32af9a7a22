"""Memory of CUDA devices that other processes of this host can open: torch's own means for it, in one place.

``UntypedStorage._share_cuda_`` makes a handle for one reader, and a counter that he lowers when he closes it;
until then torch keeps the memory, whoever else lets go of it. For a reader that died, or never opened it,
``_release_ipc_counter_cuda`` lowers it in his place. ``_new_shared_cuda`` opens a handle. A process cannot
open its own, nor its own events; there it is given the memory itself.

What a handle says of sizes is its maker's word, as CUDA does not tell; he is of this user, and on this host
(:mod:`zmqgrad.transport.devices.segment`).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from zmqgrad.transport.devices.port import Unshareable
from zmqgrad.wire.tensors.devices import DeviceFrame
from zmqgrad.wire.unwritten import OnDevice

logger = logging.getLogger(__name__)

SHARE = 16
"""A worker may lend one part in so many of the memory of each device."""

HANDLE = 64
"""Bytes of a handle of CUDA's; torch puts something in front of those of memory."""

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What ``_share_cuda_`` gives, and the number of the memory in its own process."""

    memory: bytes
    size: _Number
    offset: _Number
    counter: bytes
    counter_offset: _Number
    event: bytes
    event_required: bool
    number: _Number


class CudaPort:
    """The CUDA devices of this process. ``limit``: see ``RpcBackendOptions.cuda_ipc_limit``."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._limits: dict[str, int] = {}

    def limit(self, device: str) -> int:
        """Bytes of ``device`` that may be lent at a time; 0: none."""
        if self._limit is not None:
            return self._limit
        limit = self._limits.get(device)
        if limit is None:
            limit = self._limits[device] = torch.cuda.get_device_properties(device).total_memory // SHARE
        return limit

    def allocate(self, device: str, size: int) -> _Memory:
        """``size`` bytes on ``device``, of those that torch keeps there.

        Raises:
            OSError: if there are none.
        """
        try:
            return _Memory(torch.device(device), size)
        except RuntimeError as e:  # torch.OutOfMemoryError is one
            raise OSError(f"no memory on {device}: {e}") from e

    def open(self, device: str, handle: bytes, size: int, own: bool) -> _Opened:
        """What ``handle`` opens: ``size`` bytes on the device of that UUID; of this very process, if ``own``.

        Raises:
            OSError: if that cannot be.
        """
        try:
            told = msgspec.msgpack.decode(handle, type=_Handle)
        except (msgspec.MsgspecError, UnicodeError) as e:
            raise OSError(f"a handle of memory on a device is none: {e}") from e
        if own:
            memory = _here.get(told.number)
            if memory is None or memory.size != size:
                raise OSError("this process has no such memory on a device")
            return _Opened(memory.storage, memory.where, memory)
        if len(told.memory) < HANDLE or len(told.event) != HANDLE or told.size != size:
            raise OSError("a handle of memory on a device is too short, or of another size than was said")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = _find(device)
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                told.memory,
                told.size,
                told.offset,
                told.counter,
                told.counter_offset,
                told.event,
                told.event_required,
            )
        except (RuntimeError, AssertionError) as e:  # AssertionError: this torch was built without CUDA
            raise OSError(f"memory of another process on device {device} cannot be opened: {e}") from e
        return _Opened(storage, torch.device("cuda", index))


class _Event:
    """An event that other processes can wait for; in its own, by ``event``."""

    def __init__(self, device: torch.device) -> None:
        event: Any = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        self.event = event
        self.event.record(torch.cuda.current_stream(device))  # it is made on that device now
        self.handle: bytes = self.event.ipc_handle()

    def done(self) -> bool:
        """Has it come?"""
        return _has_come(self.event)

    def wait(self) -> None:
        """Wait until it has."""
        _await(self.event)


class _Copied:
    """Tells when a copy is done."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        """Is it?"""
        return _has_come(self._event)

    def wait(self) -> None:
        """Wait until it is."""
        _await(self._event)


def _has_come(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError as e:
        # The device has failed, and says so to all; or must not be asked now, as a graph is being captured.
        # In doubt, what it reads or writes is not to be used again.
        logger.debug("a device does not say whether it is done: %s", e)
        return False


def _await(event: Any) -> None:
    try:
        event.synchronize()
    except RuntimeError as e:
        logger.debug("a device cannot be waited for: %s", e)


_here: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class _Memory:
    """Memory of this process on ``where``. Its views are made anew each time: they have all dtypes."""

    def __init__(self, where: torch.device, size: int) -> None:
        self.where = where
        self.size = size
        self.device = _uuid(where)
        self.storage: Any = torch.UntypedStorage(size, device=where)  # type: ignore[no-untyped-call]
        self.events: dict[bytes, _Event] = {}  # by handle
        self._stream = torch.cuda.current_stream(where)  # where torch will use this memory again
        self._spare: list[_Event] = []
        self._number = next(_numbers)
        _here[self._number] = self

    def share(self) -> bytes:
        """A handle by which one more process can open it.

        Raises:
            Unshareable: if torch or CUDA cannot do that here.
        """
        try:
            if not self.events:
                self._spare.append(self.new_event())
            _, memory, size, offset, counter, counter_offset, event, required = self.storage._share_cuda_()
        except RuntimeError as e:
            raise Unshareable(str(e)) from e
        told = _Handle(
            bytes(memory),
            size,
            offset,
            bytes(counter),
            counter_offset,
            bytes(event),
            required,
            self._number,
        )
        return msgspec.msgpack.encode(told)

    def unshare(self, handle: bytes) -> None:
        """Whoever was given ``handle`` does not have it open, and cannot say so himself."""
        told = msgspec.msgpack.decode(handle, type=_Handle)
        torch.UntypedStorage._release_ipc_counter_cuda(told.counter, told.counter_offset)

    def new_event(self) -> _Event:
        """An event of its device."""
        if self._spare:
            return self._spare.pop()
        event = _Event(self.where)
        self.events[event.handle] = event
        return event

    def write(self, frames: Iterable[tuple[int, OnDevice]], event: Any, after: Iterable[Any]) -> None:
        """Queue copies of ``frames`` to their offsets, and ``event`` behind them, on the current stream."""
        stream = torch.cuda.current_stream(self.where)
        for other in after:
            stream.wait_event(other.event)
        for offset, frame in frames:
            assert isinstance(frame, DeviceFrame)
            t = frame.tensor
            _view(self.storage, self.where, offset, t.dtype, t.shape).copy_(t, non_blocking=True)
        event.event.record(stream)

    def close(self, after: Iterable[Any]) -> None:
        """It is needed no more, here: torch may use the memory for something else, ``after`` these events.

        Not before those who have it open have closed it; torch sees to that.
        """
        _here.pop(self._number, None)
        try:
            for event in after:
                self._stream.wait_event(event.event)
        except RuntimeError as e:  # as in _has_come
            logger.debug("a device does not wait: %s", e)
        self.storage = None


class _Opened:
    """Memory of another process, or of this one (``own``). Closed when nothing refers to it any more."""

    def __init__(self, storage: Any, where: torch.device, own: _Memory | None = None) -> None:
        self._storage = storage
        self._where = where
        self._own = own
        self._lock = threading.Lock()  # guards _events
        self._events: dict[bytes, Any] = {}

    def copy(self, offset: int, ready: bytes, tensor: Any) -> _Copied:
        """Queue a copy of what is at ``offset`` to ``tensor``, behind the event of handle ``ready``.

        Both on the current stream of the device where the memory is: there torch queues a copy that goes to
        another device, and has that one's current stream wait for it.

        Raises:
            RuntimeError: torch's words, if that cannot be.
        """
        event = self._event(ready)
        stream = torch.cuda.current_stream(self._where)
        stream.wait_event(event)
        with torch.no_grad():
            source = _view(self._storage, self._where, offset, tensor.dtype, tensor.shape)
            tensor.copy_(source, non_blocking=True)
        return _Copied(stream)

    def _event(self, handle: bytes) -> Any:
        if self._own is not None:
            mine = self._own.events.get(handle)
            if mine is None:
                raise RuntimeError("this process has no such event")
            return mine.event
        with self._lock:
            event = self._events.get(handle)
            if event is None:
                if len(handle) != HANDLE:
                    raise RuntimeError(f"{len(handle)} bytes are no handle of an event")
                event = torch.cuda.Event.from_ipc_handle(self._where, handle)  # type: ignore[no-untyped-call]
                self._events[handle] = event
            return event


def _view(
    storage: Any, where: torch.device, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A contiguous tensor at ``offset``, a multiple of its elements' size."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    flat = torch.empty(0, dtype=dtype, device=where)
    return flat.set_(storage, offset // dtype.itemsize, torch.Size(shape), strides)


def _uuid(device: torch.device) -> str:
    """The UUID of ``device``: its number may be another in another process.

    Raises:
        RuntimeError: if torch does not tell it.
    """
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} does not tell the UUID of {device}")
    return str(found)


def _find(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return index
    raise RuntimeError(f"this process does not see that device ({uuid})")
