"""Answers on devices are handed from the streams of the thread that rebuilt them to those of who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from zmqgrad.rpc.futures import CompletionQueue, RpcFuture
from zmqgrad.runtime.future import Promise
from zmqgrad.runtime.service_thread import TimerHandle
from zmqgrad.wire.tensors.streams import record_copies, record_copy, wait_for_default_streams

GPU = torch.device("cuda:0")


class Stream(NamedTuple):
    """The current stream of a thread on a device: there is one each."""

    thread: str
    device: torch.device


class Event:
    """Notes on which stream it was recorded, and which have waited for it."""

    made: list[Event] = []

    def __init__(self) -> None:
        self.recorded: Stream | None = None
        self.waited: list[Stream] = []
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        self.recorded = stream

    def wait(self, stream: Stream) -> None:
        assert self.recorded is not None
        self.waited.append(stream)


class Tensor:
    """A tensor on a device, as far as streams go."""

    layout = torch.strided

    def __init__(self, device: torch.device = GPU) -> None:
        self.device = device
        self.used_on: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.used_on.append(stream)


def current_stream(device: torch.device) -> Stream:
    return Stream(threading.current_thread().name, device)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    Event.made.clear()
    yield
    Event.made.clear()


def arriving(tensor: Tensor) -> Tensor:
    record_copy(tensor)  # type: ignore[arg-type]
    return tensor


def answered(value: Callable[[], Any], watches: bool = True) -> RpcFuture[Any]:
    """A future whose answer another thread has rebuilt."""
    answer: Promise[Any] = Promise()
    future: RpcFuture[Any] = RpcFuture(
        answer, CompletionQueue(lambda task: task(), lambda *_: TimerHandle(), lambda _: value(), watches)
    )
    answer.set_result(None)
    in_thread("engine", future.complete)
    return future


def in_thread(name: str, job: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(job()), name=name)
    thread.start()
    thread.join(10)
    return results[0]


HERE = Stream("MainThread", GPU)


def test_the_waiting_thread_synchronizes_its_own_stream() -> None:
    tensor = Tensor()
    future = answered(lambda: [arriving(tensor)])
    (event,) = Event.made
    assert event.recorded == Stream("engine", GPU)
    assert event.waited == []
    assert future.wait() == [tensor]
    assert future.value() == [tensor]
    in_thread("other", future.wait)
    assert event.waited == tensor.used_on == [HERE, HERE, Stream("other", GPU)]


def test_each_device_has_its_event() -> None:
    devices = [GPU, torch.device("cuda:1")]
    future = answered(lambda: [arriving(Tensor(device)) for device in devices * 2])
    future.wait()
    assert sorted((e.recorded or HERE).device.index for e in Event.made) == [0, 1]
    assert all(e.waited == [Stream("MainThread", e.recorded.device)] for e in Event.made if e.recorded)


def test_a_chained_future_waits_for_copies_of_its_parent() -> None:
    future = answered(lambda: arriving(Tensor()))
    child = in_thread("second", lambda: future.then(lambda f: f.value()))
    child.wait()
    first, second = Event.made
    assert (first.recorded, second.recorded) == (Stream("engine", GPU), Stream("second", GPU))
    assert second.waited == [HERE]


def test_torchs_wait_all_waits_on_the_stream_of_its_caller() -> None:
    first, second = (answered(lambda: arriving(Tensor())) for _ in range(2))
    torch.futures.wait_all([first, second])
    assert [set(event.waited) for event in Event.made] == [{HERE}, {HERE}]


def test_asyncio_s_thread_is_handed_them_too() -> None:
    async def wait() -> Any:
        return await answered(lambda: arriving(Tensor()))

    asyncio.run(wait())
    assert Event.made[0].waited == [HERE]


def test_no_events_without_tensors_on_devices_or_without_device_maps() -> None:
    assert answered(lambda: 7).wait() == 7
    answered(lambda: arriving(Tensor()), watches=False).wait()
    with pytest.raises(ValueError, match="no answer"):
        answered(fail).wait()
    assert Event.made == []


def fail() -> None:
    arriving(Tensor())
    raise ValueError("no answer")


def test_watches_within_watches() -> None:
    outer_tensor, inner_tensor = Tensor(), Tensor(torch.device("cuda:1"))

    def rebuild() -> Any:
        arriving(outer_tensor)
        return record_copies(lambda: arriving(inner_tensor))[1]

    inner, outer = record_copies(rebuild)
    assert list(inner.events) == [inner_tensor.device]
    assert set(outer.events) == {outer_tensor.device, inner_tensor.device}
    record_copy(Tensor())  # type: ignore[arg-type]  # nobody watches, and nothing is kept
    assert record_copies(lambda: 1) == (1, ([], {}))


class SomeStream(NamedTuple):
    """A stream, and for which others it waits."""

    name: str
    waits: list[Any]

    def wait_stream(self, other: SomeStream) -> None:
        self.waits.append(other)


def test_one_event_per_device_follows_work_of_engine_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    class OnGpu(torch.Tensor):
        is_cuda = True
        device = GPU

        def record_stream(self, stream: Any) -> None:
            used.append(stream)

    current, default = SomeStream("side", []), SomeStream("default", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    tensors = [torch.ones(2).as_subclass(OnGpu) for _ in range(3)]
    wait_for_default_streams([*tensors, torch.ones(1), "no tensor", None])
    assert current.waits == [default]
    assert used == [current] * 3
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    wait_for_default_streams(tensors)
    assert default.waits == []
