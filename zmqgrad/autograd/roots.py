"""Validation of what a backward pass starts from, and of the inputs whose gradients it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.errors import ArgumentTypeError, AutogradError


def check_roots(roots: object) -> list[torch.Tensor]:
    """Check that a backward pass can start at ``roots``, and return them as a list.

    Raises:
        AutogradError: if a root is not a scalar with a gradient function.
        ArgumentTypeError: if ``roots`` is not a list or tuple of tensors.
    """
    if not isinstance(roots, (list, tuple)):
        raise ArgumentTypeError(
            f"incompatible function arguments: roots must be a list of tensors, not {type(roots).__name__}"
        )
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for i, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise ArgumentTypeError(
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


def check_outputs(
    outputs: object, grad_outputs: object, create_graph: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Check the outputs of ``grad``. Returns them and their gradients; None: ones.

    Raises:
        AutogradError: if an output does not require grad, or its gradient does not fit it.
        ArgumentTypeError: if one of them is not a tensor.
    """
    roots = [outputs] if isinstance(outputs, torch.Tensor) else _listed(outputs, "outputs")
    given: Any = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs
    given = [None] * len(roots) if given is None else _listed(given, "grad_outputs")
    if len(given) != len(roots):
        raise AutogradError(f"{len(given)} grad_outputs were given for {len(roots)} outputs")
    gradients: list[torch.Tensor | None] = []
    for i, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not isinstance(root, torch.Tensor) or not isinstance(gradient, torch.Tensor | None):
            raise ArgumentTypeError(f"outputs[{i}] and grad_outputs[{i}] must be tensors, or the latter None")
        if not root.requires_grad:
            raise AutogradError(f"outputs[{i}] does not require grad: nothing it was made from does")
        if gradient is None:
            if root.numel() != 1:
                raise AutogradError(
                    f"grad can be implicitly created only for scalar outputs: outputs[{i}] has shape "
                    f"{tuple(root.shape)}, give its gradient in grad_outputs"
                )
            if root.is_complex():
                raise AutogradError(
                    f"grad can be implicitly created only for real scalar outputs: outputs[{i}] is "
                    f"{root.dtype}, give its gradient in grad_outputs"
                )
        elif gradient.shape != root.shape:
            raise AutogradError(
                f"Mismatch in shape: grad_outputs[{i}] has a shape of {tuple(gradient.shape)} and "
                f"outputs[{i}] has a shape of {tuple(root.shape)}."
            )
        elif gradient.is_complex() != root.is_complex():
            raise AutogradError(
                f"Mismatch in dtype: grad_outputs[{i}] has a dtype of {gradient.dtype} and outputs[{i}] has "
                f"a dtype of {root.dtype}: both must be complex, or none."
            )
        gradients.append(gradient if create_graph or gradient is None else gradient.detach())
    return roots, gradients


def check_inputs(inputs: object, reference: type) -> list[Any]:
    """Return the inputs of ``grad`` as a list: tensors, or instances of ``reference``.

    Raises:
        AutogradError: if there are none.
        ArgumentTypeError: if one is neither.
    """
    wanted = [inputs] if isinstance(inputs, torch.Tensor | reference) else _listed(inputs, "inputs")
    for i, each in enumerate(wanted):
        if not isinstance(each, torch.Tensor | reference):
            raise ArgumentTypeError(
                f"inputs[{i}] must be a tensor or an RRef to one, not {type(each).__name__}"
            )
    if not wanted:
        raise AutogradError("grad requires non-empty inputs.")
    return wanted


def _listed(value: object, name: str) -> list[Any]:
    if not isinstance(value, Sequence):
        raise ArgumentTypeError(f"{name} must be a list of tensors, not {type(value).__name__}")
    return list(value)
