"""Subclasses of ``torch.Tensor`` that are sent inside an autograd context keep their history.

A pickle of such a tensor is its data, so the copy is a leaf. Instead a plain tensor is sent, which autograd
records as any other, and the receiver makes the subclass of it: by ``as_subclass``, or for a nested tensor of
layout ``torch.jagged`` from its values and offsets. Torch can differentiate both.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from zmqgrad.rpc.torch_internals import disable_torch_function, has_own_dispatch, jagged_parts


def reduce_subclass(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return how to pickle ``tensor``, which requires grad, with its history; None if that is not possible.

    Then it warns that the history is lost.
    """
    kind = type(tensor)
    with torch.enable_grad():
        if tensor.layout is torch.jagged:
            return _rebuild_jagged, (tensor.values(), *jagged_parts(tensor))
        if not has_own_dispatch(kind) and kind.__reduce_ex__ is torch.Tensor.__reduce_ex__:
            with disable_torch_function():
                plain = tensor.as_subclass(torch.Tensor)
            return _rebuild, (plain, kind, dict(tensor.__dict__))
    warnings.warn(
        f"a tensor of type {kind.__qualname__} was sent inside an autograd context: it arrives as a leaf "
        f"and no gradient comes back through it. Send the plain tensors it is made of, and make it there",
        stacklevel=2,
    )
    return None


def _rebuild(plain: torch.Tensor, kind: type[torch.Tensor], attributes: dict[str, Any]) -> torch.Tensor:
    with torch.enable_grad():
        tensor = plain.as_subclass(kind)
    tensor.__dict__.update(attributes)
    return tensor


def _rebuild_jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, dim: int
) -> torch.Tensor:
    with torch.enable_grad():
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dim)
