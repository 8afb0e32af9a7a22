"""Ordering of CUDA streams between the thread that creates a tensor and the thread that uses it.

A result may be decoded by a pool thread, on the streams of that thread, while the user waits for it inside
``torch.cuda.stream(...)``. The user's stream must wait for the copies, and the memory of the tensors must not
be reused before the user's work is done. The same applies to gradients, and to values on their owner, which
pool threads have created.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class _Recorded(threading.local):
    tensors: list[torch.Tensor] | None = None


_recorded = _Recorded()


class DeviceCopies(NamedTuple):
    """Tensors that were copied to devices, and for each device an event after the copies."""

    tensors: list[torch.Tensor]
    events: dict[torch.device, Any]

    def wait_on_current_stream(self) -> None:
        """Make the current streams of the calling thread wait for the copies."""
        for device, event in self.events.items():
            event.wait(torch.cuda.current_stream(device))
        for t in self.tensors:
            if t.layout is torch.strided:
                t.record_stream(torch.cuda.current_stream(t.device))

    def extend_events(self) -> DeviceCopies:
        """Return the same tensors, with events after the work queued since by the calling thread."""
        return DeviceCopies(self.tensors, _events_on(self.events)) if self.events else self


NO_COPIES = DeviceCopies([], {})


def _events_on(devices: Iterable[torch.device]) -> dict[torch.device, Any]:
    events = {}
    for device in devices:
        events[device] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    return events


def wait_for_default_streams(tensors: Iterable[object]) -> None:
    """Make the current streams wait for the default streams, on which pool threads created ``tensors``.

    Objects that are not tensors are ignored.
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


def record_copy(tensor: torch.Tensor) -> None:
    """Record that the calling thread has queued the copy of ``tensor`` to its device."""
    tensors = _recorded.tensors
    if tensors is not None:
        tensors.append(tensor)


def record_copies(decode: Callable[[], T]) -> tuple[T, DeviceCopies]:
    """Run ``decode``; returns its result and the tensors that it copied to devices."""
    outer, _recorded.tensors = _recorded.tensors, []
    try:
        value = decode()
        tensors = _recorded.tensors
    finally:
        _recorded.tensors = outer
    if not tensors:
        return value, NO_COPIES
    if outer is not None:
        outer += tensors
    return value, DeviceCopies(tensors, _events_on({t.device for t in tensors}))
