"""Payloads: a Python value as bytes, and the tensors beside it.

The bytes of a value are blobs; small ones lie in the header, large ones in frames of their own. A tensor is a
description of its blob, so that tensors which share a storage share a blob.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from zmqgrad.wire.messages.base import MAX_DIMENSIONS, MAX_TENSORS, Id, Name, Part, Size, WorkerId


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
    shape: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)]
    strides: Annotated[tuple[Size, ...], Meta(max_length=MAX_DIMENSIONS)] = ()
    offset: Size = 0
    blob: Size = 0
    requires_grad: bool = False
    device: Name = "cpu"
    layout: Layout = Layout.STRIDED
    coalesced: bool = False
    parts: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=2)] = ()


class Tensors(Part, frozen=True):
    """Tensors beside a message, and the blobs that hold their bytes (tensors may share one)."""

    tensors: Annotated[tuple[TensorDescriptor, ...], Meta(max_length=MAX_TENSORS)] = ()
    blobs: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()


NO_TENSORS = Tensors()


class Form(enum.IntEnum):
    """How a payload's value is made from its pickle and its tensors."""

    NOTHING = 0  # None, or no arguments
    TENSOR = 1  # the one tensor itself
    TUPLE = 2  # a tuple of the tensors, in order
    PICKLE = 3  # a pickle in which tensors are replaced by their index
    PLAIN = 4  # None, bool, int, float, str or bytes, as msgpack
    ARGUMENTS = 5  # such, and tensors: msgpack of values, names of the last of them, and tensors' places


class Payload(Part, frozen=True):
    """A Python value. ``pickled`` names the blob of its pickle or msgpack, ``buffers`` those beside a pickle.

    ``forks`` gives the references in it as (owner, rref id, fork id, parent): whoever drops a payload unread
    has to let go of them.
    """

    form: Form = Form.NOTHING
    tensors: Tensors = NO_TENSORS
    pickled: Blob | None = None
    buffers: Annotated[tuple[Blob, ...], Meta(max_length=MAX_TENSORS)] = ()
    forks: Annotated[tuple[tuple[WorkerId, Id, Id, WorkerId], ...], Meta(max_length=MAX_TENSORS)] = ()


NOTHING = Payload()
