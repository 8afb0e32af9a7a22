"""Rows: many small tensors of one dtype, whose bytes lie one behind the other in one blob.

A description and a blob for each of a hundred tensors take longer to write and to read than their bytes. A
row says of each only its shape. What arrives are tensors of their own: none is a view of another, each has
its own storage (a window on the row's memory), and only that memory is theirs together, so a row has an end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zmqgrad.errors import ProtocolError
from zmqgrad.wire.messages import Row
from zmqgrad.wire.tensors.blobs import Blobs, window
from zmqgrad.wire.tensors.dtypes import DTYPES, NAMES
from zmqgrad.wire.tensors.modes import unseen
from zmqgrad.wire.unwritten import Buffer, Unwritten

LEAST = 8
"""A message with fewer tensors has no rows."""

LARGEST = 16 << 10
"""Tensors of more bytes have a blob of their own."""

LONGEST = 1 << 20
"""A row takes no tensor more when it has so many bytes: one tensor that is kept keeps its row."""

_JOINABLE = frozenset(
    DTYPES[name]
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    if name in DTYPES
)
"""Dtypes of which torch can put tensors behind one another."""

_frombuffer = torch.frombuffer


class _Growing:
    """A row to be."""

    __slots__ = ("places", "shapes", "size", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self.places: list[int] = []
        self.size = 0


def make_rows(
    tensors: Sequence[torch.Tensor], places: Sequence[tuple[int, int]], out: Blobs
) -> tuple[list[Row], list[int]]:
    """Rows of those of ``tensors`` that are small, and the numbers of the others.

    The tensors are contiguous and apart; ``places`` has address and size of each. Bytes go to ``out``.
    """
    growing: dict[tuple[torch.dtype, bool], _Growing] = {}
    full: list[tuple[torch.dtype, bool, _Growing]] = []
    others: list[int] = []
    for number, (t, (_, size)) in enumerate(zip(tensors, places, strict=True)):
        key = dtype, _ = t.dtype, t.requires_grad
        if not 0 < size <= LARGEST or dtype not in _JOINABLE:
            others.append(number)
            continue
        row = growing.get(key)
        if row is None or row.size >= LONGEST:
            row = growing[key] = _Growing()
            full.append((*key, row))
        row.tensors.append(t)
        row.shapes.append(t.shape)
        row.places.append(number)
        row.size += size
    rows = []
    for dtype, requires_grad, row in full:
        numbers = () if len(row.places) == len(tensors) else tuple(row.places)
        blob = out.add_unwritten(_Joined(row.tensors, row.size))
        rows.append(Row(NAMES[dtype], blob, tuple(row.shapes), numbers, requires_grad))
    return rows, others


class _Joined(Unwritten):
    """Contiguous tensors of one dtype, one behind the other."""

    __slots__ = ("_size", "_tensors")

    def __init__(self, tensors: list[torch.Tensor], size: int) -> None:
        self._tensors = tensors
        self._size = size

    def __len__(self) -> int:
        return self._size

    def _flat(self) -> list[torch.Tensor]:
        if all([t.dim() == 1 for t in self._tensors]):
            return self._tensors
        return [t.view(-1) for t in self._tensors]

    @unseen
    def write_to(self, room: memoryview) -> None:
        with torch.no_grad():
            torch.cat(self._flat(), out=_frombuffer(room, dtype=self._tensors[0].dtype))

    @unseen
    def written(self) -> memoryview:
        with torch.no_grad():
            flat = torch.cat(self._flat())
        return window(flat, flat.data_ptr(), flat.nbytes)


def rebuild_row(row: Row, data: Buffer) -> list[torch.Tensor]:
    """The tensors of ``row``, built on ``data``, the bytes of its blob. None of them requires grad yet.

    Raises:
        ProtocolError: if they do not fit.
    """
    dtype = DTYPES.get(row.dtype)
    if dtype is None:
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {row.dtype!r} for such tensors")
    counts = [shape[0] if len(shape) == 1 else math.prod(shape) for shape in row.shapes]
    step = dtype.itemsize
    if 0 in counts or sum(counts) * step != len(data):
        raise ProtocolError(f"tensors of shapes {row.shapes[:8]} do not fill a row of {len(data)} bytes")
    if isinstance(data, bytes):
        data = bytearray(data)  # the tensors will be written to
    out = []
    at = 0
    for shape, count in zip(row.shapes, counts, strict=True):
        t = _frombuffer(data, dtype=dtype, count=count, offset=at)
        out.append(t if len(shape) == 1 else t.view(shape))
        at += count * step
    return out
