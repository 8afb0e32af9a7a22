"""Validation of the roots of a backward pass."""

from __future__ import annotations

import torch

from zmqgrad.errors import AutogradError


def check_roots(roots: object) -> list[torch.Tensor]:
    """Check that a backward pass can start at ``roots``, and return them as a list.

    Raises:
        AutogradError: if a root is not a scalar with a gradient function.
        TypeError: if ``roots`` is not a list or tuple of tensors.
    """
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"incompatible function arguments: roots must be a list of tensors, not {type(roots).__name__}"
        )
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for i, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"incompatible function arguments: roots[{i}] must be a tensor, not {type(root).__name__}"
            )
        if not root.requires_grad:
            raise AutogradError(
                f"requires_grad not set on root roots[{i}]: nothing that it was made from requires grad"
            )
        if root.numel() != 1:
            raise AutogradError(
                f"roots[{i}] of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: "
                f"reduce it first, as by .sum() or .mean()"
            )
        if root.grad_fn is None:
            raise AutogradError(
                f"roots[{i}] does not have a valid gradient function: it is a leaf, nothing was done to it"
            )
    return list(roots)
