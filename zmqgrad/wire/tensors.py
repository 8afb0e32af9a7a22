"""Tensors beside a message: to descriptors and blobs, and back. The only module below rpc that knows torch.

What survives: any dtype, any shape (0-dim and empty included), strides of dense tensors, storages that
several tensors of one message share, sparse COO; the rest (quantized, CSR, ...) as ``torch.save`` writes it.
A view of a large storage sends only what it shows. Each blob is bounded by the frame that it came in,
and each tensor is checked against its blob before a byte is read (P5).
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import PayloadError, ProtocolError
from zmqgrad.wire.messages import MAX_DIMENSIONS, NO_TENSORS, Blob, Layout, Place, TensorDescriptor, Tensors

Buffer = bytes | bytearray | memoryview

GAPS = 8 << 10
"""A view of up to so many bytes, gaps included, is sent as it lies, and so keeps its strides."""

INLINE = 16 << 10
"""Blobs of up to so many bytes travel in the header; larger ones in a frame of their own."""

MANY = 64 << 10
LITTLE = 256
"""In a message with more than ``MANY`` bytes of tensors, only blobs of up to so many go in the header."""

ALIGNMENT = 64
"""Blobs that share a frame begin at multiples of so many bytes: enough for every dtype, and a cache line."""

_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Without the quantized ones: a strided tensor of such a dtype has no quantizer, and torch crashes on it.
_DTYPES = {name: dtype for dtype, name in _NAMES.items() if not name.startswith("q")}
_string_at = ctypes.string_at
_memmove = ctypes.memmove


def describe(tensors: Sequence[torch.Tensor], frames: list[Buffer]) -> Tensors:
    """The descriptors and blobs of ``tensors``; bytes too many for the header are appended to ``frames``.

    A frame may be a window on the memory of its tensor, which it keeps alive.

    Raises:
        PayloadError: for a tensor that cannot be sent (on a device without a way to the peer).
    """
    if not tensors:
        return NO_TENSORS
    try:
        return _describe_all(tensors, frames)
    except RuntimeError as e:  # torch's word for tensors that have no memory to show (nested, fake, ...)
        raise PayloadError(f"cannot send a tensor of type {type(tensors[0]).__name__}: {e}") from e


class _Out:
    """Where the bytes of the tensors of one message go.

    What is small goes in the header. Where the small ones are many, they lie side by side in one frame
    instead, which needs no encoding and which tensors can be built on. :meth:`finish` must follow.
    """

    __slots__ = ("_inline", "_shared", "_shared_index", "_shared_size", "blobs", "frames")

    def __init__(self, frames: list[Buffer], many: bool) -> None:
        self.blobs: list[Blob] = []
        self.frames = frames
        self._inline = LITTLE if many else INLINE
        self._shared: list[bytes] = []
        self._shared_index = -1
        self._shared_size = 0

    def add_apart(self, tensors: Sequence[torch.Tensor], places: Sequence[tuple[int, int]]) -> None:
        """Take in plain tensors that are apart, one blob each, in order: few steps for each of many."""
        groups: dict[torch.dtype, tuple[int, list[torch.Tensor]]] = {}
        ends: dict[torch.dtype, int] = {}
        inline, blobs = self._inline, self.blobs
        for t, (address, size) in zip(tensors, places, strict=True):
            if size <= inline or size > INLINE:
                self.add(t, address, size)
                continue
            dtype = t.dtype
            group = groups.get(dtype)
            if group is None:
                group = groups[dtype] = len(self.frames), []
                self.frames.append(b"")
                ends[dtype] = 0
            offset = ends[dtype]
            blobs.append(Blob(Place.FRAME, size, b"", group[0], offset))
            ends[dtype] = offset + size
            group[1].append(t)
        for index, members in groups.values():
            with torch.no_grad():
                flat = torch.cat([t if t.dim() == 1 else t.view(-1) for t in members])
            self.frames[index] = _window(flat, flat.data_ptr(), flat.nbytes)

    def add(self, owner: torch.Tensor, address: int, size: int) -> int:
        """Take in ``size`` bytes at ``address``, which ``owner`` keeps alive; gives the blob's number."""
        if size <= INLINE:
            return self.add_bytes(_string_at(address, size) if size else b"")
        self.blobs.append(Blob(Place.FRAME, size, b"", len(self.frames)))
        self.frames.append(_window(owner, address, size))
        return len(self.blobs) - 1

    def add_bytes(self, data: bytes) -> int:
        """Take in ``data``; gives the blob's number."""
        size = len(data)
        if size <= self._inline:
            blob = Blob(Place.INLINE, size, data)
        elif size <= INLINE:
            if self._shared_index < 0:
                self._shared_index = len(self.frames)
                self.frames.append(b"")  # finish() puts them here
            gap = -self._shared_size % ALIGNMENT
            if gap:
                self._shared.append(bytes(gap))
            offset = self._shared_size + gap
            self._shared.append(data)
            self._shared_size = offset + size
            blob = Blob(Place.FRAME, size, b"", self._shared_index, offset)
        else:
            blob = Blob(Place.FRAME, size, b"", len(self.frames))
            self.frames.append(data)
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def finish(self, descriptors: Sequence[TensorDescriptor]) -> Tensors:
        """All is taken in."""
        if self._shared_index >= 0:
            self.frames[self._shared_index] = b"".join(self._shared)
        return Tensors(tuple(descriptors), tuple(self.blobs))


def _window(owner: torch.Tensor, address: int, size: int) -> memoryview:
    """The bytes of ``owner`` there, which live as long as this does."""
    window: Any = (ctypes.c_char * size).from_address(address)
    window.owner = owner
    return memoryview(window).cast("B")


def _describe_all(tensors: Sequence[torch.Tensor], frames: list[Buffer]) -> Tensors:
    if len(tensors) == 1 and _plain(tensors[0]):
        out = _Out(frames, many=False)
        return out.finish([_describe_plain(tensors[0], out)])
    places = _places(tensors)
    if places is not None:
        out = _Out(frames, sum([size for _, size in places]) > MANY)
        out.add_apart(tensors, places)
        return out.finish(
            [
                TensorDescriptor(_NAMES[t.dtype], t.shape, (), 0, number, t.requires_grad)
                for number, t in enumerate(tensors)
            ]
        )
    shared = _Sharing(tensors)
    out = _Out(frames, sum([t.numel() * t.itemsize for t in tensors]) > MANY)
    return out.finish(
        [
            shared.describe(t, out)
            if shared.shares(t)
            else (_describe_plain if _plain(t) else _describe_other)(t, out)
            for t in tensors
        ]
    )


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]] | None:
    """Address and size in bytes of each of ``tensors``; None unless all are plain, and apart in memory."""
    places = []
    for t in tensors:
        if not _plain(t):
            return None
        places.append((t.data_ptr(), t.nbytes))
    by_address = sorted(places)
    apart = all([one[0] + one[1] <= two[0] for one, two in itertools.pairwise(by_address)])
    return places if apart else None


def _plain(t: torch.Tensor) -> bool:
    return (
        t.is_cpu
        and t.layout is torch.strided
        and t.is_contiguous()
        and t.dim() <= MAX_DIMENSIONS
        and not (t.is_conj() or t.is_neg() or t.is_quantized)
    )


def _describe_plain(t: torch.Tensor, out: _Out) -> TensorDescriptor:
    number = out.add(t, t.data_ptr(), t.nbytes)
    return TensorDescriptor(_NAMES[t.dtype], tuple(t.shape), (), 0, number, t.requires_grad)


def _describe_other(t: torch.Tensor, out: _Out) -> TensorDescriptor:
    """Whatever is not a contiguous tensor in main memory."""
    if t.dim() > MAX_DIMENSIONS:
        raise PayloadError(f"a tensor of {t.dim()} dimensions cannot be sent (at most {MAX_DIMENSIONS})")
    if t.layout is torch.sparse_coo and t.is_cpu:
        return _describe_coo(t, out)
    if t.device.type == "meta":
        return TensorDescriptor(
            _NAMES[t.dtype], tuple(t.shape), tuple(t.stride()), 0, 0, t.requires_grad, "meta"
        )
    if not t.is_cpu:
        raise PayloadError(
            f"a tensor on {t.device} cannot be sent: only CPU tensors travel so far; "
            f"move it with .cpu() before the call"
        )
    if t.layout is not torch.strided or t.is_quantized:
        return _describe_opaque(t, out)
    plain = t.detach().resolve_conj().resolve_neg()
    if _dense(plain):
        number = out.add(plain, plain.data_ptr(), _extent(plain) * plain.itemsize)
        strides = tuple(plain.stride())
    else:
        plain = plain.contiguous()
        number = out.add(plain, plain.data_ptr(), plain.nbytes)
        strides = ()
    return TensorDescriptor(_NAMES[t.dtype], tuple(t.shape), strides, 0, number, t.requires_grad)


def _describe_coo(t: torch.Tensor, out: _Out) -> TensorDescriptor:
    flat = t.detach()
    parts = tuple(
        (_describe_plain if _plain(p) else _describe_other)(p, out) for p in (flat._indices(), flat._values())
    )
    return TensorDescriptor(
        _NAMES[t.dtype],
        tuple(t.shape),
        requires_grad=t.requires_grad,
        layout=Layout.COO,
        coalesced=t.is_coalesced(),
        parts=parts,
    )


def _describe_opaque(t: torch.Tensor, out: _Out) -> TensorDescriptor:
    file = io.BytesIO()
    torch.save(t.detach(), file)
    number = out.add_bytes(file.getvalue())
    return TensorDescriptor(
        _NAMES[t.dtype],
        tuple(t.shape),
        blob=number,
        requires_grad=t.requires_grad,
        layout=Layout.OPAQUE,
    )


def _extent(t: torch.Tensor) -> int:
    """Elements from the first to the last that ``t`` shows, both included."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _dense(t: torch.Tensor) -> bool:
    """Would sending the window as it lies send hardly more than sending it packed? (transposed, expanded)"""
    extent = _extent(t)
    return extent <= t.numel() or extent * t.itemsize <= GAPS


class _Sharing:
    """Which tensors of a message overlap in one storage; those are sent as windows on one blob.

    Tensors that require grad are left out: each gets a history of its own at the other end, where a
    write through one must not change what another has saved for backward.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        by_storage: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        for t in tensors:
            # A lazily conjugated or negated tensor shows other values than its bytes: it cannot share.
            lazy = t.is_conj() or t.is_neg()
            if t.is_cpu and t.layout is torch.strided and not (t.requires_grad or t.is_quantized or lazy):
                pointer = t.untyped_storage().data_ptr()
                if pointer and t.numel():
                    start = t.data_ptr()
                    by_storage.setdefault(pointer, []).append((start, start + _extent(t) * t.itemsize, t))
        # id of a tensor -> the span of bytes [start, end) that it is a window on
        self._spans: dict[int, tuple[int, int]] = {}
        self._blobs: dict[tuple[int, int], int] = {}
        for windows in by_storage.values():
            if len(windows) > 1:
                self._merge(windows)

    def _merge(self, windows: list[tuple[int, int, torch.Tensor]]) -> None:
        """Unite windows that overlap, unless most of what they span together is shown by none."""
        windows.sort(key=lambda w: w[:2])
        group: list[tuple[int, int, torch.Tensor]] = []
        end = 0
        for window in [*windows, (math.inf, math.inf, None)]:
            if group and window[0] >= end:
                shown = sum(t.nbytes for _, _, t in group)
                if len(group) > 1 and end - group[0][0] <= 2 * shown:
                    self._spans.update({id(t): (group[0][0], end) for _, _, t in group})
                group = []
            if window[2] is not None:
                group.append(window)  # type: ignore[arg-type]
                end = window[1] if len(group) == 1 else max(end, window[1])  # type: ignore[assignment]

    def shares(self, t: torch.Tensor) -> bool:
        return id(t) in self._spans

    def describe(self, t: torch.Tensor, out: _Out) -> TensorDescriptor:
        span = self._spans[id(t)]
        number = self._blobs.get(span)
        if number is None:
            number = self._blobs[span] = out.add(t, span[0], span[1] - span[0])
        offset = t.data_ptr() - span[0]
        return TensorDescriptor(_NAMES[t.dtype], tuple(t.shape), tuple(t.stride()), offset, number, False)


def rebuild(described: Tensors, frames: Sequence[Buffer], differentiable: bool = True) -> list[torch.Tensor]:
    """The tensors, in order. They are the receiver's own: writing into them is safe.

    They require grad where those that were sent did, unless ``differentiable`` is false.

    A tensor that is alone in a frame is built on the frame without a copy.

    Raises:
        ProtocolError: if a descriptor does not fit its blob, or a blob its frame.
    """
    try:
        return _rebuild_all(described, frames, differentiable)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        OverflowError,
    ) as e:  # torch's word on sizes, strides, dtypes
        raise ProtocolError(f"a tensor that came does not hold together: {e}") from e


def _rebuild_all(described: Tensors, frames: Sequence[Buffer], differentiable: bool) -> list[torch.Tensor]:
    blobs = described.blobs
    users: dict[int, int] = {}
    for d in described.tensors:
        if d.layout is Layout.STRIDED and d.device == "cpu":
            users[d.blob] = users.get(d.blob, 0) + 1
    bases: dict[int, torch.Tensor] = {}
    out = []
    for d in described.tensors:
        if d.layout is Layout.STRIDED and d.device == "cpu" and users[d.blob] == 1:
            t = _rebuild_flat(d, blobs, frames)
            if t is None:
                t = _rebuild_alone(d, blobs, frames)
        else:
            t = _rebuild_other(d, blobs, frames, bases)
        out.append(t.requires_grad_() if d.requires_grad and differentiable else t)
    return out


def _data(blob: Blob, frames: Sequence[Buffer]) -> Buffer:
    """The bytes of ``blob``, checked."""
    if blob.place is Place.INLINE:
        data: Buffer = blob.data
    elif blob.index < len(frames):
        data = frames[blob.index]
        if blob.offset or len(data) != blob.size:  # one of several in this frame
            data = memoryview(data)[blob.offset : blob.offset + blob.size]
    else:
        raise ProtocolError(f"a blob names frame {blob.index} of a message with {len(frames)}")
    if len(data) != blob.size:
        raise ProtocolError(f"a blob of {blob.size} bytes came with {len(data)}")
    return data


def blob_bytes(blob: Blob, frames: Sequence[Buffer]) -> Buffer:
    """The bytes of a blob that is no tensor.

    Raises:
        ProtocolError: if it does not fit its frame.
    """
    return _data(blob, frames)


def _dtype(d: TensorDescriptor) -> torch.dtype:
    dtype = _DTYPES.get(d.dtype)
    if dtype is None:
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {d.dtype!r} for such a tensor")
    return dtype


def _blob_of(d: TensorDescriptor, blobs: Sequence[Blob]) -> Blob:
    if d.blob >= len(blobs):
        raise ProtocolError(f"a tensor names blob {d.blob} of {len(blobs)}")
    if d.strides and len(d.strides) != len(d.shape):
        raise ProtocolError(f"a tensor of shape {d.shape} came with strides {d.strides}")
    return blobs[d.blob]


def _needed(d: TensorDescriptor, itemsize: int) -> int:
    """Bytes of its blob that a strided tensor reaches, from the blob's start."""
    if 0 in d.shape:
        return d.offset
    if not d.strides:
        return d.offset + math.prod(d.shape) * itemsize
    return d.offset + (1 + sum((n - 1) * s for n, s in zip(d.shape, d.strides, strict=True))) * itemsize


def _rebuild_flat(
    d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]
) -> torch.Tensor | None:
    """A contiguous tensor that fits its part of a frame; None: it is none, or something is wrong with it.

    What :func:`_rebuild_alone` does, in a straight line: of such tensors there may be hundreds.
    """
    dtype = _DTYPES.get(d.dtype)
    if dtype is None or d.strides or d.offset or d.blob >= len(blobs):
        return None
    blob = blobs[d.blob]
    if blob.place is not Place.FRAME or blob.index >= len(frames):
        return None
    frame, shape = frames[blob.index], d.shape
    count = math.prod(shape)
    if not 0 < count * dtype.itemsize <= blob.size <= len(frame) - blob.offset:
        return None
    flat = torch.frombuffer(frame, dtype=dtype, count=count, offset=blob.offset)
    return flat if len(shape) == 1 else flat.view(shape)


def _rebuild_alone(d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]) -> torch.Tensor:
    dtype, blob = _dtype(d), _blob_of(d, blobs)
    data = _data(blob, frames)
    needed = _needed(d, dtype.itemsize)
    if needed > blob.size or d.offset:
        raise ProtocolError(f"a tensor of shape {d.shape} needs {needed} bytes, its blob has {len(data)}")
    if blob.place is Place.INLINE:
        t = (
            torch.empty_strided(d.shape, d.strides, dtype=dtype)
            if d.strides
            else torch.empty(d.shape, dtype=dtype)
        )
        if needed:
            _memmove(t.data_ptr(), bytes(data), needed)  # bytes: free, as inline data is bytes already
        return t
    if 0 in d.shape:
        return torch.empty(d.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=needed // dtype.itemsize)
    return flat.as_strided(d.shape, d.strides) if d.strides else flat.view(d.shape)


def _rebuild_other(
    d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer], bases: dict[int, torch.Tensor]
) -> torch.Tensor:
    if d.device == "meta":
        return torch.empty_strided(d.shape, d.strides, dtype=_dtype(d), device="meta")
    if d.device != "cpu":
        raise ProtocolError(f"a tensor came for device {d.device!r}, which nobody agreed on")
    if d.layout is Layout.COO:
        return _rebuild_coo(d, blobs, frames)
    blob = _blob_of(d, blobs)
    data = _data(blob, frames)
    if d.layout is Layout.OPAQUE:
        return _rebuild_opaque(d, data)
    dtype = _dtype(d)
    needed = _needed(d, dtype.itemsize)
    if needed > len(data) or d.offset % dtype.itemsize:
        raise ProtocolError(f"a tensor of shape {d.shape} at {d.offset} does not fit its blob of {len(data)}")
    base = bases.get(d.blob)
    if base is None:
        base = torch.frombuffer(bytearray(data) if blob.place is Place.INLINE else data, dtype=torch.uint8)
        bases[d.blob] = base
    strides = d.strides or torch.empty(d.shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(
        base.untyped_storage(), d.offset // dtype.itemsize, torch.Size(d.shape), tuple(strides)
    )


def _rebuild_opaque(d: TensorDescriptor, data: Buffer) -> torch.Tensor:
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # whatever zipfile, pickle and torch make of bytes that are no saved tensor
        raise ProtocolError(f"an opaque tensor cannot be read: {type(e).__name__}: {e}") from e
    if type(loaded) is not torch.Tensor or (_NAMES[loaded.dtype], loaded.shape) != (d.dtype, d.shape):
        raise ProtocolError(
            f"an opaque tensor turned out to be {type(loaded).__name__}, not {d.dtype} {d.shape}"
        )
    return _checked_compressed(loaded) if loaded.layout in _COMPRESSED else loaded


_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _checked_compressed(t: torch.Tensor) -> torch.Tensor:
    by_row = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = t.crow_indices() if by_row else t.ccol_indices()
    plain = t.col_indices() if by_row else t.row_indices()
    # check_invariants: indices out of range would read and write outside of memory later
    return torch.sparse_compressed_tensor(
        compressed, plain, t.values(), t.shape, layout=t.layout, check_invariants=True
    )


def _rebuild_coo(d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]) -> torch.Tensor:
    if len(d.parts) != 2 or any(p.layout is not Layout.STRIDED or p.device != "cpu" for p in d.parts):
        raise ProtocolError("a sparse tensor came without its indices and values")
    indices, values = (_rebuild_alone(p, blobs, frames) for p in d.parts)
    try:
        # check_invariants: indices out of range would write outside of memory later
        return torch.sparse_coo_tensor(
            indices, values, d.shape, check_invariants=True, is_coalesced=d.coalesced or None
        )
    except (RuntimeError, ValueError) as e:
        raise ProtocolError(f"a sparse tensor of shape {d.shape} does not hold together: {e}") from e
