"""Batches: many small tensors of one dtype, whose bytes are consecutive in one blob.

A descriptor and a blob for each of a hundred tensors take longer to encode and decode than their bytes. A
batch records only the shape of each. The decoded tensors are independent: none is a view of another and each
has its own storage, but these storages share the memory of the batch, so the size of a batch is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.lazy_frame import Buffer, LazyFrame
from zmqgrad.wire.messages import TensorBatch
from zmqgrad.wire.tensors.blobs import Blobs, Place, window
from zmqgrad.wire.tensors.dtypes import DTYPES, NAMES
from zmqgrad.wire.tensors.memory import unusual_strides
from zmqgrad.wire.tensors.modes import without_modes

MIN_TENSORS = 8
"""A message with fewer tensors uses no batches."""

MAX_MEMBER_BYTES = 16 << 10
"""Larger tensors get a blob of their own."""

MAX_BATCH_BYTES = 1 << 20
"""A batch of this size is closed: one tensor that is kept alive keeps the memory of its batch."""

_JOINABLE = frozenset(
    DTYPES[name]
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if name in DTYPES
)
"""Dtypes that ``torch.cat`` supports."""

_frombuffer = torch.frombuffer


class _OpenBatch:
    """A batch to which tensors are still added."""

    __slots__ = ("indices", "shapes", "size", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self.indices: list[int] = []
        self.size = 0


def make_batches(
    tensors: Sequence[torch.Tensor], places: Sequence[Place], out: Blobs
) -> tuple[list[TensorBatch], list[int]]:
    """Group the small tensors into batches.

    Args:
        tensors: contiguous tensors that do not overlap.
        places: of each tensor.
        out: receives the bytes of the batches.

    Returns:
        The batches, and the indices of the tensors that are in none of them.
    """
    open_batches: dict[tuple[torch.dtype, bool], _OpenBatch] = {}
    full: list[tuple[torch.dtype, bool, _OpenBatch]] = []
    others: list[int] = []
    for number, (t, (_, _, size)) in enumerate(zip(tensors, places, strict=True)):
        key = dtype, _ = t.dtype, t.requires_grad
        shape = t.shape
        if not 0 < size <= MAX_MEMBER_BYTES or dtype not in _JOINABLE or (1 in shape and unusual_strides(t)):
            others.append(number)
            continue
        batch = open_batches.get(key)
        if batch is None or batch.size >= MAX_BATCH_BYTES:
            batch = open_batches[key] = _OpenBatch()
            full.append((*key, batch))
        batch.tensors.append(t)
        batch.shapes.append(shape)
        batch.indices.append(number)
        batch.size += size
    batches = []
    for dtype, requires_grad, batch in full:
        numbers = () if len(batch.indices) == len(tensors) else tuple(batch.indices)
        blob = out.add_lazy(_Joined(batch.tensors, batch.size))
        batches.append(TensorBatch(NAMES[dtype], blob, tuple(batch.shapes), numbers, requires_grad))
    return batches, others


class _Joined(LazyFrame):
    """The bytes of contiguous tensors of one dtype, concatenated."""

    __slots__ = ("_size", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], size: int) -> None:
        # A parameter may be given other memory (``.data``) before this is written.
        self._tensors = [t.detach() if t.requires_grad and t.is_leaf else t for t in tensors]
        self._size = size

    def __len__(self) -> int:
        return self._size

    def _flat(self) -> list[torch.Tensor]:
        if all([t.dim() == 1 for t in self._tensors]):
            return self._tensors
        return [t.view(-1) for t in self._tensors]

    @without_modes
    def write_to(self, buffer: memoryview) -> None:
        with torch.no_grad():
            torch.cat(self._flat(), out=_frombuffer(buffer, dtype=self._tensors[0].dtype))

    @without_modes
    def materialize(self) -> memoryview:
        with torch.no_grad():
            flat = torch.cat(self._flat())
        return window(flat, flat.data_ptr(), flat.nbytes)


def decode_batch(batch: TensorBatch, data: Buffer) -> list[torch.Tensor]:
    """Build the tensors of ``batch`` on ``data``, the bytes of its blob. None of them requires grad yet.

    Raises:
        ProtocolError: if the shapes do not fill ``data``.
    """
    dtype = DTYPES.get(batch.dtype)
    if dtype is None:
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {batch.dtype!r} for such tensors")
    counts = [shape[0] if len(shape) == 1 else math.prod(shape) for shape in batch.shapes]
    step = dtype.itemsize
    if 0 in counts or sum(counts) * step != len(data):
        raise ProtocolError(f"tensors of shapes {batch.shapes[:8]} do not fill a batch of {len(data)} bytes")
    if isinstance(data, bytes):
        data = bytearray(data)  # the tensors will be written to
    out = []
    at = 0
    for shape, count in zip(batch.shapes, counts, strict=True):
        t = _frombuffer(data, dtype=dtype, count=count, offset=at)
        out.append(t if len(shape) == 1 else t.view(shape))
        at += count * step
    return out
