"""The memory of a tensor, and tensors without one: zero tensors of autograd, freed storages, and wrappers.

Tensors are sent by address. A zero tensor (``_is_zerotensor``), one whose storage was freed or shrunk (by
``resize_``, as sharded training does), and one of a class with ``__torch_dispatch__`` that is made of others
have a shape but no bytes there.
"""

from __future__ import annotations

import torch

from zmqgrad.errors import PayloadError


def extent(t: torch.Tensor) -> int:
    """Number of elements from the first to the last of ``t`` in memory, gaps included."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def unusual_strides(t: torch.Tensor) -> tuple[int, ...]:
    """The strides of contiguous ``t`` if they are others than torch gives a new tensor of its shape, else ().

    They can be where the size is 1: in images of one channel, for example, that are ``channels_last``.
    """
    shape = t.shape
    if 1 in shape:
        expected, strides = 1, t.stride()
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if stride != expected:
                return tuple(strides)
            expected *= size
    return ()


def holds(t: torch.Tensor, size: int) -> bool:
    """Whether the storage of strided ``t``, no zero tensor, has ``size`` bytes from its first element on."""
    if not size:
        return True
    # The storage of a wrapper tells the size that its shape would take, and has no address.
    return t.storage_offset() * t.itemsize + size <= t.untyped_storage().nbytes() and t.data_ptr() != 0


def copyable(t: torch.Tensor) -> torch.Tensor:
    """Return strided ``t``, as bytes if its elements have one each: torch cannot copy some, such as uint4."""
    return t.view(torch.uint8) if t.itemsize == 1 else t


def materialized(t: torch.Tensor) -> torch.Tensor:
    """Return strided ``t``, or a copy with memory if it is a zero tensor.

    Raises:
        PayloadError: if the storage of ``t`` is too small for its shape, or has no memory.
    """
    if t._is_zerotensor():
        return t.clone()
    if not holds(t, -(-extent(t) * t.itemsize // _PER_BYTE.get(t.dtype, 1))):
        held = t.untyped_storage().nbytes()
        if held and not t.data_ptr():
            raise PayloadError(
                f"cannot send a tensor of type {type(t).__name__}: it has no memory of its own; send the "
                f"tensors that it is made of. If it is a gradient, a backward function or a hook returned it"
            )
        raise PayloadError(
            f"cannot send a tensor of shape {tuple(t.shape)} and dtype {t.dtype} on {t.device}: its storage "
            f"holds {held} bytes, which is too few; it was freed or resized. Send it before, or a clone"
        )
    return t


def check_parts(t: torch.Tensor) -> bool:
    """Check the memory of a tensor that torch encodes or copies as a whole: sparse or quantized.

    Returns:
        Whether its storages hold no more than it shows.

    Raises:
        PayloadError: if a storage of ``t`` is too small.
    """
    parts = [materialized(getattr(t, part)()) for part in _PARTS.get(t.layout, ())]
    return all([part.untyped_storage().nbytes() <= part.nbytes for part in parts])


_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
"""Elements that share a byte, by dtype. Torch begins each row in a byte of its own."""

_PARTS = {
    torch.strided: ("detach",),
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the strided tensors of which a tensor consists, by layout."""
