"""The port to CUDA's memory: over a stand-in for four calls of torch's, and with a GPU where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from zmqgrad.rpc.cuda_memory import HANDLE, SHARE, CudaPort, _Handle, _Memory
from zmqgrad.transport.devices.port import Unshareable
from zmqgrad.wire.tensors.devices import DeviceFrame

CPU = torch.device("cpu")
MB = 1 << 20


class Stream(NamedTuple):
    """The one stream."""

    waited: list[Any]

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Event:
    """One that has come when the test says so."""

    numbers = itertools.count(1)
    by_handle: dict[bytes, Event] = {}

    def __init__(self, interprocess: bool = False) -> None:
        self.interprocess = interprocess
        self.recorded = 0
        self.come: bool | RuntimeError = True

    def record(self, stream: Stream) -> None:
        self.recorded += 1

    def query(self) -> bool:
        if isinstance(self.come, RuntimeError):
            raise self.come
        return self.come

    def synchronize(self) -> None:
        if isinstance(self.come, RuntimeError):
            raise self.come
        self.come = True

    def ipc_handle(self) -> bytes:
        assert self.interprocess
        assert self.recorded  # before that, it is on no device
        handle = b"event%59d" % next(self.numbers)
        self.by_handle[handle] = self
        return handle

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:
        return cls.by_handle[handle]


class Properties(NamedTuple):
    """Of the device."""

    uuid: str = "GPU-1"
    total_memory: int = 64 * MB


class Torch:
    """What torch was asked for, and what it answers. Its device is main memory."""

    def __init__(self) -> None:
        self.stream = Stream([])
        self.shared: dict[bytes, Any] = {}  # memory handle -> storage
        self.opened: list[tuple[Any, ...]] = []
        self.released: list[tuple[bytes, int]] = []
        self.error: RuntimeError | None = None

    def share(self, storage: Any) -> tuple[Any, ...]:
        if self.error is not None:
            raise self.error
        number = len(self.shared) + 1
        handle = b"memory%60d" % number
        self.shared[handle] = storage
        event = b"e" * HANDLE
        return 0, handle, storage.nbytes(), 512, b"/torch_1_2", number, event, True

    def open(self, *asked: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.opened.append(asked)
        return self.shared[asked[1]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    made = Torch()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: made.share(storage))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(made.open))
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_release_ipc_counter_cuda",
        staticmethod(lambda counter, offset: made.released.append((counter, offset))),
    )
    yield made
    Event.by_handle.clear()


def opened_elsewhere(port: CudaPort, handle: bytes, size: int) -> Any:
    """As another process opens it."""
    opened = port.open("GPU-1", handle, size, own=False)
    opened._where = CPU
    return opened


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(12).view(3, 4).t(),
        torch.rand(5, 7)[:, ::2],
        torch.rand(4, dtype=torch.complex64).conj(),
        torch.rand(9).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.rand(3, requires_grad=True),
        torch.tensor(3.5),
    ],
)
def test_a_tensor_is_copied_in_and_out_behind_its_event(own: bool, sent: torch.Tensor, fake: Torch) -> None:
    port = CudaPort()
    memory = port.allocate("cpu", 4096)
    assert memory.device == "GPU-1"
    handle = memory.share()
    opened = port.open("GPU-1", handle, 4096, True) if own else opened_elsewhere(port, handle, 4096)
    event, earlier = memory.new_event(), memory.new_event()
    memory.write([(1024, DeviceFrame(sent))], event, [earlier])
    assert fake.stream.waited == [earlier.event]
    assert event.event.recorded == 2  # at birth, and behind the copy
    there = torch.empty(sent.shape, dtype=sent.dtype)
    copied = opened.copy(1024, event.handle, there)
    assert fake.stream.waited == [earlier.event, event.event]
    assert torch.equal(there, sent.detach())
    assert copied.done()
    assert not there.requires_grad


def test_torch_is_told_what_it_told(fake: Torch) -> None:
    port = CudaPort()
    memory = port.allocate("cpu", 4096)
    handle = memory.share()
    opened_elsewhere(port, handle, 4096)
    (mine,) = fake.shared
    assert fake.opened == [(0, mine, 4096, 512, b"/torch_1_2", 1, b"e" * HANDLE, True)]
    memory.unshare(handle)
    assert fake.released == [(b"/torch_1_2", 1)]
    assert memory.share() != handle  # each reader has his own


def test_memory_that_is_needed_no_more_waits_for_what_is_queued(fake: Torch) -> None:
    port = CudaPort()
    memory = port.allocate("cpu", 4096)
    event = memory.new_event()
    handle = memory.share()
    opened = port.open("GPU-1", handle, 4096, True)
    memory.write([(0, DeviceFrame(torch.ones(4)))], event, [])
    memory.close([event])
    assert fake.stream.waited == [event.event]
    there = torch.empty(4)
    opened.copy(0, event.handle, there)  # whoever has it open keeps it
    assert there.sum() == 4
    with pytest.raises(OSError, match="no such memory"):
        port.open("GPU-1", handle, 4096, True)


def test_what_torch_cannot_do_is_said_by_the_right_error(
    fake: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = CudaPort()
    memory = port.allocate("cpu", 4096)
    handle = memory.share()
    fake.error = RuntimeError("CUDA error: invalid argument")
    with pytest.raises(Unshareable, match="invalid argument"):
        memory.share()
    with pytest.raises(OSError, match="cannot be opened: CUDA error"):
        port.open("GPU-1", handle, 4096, False)
    fake.error = None
    with pytest.raises(OSError, match="does not see"):
        port.open("GPU-2", handle, 4096, False)

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "UntypedStorage", refuse)
    with pytest.raises(OSError, match="out of memory"):
        port.allocate("cpu", 4096)


def test_an_event_of_a_device_that_has_failed_never_comes_and_is_not_waited_for(fake: Torch) -> None:
    memory = CudaPort().allocate("cpu", 4096)
    event = memory.new_event()
    event.event.come = False
    assert not event.done()
    event.wait()
    assert event.done()
    event.event.come = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not event.done()
    event.wait()


def test_limits(fake: Torch) -> None:
    assert CudaPort().limit("cuda:0") == 64 * MB // SHARE
    assert CudaPort(5).limit("cuda:0") == 5
    assert CudaPort(0).limit("cuda:0") == 0


def false(handle: bytes, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        msgspec.structs.replace(msgspec.msgpack.decode(handle, type=_Handle), **fields)
    )


def test_false_handles_are_refused(fake: Torch) -> None:
    port = CudaPort()
    handle = port.allocate("cpu", 4096).share()
    lies = [
        b"",
        b"\xc1",
        handle[:-1],
        handle + b"x",
        false(handle, size=1 << 40),
        false(handle, offset=-1),
        false(handle, memory=b"short"),
        false(handle, event=b"short"),
        false(handle, counter_offset=-5),
    ]
    for lie in lies:
        with pytest.raises(OSError, match="handle of memory on a device"):
            port.open("GPU-1", lie, 4096, False)
    for lie in (*lies[:4], false(handle, number=1 << 40), false(handle, counter_offset=-5)):
        with pytest.raises(OSError, match="on a device"):
            port.open("GPU-1", lie, 4096, True)
    assert fake.opened == []
    opened = opened_elsewhere(port, handle, 4096)
    for event in (b"", b"x" * 63, b"x" * 65):
        with pytest.raises(RuntimeError, match="no handle of an event"):
            opened.copy(0, event, torch.empty(3))


# ---- with a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_within_one_process_on_a_gpu() -> None:
    port = CudaPort()
    memory: _Memory = port.allocate("cuda:0", 1 << 20)
    opened = port.open(memory.device, memory.share(), 1 << 20, True)
    for sent in (torch.rand(100, 100, device="cuda"), torch.rand(50, 50, device="cuda").t()):
        event = memory.new_event()
        memory.write([(4096, DeviceFrame(sent))], event, [])
        there = torch.empty(sent.shape, device="cuda")
        copied = opened.copy(4096, event.handle, there)
        torch.cuda.synchronize()
        assert event.done()
        assert copied.done()
        assert torch.equal(there, sent)
    memory.close([])
