"""Validation of gradients that arrive from other workers, as torch's engine validates those of its own nodes.

The engine checks what enters it, but not gradients for a leaf or for a tensor that was itself received, which
never enter it; and two gradients for one tensor are added before it sees them. So each is checked where it
arrives. A gradient may have a shape that the tensor's broadcasts to (it is summed) and another dtype (it is
cast), but must be on the tensor's device and have a compatible layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zmqgrad.autograd.send_recv import EdgeOrLeaf
from zmqgrad.autograd.torch_internals import LEAF_NODE, gradient_dtype, input_metadata

_DENSE_FOR = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def matches(gradient: torch.Tensor, place: EdgeOrLeaf) -> bool:
    """Whether ``gradient`` has the form of the tensor at ``place``. An edge does not show its layout."""
    if isinstance(place, GradientEdge):
        return has_form(gradient, input_metadata(place[0], place[1]))
    return (
        gradient_dtype(place) in (gradient.dtype, None)
        and place.shape == gradient.shape
        and place.layout is gradient.layout
        and place.device == gradient.device
    )


def has_form(gradient: torch.Tensor, form: Any) -> bool:
    """Whether ``gradient`` has the form that the metadata of an edge tell."""
    return (
        form.dtype is gradient.dtype
        and (form.is_nested_tensor or form.shape == [*gradient.shape])
        and form.device == gradient.device
    )


def fit(gradient: torch.Tensor, place: EdgeOrLeaf) -> torch.Tensor:
    """Return ``gradient`` in the form of the tensor at ``place``: summed to its shape, cast to its dtype.

    Raises:
        RuntimeError: if that is not possible; says why, in torch's words.
    """
    form: Any = input_metadata(*place[:2]) if isinstance(place, GradientEdge) else place
    node: Any = place.node if isinstance(place, GradientEdge) else None
    at = node.variable if type(node) is LEAF_NODE else place
    dtype = gradient_dtype(at) if isinstance(at, torch.Tensor) else form.dtype
    if gradient.is_nested or getattr(form, "is_nested_tensor", False):
        return gradient  # the engine validates it
    shape = tuple(form.shape)
    if gradient.shape != shape:
        if not _expands_to(shape, tuple(gradient.shape)):
            raise RuntimeError(f"got {list(gradient.shape)} but expected shape compatible with {list(shape)}")
        gradient = gradient.sum_to_size(shape)
    if dtype not in (gradient.dtype, None):
        if not gradient.dtype.is_floating_point and gradient.dtype.is_complex != dtype.is_complex:
            raise RuntimeError(f"got {gradient.dtype} but expected a dtype that casts to {dtype}")
        gradient = gradient.to(dtype)
    if isinstance(place, torch.Tensor) and gradient.layout is not place.layout:
        dense_for_sparse = gradient.layout is torch.strided and place.layout in _DENSE_FOR
        if gradient.layout is not torch.sparse_coo and not dense_for_sparse:
            raise RuntimeError(f"expected layout {place.layout} but got {gradient.layout}")
    if gradient.device != form.device:
        if gradient.dim():
            raise RuntimeError(f"expected device {form.device} but got {gradient.device}")
        gradient = gradient.to(form.device)
    return gradient


def in_layout_of(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return ``gradient``, or a copy, with the strides that torch gives to ``leaf.grad``.

    They are those of ``leaf`` if it has no gaps or overlaps. Fused optimizers rely on that.
    """
    strided = gradient.layout is torch.strided and leaf.layout is torch.strided
    if not strided or gradient.shape != leaf.shape or type(gradient) is not torch.Tensor:
        return gradient
    if leaf.is_contiguous():
        if gradient.is_contiguous():
            return gradient
        strides = leaf.stride()
    else:
        strides = torch.empty_like(leaf, device="meta").stride()
        of_both = zip(strides, gradient.stride(), leaf.shape, strict=True)
        if all([wanted == found or size == 1 for wanted, found, size in of_both]):
            return gradient
    with torch.set_grad_enabled(gradient.requires_grad):
        return gradient.new_empty_strided(leaf.shape, strides).copy_(gradient)


def _expands_to(shape: tuple[int, ...], larger: tuple[int, ...]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``larger``."""
    if len(shape) > len(larger):
        return False
    pairs = zip(reversed(shape), reversed(larger), strict=False)
    return all(size in (1, target) for size, target in pairs)
