"""Payloads: a pickled Python value, and the tensors beside it.

Bytes are sent as blobs: small ones in the header, large ones in frames of their own. A tensor descriptor
refers to a blob, so that tensors which share a storage share a blob.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterator
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from zmqgrad.wire.messages.base import MAX_DIMENSIONS, MAX_TENSORS, Id, Name, Size, WireStruct, WorkerId

Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]


class BlobLocation(enum.IntEnum):
    """Where the bytes of a blob are."""

    INLINE = 0  # in the header itself
    FRAME = 1  # in a frame of their own, after the header


class Blob(WireStruct, frozen=True):
    """``size`` bytes: inline in ``data``, or at ``offset`` of frame ``index``."""

    location: BlobLocation
    size: Size
    data: bytes = b""
    index: Size = 0
    offset: Size = 0


class Layout(enum.IntEnum):
    """How a tensor is built from its bytes."""

    STRIDED = 0  # a view of its blob
    COO = 1  # parts: indices, values
    OPAQUE = 2  # the blob was written by torch.save


class TensorDescriptor(WireStruct, frozen=True):
    """One tensor: ``shape`` and ``strides`` in elements, ``offset`` in bytes from the start of its blob.

    Empty ``strides`` with a shape that has dimensions means contiguous.
    """

    dtype: Name
    shape: Shape
    strides: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    offset: Size = 0
    blob: Size = 0
    requires_grad: bool = False
    device: Name = "cpu"
    layout: Layout = Layout.STRIDED
    coalesced: bool = False
    parts: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=2)] = ()


class TensorBatch(WireStruct, frozen=True):
    """Contiguous tensors of one dtype, concatenated in one blob.

    ``indices`` are their positions among the tensors of the message; empty if the batch contains all of them.
    """

    dtype: Name
    blob: Size
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)]
    indices: Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)] = ()
    requires_grad: bool = False


class Tensors(WireStruct, frozen=True):
    """The tensors of a message and the blobs that hold their bytes; tensors may share a blob.

    ``tensors`` have, in order, the indices that are not in ``batches``.
    """

    tensors: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=MAX_TENSORS)] = ()
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    batches: Annotated[tuple[TensorBatch, ...], Meta(max_length=MAX_TENSORS)] = ()

    def requiring_grad(self) -> list[int]:
        """Return the indices of the tensors that require grad."""
        if not self.batches:
            return [i for i, d in enumerate(self.tensors) if d.requires_grad]
        numbers: list[int] = []
        for batch in self.batches:
            if batch.requires_grad:
                numbers += batch.indices or range(len(batch.shapes))
        numbers += [i for i, d in zip(self._free(), self.tensors, strict=False) if d.requires_grad]
        return sorted(numbers)

    def require_grad(self, numbers: Collection[int]) -> Tensors:
        """Return the same tensors, of which those with these indices require grad: all of some dtypes."""
        wanted, free = set(numbers), self._free()
        return replace(
            self,
            tensors=tuple([replace(d, requires_grad=next(free) in wanted) for d in self.tensors]),
            batches=tuple([replace(b, requires_grad=(*b.indices, 0)[0] in wanted) for b in self.batches]),
        )

    def _free(self) -> Iterator[int]:
        """Yield the indices that are not in batches."""
        taken = {i for b in self.batches for i in b.indices or range(len(b.shapes))}
        return itertools.filterfalse(taken.__contains__, itertools.count())


NO_TENSORS = Tensors()


class PayloadFormat(enum.IntEnum):
    """How the content of a payload is represented."""

    NONE = 0  # None, or no arguments
    TENSORS = 1  # one tensor, or arguments that are all tensors
    PICKLE = 2  # a pickle in which tensors are replaced by their index


class Payload(WireStruct, frozen=True):
    """A Python value, or the arguments of a call.

    ``pickled`` is the pickle, ``buffers`` are its out-of-band buffers. ``forks`` lists the RRefs in it as
    (owner, rref id, fork id, parent); a receiver that drops the payload unread must release them. ``order``
    has the index of the tensor of each argument, if one tensor is passed more than once. ``shelf`` is not 0
    if the frames do not come with the message: the receiver fetches them from its sender by this key.
    """

    format: PayloadFormat = PayloadFormat.NONE
    tensors: Tensors = NO_TENSORS
    pickled: Blob | None = None
    buffers: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    forks: Annotated[tuple[tuple[WorkerId, Id, Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)] = ()
    order: Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)] = ()
    shelf: Id = 0


NONE_PAYLOAD = Payload()
