"""Decodes tensors from descriptors and frames of a peer, each checked before a byte is read."""

from __future__ import annotations

import ctypes
import io
import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import torch

from zmqgrad.errors import PayloadError, ProtocolError
from zmqgrad.wire.lazy_frame import Buffer
from zmqgrad.wire.messages import Blob, BlobLocation, Layout, TensorDescriptor, Tensors
from zmqgrad.wire.tensors.batches import decode_batch
from zmqgrad.wire.tensors.devices import copy_to_device
from zmqgrad.wire.tensors.dtypes import DTYPES, NAMES
from zmqgrad.wire.tensors.modes import modes_disabled
from zmqgrad.wire.tensors.torch_internals import dispatch_modes, function_modes

_memmove = ctypes.memmove


def decode_tensors(
    encoded: Tensors, frames: Sequence[Buffer], differentiable: bool = True
) -> list[torch.Tensor]:
    """Decode the tensors, in order. They belong to the receiver: writing to them is safe.

    A tensor whose blob is a frame of its own is built on the frame without a copy.

    Args:
        differentiable: whether tensors require grad if those that were sent did.

    Raises:
        ProtocolError: if a descriptor does not fit its blob, or a blob its frame.
        PayloadError: if this process does not have the device of a tensor.
    """
    try:
        if function_modes() or dispatch_modes():
            with modes_disabled():
                return _decode_all(encoded, frames, differentiable)
        return _decode_all(encoded, frames, differentiable)
    except PayloadError:
        raise
    except (RuntimeError, ValueError, TypeError, OverflowError) as e:  # from torch, for sizes and strides
        raise ProtocolError(f"malformed tensor descriptor: {e}") from e


def _decode_all(encoded: Tensors, frames: Sequence[Buffer], differentiable: bool) -> list[torch.Tensor]:
    if encoded.batches:
        return _decode_with_batches(encoded, frames, differentiable)
    descriptors, blobs = encoded.tensors, encoded.blobs
    if len(descriptors) == 1:
        d = descriptors[0]
        flat = _decode_flat(d, blobs, frames)
        if flat is not None:
            return [flat.requires_grad_() if differentiable and d.requires_grad else flat]
    users: Counter[int] | None = None  # how many tensors are views of a blob, if any two may be
    if len({d.blob for d in descriptors}) < len(descriptors):
        users = Counter([d.blob for d in descriptors if d.layout is Layout.STRIDED and d.device == "cpu"])
    bases: dict[int, torch.Tensor] = {}
    out = []
    for d in descriptors:
        shares = users is not None and users[d.blob] > 1
        t = None if shares else _decode_flat(d, blobs, frames)
        if t is None:
            t = _decode_other(d, blobs, frames, bases, shares)
        out.append(t.requires_grad_() if differentiable and d.requires_grad else t)
    return out


def _decode_with_batches(
    encoded: Tensors, frames: Sequence[Buffer], differentiable: bool
) -> list[torch.Tensor]:
    blobs, batches = encoded.blobs, encoded.batches
    if len({batch.blob for batch in batches}) < len(batches):
        raise ProtocolError("two batches of tensors refer to one blob")
    out: list[torch.Tensor | None] = [None] * (
        len(encoded.tensors) + sum([len(batch.shapes) for batch in batches])
    )
    for batch in batches:
        if batch.blob >= len(blobs):
            raise ProtocolError(f"a batch of tensors refers to blob {batch.blob} of {len(blobs)}")
        decoded = decode_batch(batch, _data(blobs[batch.blob], frames))
        if batch.requires_grad and differentiable:
            decoded = [t.requires_grad_() for t in decoded]
        if not batch.indices and len(decoded) == len(out):
            return decoded
        if len(batch.indices) != len(decoded) or max(batch.indices, default=0) >= len(out):
            raise ProtocolError(
                f"{len(decoded)} tensors of a batch have indices {batch.indices[:8]} of {len(out)}"
            )
        for index, t in zip(batch.indices, decoded, strict=True):
            out[index] = t
    others = _decode_all(Tensors(encoded.tensors, blobs), frames, differentiable)
    free = [index for index, t in enumerate(out) if t is None]
    if len(free) != len(others):
        raise ProtocolError("two tensors have the same index")
    for index, t in zip(free, others, strict=True):
        out[index] = t
    return out  # type: ignore[return-value]  # all are set now


def _data(blob: Blob, frames: Sequence[Buffer]) -> Buffer:
    """Return the bytes of ``blob`` after checking its bounds."""
    data: Buffer
    if blob.location is BlobLocation.INLINE:
        data = blob.data
    elif blob.index < len(frames):
        data = frames[blob.index]
        if blob.offset or len(data) != blob.size:  # one of several in this frame
            data = memoryview(data)[blob.offset : blob.offset + blob.size]
    else:
        raise ProtocolError(f"a blob refers to frame {blob.index} of {len(frames)}")
    if len(data) != blob.size:
        raise ProtocolError(f"a blob of {blob.size} bytes has {len(data)} bytes of data")
    return data


def blob_bytes(blob: Blob, frames: Sequence[Buffer]) -> Buffer:
    """Return the bytes of a blob that is not a tensor.

    Raises:
        ProtocolError: if it does not fit its frame.
    """
    return _data(blob, frames)


def _dtype(d: TensorDescriptor) -> torch.dtype:
    dtype = DTYPES.get(d.dtype)
    if dtype is None:
        raise ProtocolError(f"this torch ({torch.__version__}) has no dtype {d.dtype!r} for such a tensor")
    return dtype


def _blob_of(d: TensorDescriptor, blobs: Sequence[Blob]) -> Blob:
    if d.blob >= len(blobs):
        raise ProtocolError(f"a tensor refers to blob {d.blob} of {len(blobs)}")
    if d.strides and len(d.strides) != len(d.shape):
        raise ProtocolError(f"a tensor of shape {d.shape} has strides {d.strides}")
    return blobs[d.blob]


def _needed(d: TensorDescriptor, itemsize: int) -> int:
    """End of a strided tensor in its blob, in bytes."""
    if 0 in d.shape:
        return d.offset
    if not d.strides:
        return d.offset + math.prod(d.shape) * itemsize
    return d.offset + (1 + sum((n - 1) * s for n, s in zip(d.shape, d.strides, strict=True))) * itemsize


def _decode_flat(d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]) -> torch.Tensor | None:
    """Decode a contiguous tensor in host memory that fits its blob; None for others and malformed ones.

    Does the same as :func:`_decode_alone`, faster: a message may have hundreds of such tensors.
    """
    dtype = DTYPES.get(d.dtype)
    if dtype is None or d.layout or d.strides or d.offset or d.device != "cpu" or d.blob >= len(blobs):
        return None  # the layout STRIDED is 0
    blob, shape = blobs[d.blob], d.shape
    count = math.prod(shape)
    if blob.location is BlobLocation.INLINE:
        data, size = blob.data, count * dtype.itemsize
        if not 0 < size <= blob.size == len(data):
            return None
        t = torch.empty(shape, dtype=dtype)
        _memmove(t.data_ptr(), data, size)
        return t
    if blob.index >= len(frames):
        return None
    frame = frames[blob.index]
    if not 0 < count * dtype.itemsize <= blob.size <= len(frame) - blob.offset:
        return None
    flat = torch.frombuffer(frame, dtype=dtype, count=count, offset=blob.offset)
    return flat if len(shape) == 1 else flat.view(shape)


def _decode_alone(d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]) -> torch.Tensor:
    dtype, blob = _dtype(d), _blob_of(d, blobs)
    data = _data(blob, frames)
    needed = _needed(d, dtype.itemsize)
    if needed > blob.size or d.offset:
        raise ProtocolError(f"a tensor of shape {d.shape} needs {needed} bytes, its blob has {len(data)}")
    if blob.location is BlobLocation.INLINE:
        t = (
            torch.empty_strided(d.shape, d.strides, dtype=dtype)
            if d.strides
            else torch.empty(d.shape, dtype=dtype)
        )
        if needed:
            _memmove(t.data_ptr(), bytes(data), needed)  # bytes() copies nothing, as inline data is bytes
        return t
    if 0 in d.shape:
        return torch.empty(d.shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=needed // dtype.itemsize)
    return flat.as_strided(d.shape, d.strides) if d.strides else flat.view(d.shape)


def _decode_other(
    d: TensorDescriptor,
    blobs: Sequence[Blob],
    frames: Sequence[Buffer],
    bases: dict[int, torch.Tensor],
    shares: bool,
) -> torch.Tensor:
    """Decode any tensor. ``shares``: it is a view of a blob, as others are, for which there is one base."""
    if d.layout is Layout.STRIDED and d.device == "cpu" and not shares:
        return _decode_alone(d, blobs, frames)
    if d.device == "meta":
        return torch.empty_strided(d.shape, d.strides, dtype=_dtype(d), device="meta")
    if d.device != "cpu":
        here = msgspec.structs.replace(d, device="cpu")
        if d.layout is Layout.STRIDED:
            return copy_to_device(_decode_alone(here, blobs, frames), d.device)
        return copy_to_device(_decode_other(here, blobs, frames, bases, shares), d.device)
    if d.layout is Layout.COO:
        return _decode_coo(d, blobs, frames)
    blob = _blob_of(d, blobs)
    data = _data(blob, frames)
    if d.layout is Layout.OPAQUE:
        return _decode_opaque(d, data)
    dtype = _dtype(d)
    needed = _needed(d, dtype.itemsize)
    if needed > len(data) or d.offset % dtype.itemsize:
        raise ProtocolError(f"a tensor of shape {d.shape} at {d.offset} does not fit its blob of {len(data)}")
    base = bases.get(d.blob)
    if base is None:
        base = torch.frombuffer(
            bytearray(data) if blob.location is BlobLocation.INLINE else data, dtype=torch.uint8
        )
        bases[d.blob] = base
    strides = d.strides or torch.empty(d.shape, device="meta").stride()
    t = torch.empty(0, dtype=dtype).set_(
        base.untyped_storage(), d.offset // dtype.itemsize, torch.Size(d.shape), tuple(strides)
    )
    # If it requires grad, a checkpointed call has sent it as a constant: it gets a history of its own, so it
    # must not share (see Sharing).
    return t.clone() if d.requires_grad else t


def _decode_opaque(d: TensorDescriptor, data: Buffer) -> torch.Tensor:
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # zipfile, pickle and torch raise all kinds for malformed bytes
        raise ProtocolError(f"an opaque tensor cannot be read: {type(e).__name__}: {e}") from e
    if type(loaded) is not torch.Tensor or (NAMES[loaded.dtype], loaded.shape) != (d.dtype, d.shape):
        raise ProtocolError(f"an opaque tensor is {type(loaded).__name__}, not {d.dtype} {d.shape}")
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


def _decode_coo(d: TensorDescriptor, blobs: Sequence[Blob], frames: Sequence[Buffer]) -> torch.Tensor:
    if len(d.parts) != 2 or any(p.layout is not Layout.STRIDED or p.device != "cpu" for p in d.parts):
        raise ProtocolError("a sparse tensor lacks its indices or values")
    indices, values = (_decode_alone(p, blobs, frames) for p in d.parts)
    try:
        # check_invariants: indices out of range would write outside of memory later
        return torch.sparse_coo_tensor(
            indices, values, d.shape, check_invariants=True, is_coalesced=d.coalesced or None
        )
    except (RuntimeError, ValueError) as e:
        raise ProtocolError(f"malformed sparse tensor of shape {d.shape}: {e}") from e
