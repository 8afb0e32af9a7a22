"""What :class:`zmqgrad.elastic.State` commits, as bytes: named values, whose tensors are copied once.

A section is a directory (its size; of each value the payload, and the sizes of its frames), and the frames.
It is read where it lies: tensors are views of it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from zmqgrad.errors import CommitError, ZmqgradError
from zmqgrad.rpc.serialization.context import SerializationContext
from zmqgrad.rpc.serialization.deserializer import deserialize, deserialize_tensors
from zmqgrad.rpc.serialization.serializer import serialize
from zmqgrad.transport.shared_memory.copier import Copier
from zmqgrad.wire.lazy_frame import Buffer, Frame, LazyFrame
from zmqgrad.wire.messages import Payload
from zmqgrad.wire.tensors.blobs import ALIGNMENT_BYTES
from zmqgrad.wire.tensors.devices import CPU

_SIZE = struct.Struct("<Q")

_MIN_COPIER_BYTES = 1 << 20

_copier = Copier("zmqgrad-state")

Entry = tuple[str, Payload, tuple[int, ...]]
"""Name, payload, and the sizes of the frames of a value."""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Section:
    """``values``, ready to be written: ``size`` bytes. They must not change before.

    Raises:
        PayloadError: if a value cannot be serialized.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        cuda = {torch.device("cuda", index): CPU for index in range(torch.cuda.device_count())}
        context = SerializationContext(devices={CPU: CPU, **cuda} if cuda else None)
        entries: list[Entry] = []
        self._frames: list[Frame] = []
        self._kept: list[Any] = []  # what the frames are views of
        for name, value in values.items():
            payload, frames, tensors, _ = serialize(value, context)
            entries.append((name, payload, tuple(map(len, frames))))
            self._frames += frames
            self._kept.append((value, tensors))
        directory = msgspec.msgpack.encode(entries)
        self._directory = _SIZE.pack(len(directory)) + directory
        self.size = _aligned(len(self._directory)) + sum(_aligned(len(frame)) for frame in self._frames)

    def write_to(self, target: memoryview) -> None:
        """Write it to ``target``, which has its size."""
        target[: len(self._directory)] = self._directory
        offset = _aligned(len(self._directory))
        for frame in self._frames:
            size = len(frame)
            place = target[offset : offset + size]
            if isinstance(frame, LazyFrame):
                frame.write_to(place)
            elif size < _MIN_COPIER_BYTES or not isinstance(frame, memoryview) or frame.readonly:
                place[:] = frame
            else:
                kind = ctypes.c_char * size
                _copier.copy(ctypes.addressof(kind.from_buffer(place)), kind.from_buffer(frame), size)
            offset += _aligned(size)


def read_section(data: memoryview) -> dict[str, Value]:
    """The values in ``data``, which is writable, by name."""
    (size,) = _SIZE.unpack_from(data)
    entries = msgspec.msgpack.decode(data[_SIZE.size : _SIZE.size + size], type=list[Entry])
    offset = _aligned(_SIZE.size + size)
    values: dict[str, Value] = {}
    for name, payload, sizes in entries:
        frames = []
        for length in sizes:
            frames.append(data[offset : offset + length])
            offset += _aligned(length)
        values[name] = Value(name, payload, frames)
    return values


class Value:
    """A value of a section."""

    def __init__(self, name: str, payload: Payload, frames: Sequence[memoryview]) -> None:
        self._name = name
        self._payload = payload
        self._frames = frames

    def load(self, copy: bool) -> Any:
        """The value; without ``copy``, its tensors are views of the section.

        Raises:
            CommitError: if it cannot be rebuilt here.
        """
        frames: Sequence[Buffer] = self._frames
        if self._payload.buffers:  # of arrays, which would be views as well
            frames, copy = [bytearray(frame) for frame in frames], False
        try:
            tensors = deserialize_tensors(self._payload, frames)
            if copy:
                with torch.no_grad():
                    tensors = [t.clone().requires_grad_(t.requires_grad) for t in tensors]
            return deserialize(self._payload, frames, tensors)
        except ZmqgradError as e:
            raise CommitError(f"{self._name!r} cannot be restored: {e}") from e


def copies(target: Any, value: Any) -> bool:
    """Whether setting ``target`` to ``value`` copies all of its tensors, so that none of them is kept.

    A module keeps what is no parameter or buffer (``set_extra_state``), and what its own ``load_state_dict``
    wants.
    """
    if isinstance(target, torch.nn.Module):
        names = {name for name, _ in target.named_parameters(remove_duplicate=False)}
        names.update(name for name, _ in target.named_buffers(remove_duplicate=False))
        is_usual = type(target).load_state_dict is torch.nn.Module.load_state_dict
        return is_usual and isinstance(value, Mapping) and names.issuperset(value)
    return isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor)


def assign(target: Any, value: Any) -> Any:
    """Copy the tensor ``value`` into ``target`` if that is such a tensor. Returns what has the value now."""
    if (
        isinstance(target, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and target.shape == value.shape
        and target.dtype == value.dtype
    ):
        with torch.no_grad():
            return target.copy_(value)
    if not isinstance(value, torch.Tensor):
        return value
    new = value.detach().clone().requires_grad_(value.requires_grad)  # a leaf, which an optimizer takes
    return torch.nn.Parameter(new, new.requires_grad) if isinstance(target, torch.nn.Parameter) else new


_HOLDS_TENSORS = (torch.Tensor, Mapping, list, tuple)


@torch.no_grad()
def cut(parts: Sequence[Any], dim: int, rank: int, world_size: int) -> Any:
    """The part of ``rank``, if tensors that are in ``parts`` along ``dim`` are cut for ``world_size`` ranks.

    What is no tensor is taken from the first part.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        own = first  # such as the step of an optimizer
        if -first.dim() <= dim < first.dim():
            own = torch.cat(list(parts), dim).tensor_split(world_size, dim)[rank]
        return own.clone(memory_format=torch.contiguous_format).requires_grad_(first.requires_grad)
    if isinstance(first, Mapping):
        return {key: cut([part[key] for part in parts], dim, rank, world_size) for key in first}
    if isinstance(first, (list, tuple)) and any(isinstance(each, _HOLDS_TENSORS) for each in first):
        cuts = [cut(list(items), dim, rank, world_size) for items in zip(*parts, strict=True)]
        return cuts if isinstance(first, list) else tuple(cuts)
    return first
