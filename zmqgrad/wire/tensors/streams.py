"""The order of streams between the thread that makes a tensor and the one that uses it.

An answer may be rebuilt by an engine thread, on that thread's streams, while the user waits for it inside
``torch.cuda.stream(...)``: his stream has to wait for the copies, and the memory of the tensors must not be
used again before his work with them is done. The same goes for gradients, and values on their owner, which
engine threads have made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class _Noted(threading.local):
    tensors: list[torch.Tensor] | None = None


_noted = _Noted()


class Arrived(NamedTuple):
    """Tensors that were brought to devices, and an event on each of those, after all of them."""

    tensors: list[torch.Tensor]
    events: dict[torch.device, Any]

    def wait_on_current_stream(self) -> None:
        """What the calling thread queues on its current streams from here on sees the tensors."""
        for device, event in self.events.items():
            event.wait(torch.cuda.current_stream(device))
        for t in self.tensors:
            if t.layout is torch.strided:
                t.record_stream(torch.cuda.current_stream(t.device))

    def extend_events(self) -> Arrived:
        """The same, and what the calling thread has queued since on its current streams of these devices."""
        return Arrived(self.tensors, _events_on(self.events)) if self.events else self


NOTHING_ARRIVED = Arrived([], {})


def _events_on(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    events = {}
    for device in devices:
        events[device] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    return events


def follow(tensors: Iterable[object]) -> None:
    """What the calling thread queues from here on comes after what engine threads queued for ``tensors``.

    Those work on the default streams, as whoever does not ask for others. What is no tensor is passed over.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    waited: set[torch.device] = set()
    for t in tensors:
        if not (isinstance(t, torch.Tensor) and t.is_cuda):
            continue
        current, default = torch.cuda.current_stream(t.device), torch.cuda.default_stream(t.device)
        if current == default:
            continue
        if t.device not in waited:
            waited.add(t.device)
            current.wait_stream(default)
        if t.layout is torch.strided:
            t.record_stream(current)


def note_arrival(tensor: torch.Tensor) -> None:
    """The calling thread has queued the copy of ``tensor`` to its device."""
    tensors = _noted.tensors
    if tensors is not None:
        tensors.append(tensor)


def watch_arrivals(rebuild: Callable[[], T]) -> tuple[T, Arrived]:
    """What ``rebuild`` gives, and which tensors it brought to devices."""
    outer, _noted.tensors = _noted.tensors, []
    try:
        value = rebuild()
        tensors = _noted.tensors
    finally:
        _noted.tensors = outer
    if not tensors:
        return value, NOTHING_ARRIVED
    if outer is not None:
        outer += tensors
    return value, Arrived(tensors, _events_on({t.device for t in tensors}))
