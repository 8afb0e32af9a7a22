"""Payloads: a Python value as bytes, and the tensors beside it.

The bytes of a value are blobs; small ones lie in the header, large ones in frames of their own. A tensor is a
description of its blob, so that tensors which share a storage share a blob.
"""

from __future__ import annotations

import enum
import itertools
from typing import Annotated

from msgspec import Meta

from zmqgrad.wire.messages.base import MAX_DIMENSIONS, MAX_TENSORS, Id, Name, Part, Size, WorkerId

Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]


class Place(enum.IntEnum):
    """Where the bytes of a blob are."""

    INLINE = 0  # in the header itself
    FRAME = 1  # in a frame of their own, after the header


class Blob(Part, frozen=True):
    """Some bytes: inline in ``data``, or ``size`` bytes at ``offset`` of frame number ``index``."""

    place: Place
    size: Size
    data: bytes = b""
    index: Size = 0
    offset: Size = 0


class Layout(enum.IntEnum):
    """How the bytes of a tensor make a tensor."""

    STRIDED = 0  # a window on its blob
    COO = 1  # parts: indices, values
    OPAQUE = 2  # the blob is what torch.save wrote


class TensorDescriptor(Part, frozen=True):
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


class Row(Part, frozen=True):
    """Contiguous tensors of one dtype whose bytes fill a blob, one behind the other.

    ``places`` are their numbers among the tensors of the message; empty: they are all of them.
    """

    dtype: Name
    blob: Size
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)]
    places: Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)] = ()
    requires_grad: bool = False


class Tensors(Part, frozen=True):
    """Tensors beside a message, and the blobs that hold their bytes (tensors may share one).

    Those of ``tensors`` have, in order, the numbers that those in ``rows`` leave free.
    """

    tensors: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=MAX_TENSORS)] = ()
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_TENSORS)] = ()

    def requiring_grad(self) -> list[int]:
        """The numbers of those that require grad."""
        if not self.rows:
            return [i for i, d in enumerate(self.tensors) if d.requires_grad]
        numbers: list[int] = []
        taken: set[int] = set()
        for row in self.rows:
            places = row.places or range(len(row.shapes))
            taken.update(places)
            if row.requires_grad:
                numbers += places
        free = itertools.filterfalse(taken.__contains__, itertools.count())
        numbers += [i for i, d in zip(free, self.tensors, strict=False) if d.requires_grad]
        return sorted(numbers)


NO_TENSORS = Tensors()


class Form(enum.IntEnum):
    """How a payload's value is made from its pickle and its tensors."""

    NOTHING = 0  # None, or no arguments
    TENSOR = 1  # the one tensor itself
    TUPLE = 2  # a tuple of the tensors
    PICKLE = 3  # a pickle in which tensors are replaced by their index
    PLAIN = 4  # None, bool, int, float, str or bytes, as msgpack
    ARGUMENTS = 5  # such, and tensors: msgpack of values, names of the last of them, and tensors' places
    VALUE = 6  # the one argument of such


class Payload(Part, frozen=True):
    """A Python value. ``pickled`` names the blob of its pickle or msgpack, ``buffers`` those beside a pickle.

    ``forks`` gives the references in it as (owner, rref id, fork id, parent): whoever drops a payload unread
    has to let go of them. ``order`` gives the numbers of the tensors in a tuple, where one is there twice.
    """

    form: Form = Form.NOTHING
    tensors: Tensors = NO_TENSORS
    pickled: Blob | None = None
    buffers: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    forks: Annotated[tuple[tuple[WorkerId, Id, Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)] = ()
    order: Annotated[tuple[Size, ...], Meta(max_length=MAX_TENSORS)] = ()


NOTHING = Payload()
