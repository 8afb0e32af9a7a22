"""Gradient clipping by the total norm over the gradients of all owners."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.autograd.api import get_context, gradients_of
from zmqgrad.errors import ArgumentTypeError, ConfigurationError
from zmqgrad.optim.owners import call_owners, group_by_owner, local_values
from zmqgrad.rpc import RRef

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch does."""


def _gradients(context_id: int, params: Sequence[RRef[Any]]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have one, each once and without its history."""
    distinct = {id(p): p for p in local_values(params)}
    return [g.detach() for g in gradients_of(context_id, distinct.values()) if g is not None]


def _norms(context_id: int, params: Sequence[RRef[Any]], norm_type: float) -> list[float]:
    """Return the norms of the gradients on this owner."""
    norms = []
    for gradient in _gradients(context_id, params):
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(dense, norm_type).item())
    return norms


def _total(norms: Sequence[float], norm_type: float) -> torch.Tensor:
    """Return the norm of gradients that have these norms."""
    each = torch.tensor(norms or [0.0], dtype=torch.float64)
    total: torch.Tensor = torch.linalg.vector_norm(each, norm_type)
    return total


def _scale(context_id: int, params: Sequence[RRef[Any]], factor: float) -> None:
    """Multiply the gradients on this owner by ``factor``, in place."""
    for gradient in _gradients(context_id, params):
        gradient.mul_(factor)


def clip_grad_norm(
    context_id: int,
    params_rref: Sequence[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of a context so that their norm, over all owners together, is at most ``max_norm``.

    The distributed counterpart of ``torch.nn.utils.clip_grad_norm_``. Call it between ``backward`` and
    ``step``.

    Args:
        context_id: the id of the distributed autograd context.
        params_rref: references to the parameters. Parameters without a gradient are skipped.
        max_norm: the upper limit of the norm.
        norm_type: the order of the norm; ``inf`` for the maximum norm.
        error_if_nonfinite: raise if the norm is nan or infinite.

    Returns:
        The norm before clipping: a scalar tensor on the CPU, of dtype float64.

    Raises:
        ConfigurationError: if there are no references.
        AutogradError: if the context is not known here, for example because its block has been left.
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.
        Exception: the error of an owner.

    Example:
        >>> weight = rpc.remote("worker1", torch.ones, args=(4,), kwargs={"requires_grad": True})
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.rpc_sync().neg().sum()])
        ...     clip_grad_norm(context_id, [weight], max_norm=1.0)  # the norm before
        tensor(2., dtype=torch.float64)
    """
    try:
        max_norm, norm_type = float(max_norm), float(norm_type)  # torch accepts "inf"
    except (TypeError, ValueError, OverflowError, RuntimeError) as e:
        raise ArgumentTypeError(f"clip_grad_norm: max_norm and norm_type must be numbers: {e}") from None
    owners = group_by_owner(params_rref)
    if not owners:
        raise ConfigurationError("clip_grad_norm got an empty parameter list")
    get_context(context_id)  # an owner may learn later that it has been released
    norms = call_owners(_norms, {owner: (context_id, params, norm_type) for owner, params in owners.items()})
    total = _total([norm for of_owner in norms.values() for norm in of_owner], norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped: "
            + ", ".join(f"{owner} has {_total(each, norm_type)}" for owner, each in norms.items())
        )
    factor = max_norm / (total.item() + EPSILON)
    if not factor >= 1.0:  # a nan is not: it spreads to the gradients, as in torch
        call_owners(_scale, {owner: (context_id, params, factor) for owner, params in owners.items()})
    return total
