"""Data parallelism beside RPC: replicas of a stage, each on its own worker, average their gradients.

The replicas form a process group of ``torch.distributed`` (gloo, nccl). Each runs its share of the batch in a
context, its own or a common one, and calls :func:`allreduce_gradients` after ``backward`` and before the
optimizer's step. Then all of them take the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from zmqgrad.autograd.api import get_context
from zmqgrad.autograd.torch_internals import gradient_dtype
from zmqgrad.errors import ArgumentTypeError, AutogradError
from zmqgrad.runtime.arguments import as_list


def allreduce_gradients(
    context_id: int,
    params: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    average: bool = True,
) -> None:
    """Replace the gradients of ``params`` in the context by their mean over the process group.

    A replica without a gradient for a parameter contributes zeros. A parameter without a gradient on any
    replica keeps none. Uses one all-reduce per device and dtype of gradients.

    Args:
        context_id: the id of the context of this replica.
        params: the parameters, in the same order on all replicas.
        group: the process group; None for the default group.
        average: whether to divide the sums by the number of replicas.

    Raises:
        AutogradError: if the context is not known here, or a gradient is sparse.
        Exception: any error of ``torch.distributed.all_reduce``.

    Example:
        >>> with dist_autograd.context() as context_id:  # doctest: +SKIP
        ...     dist_autograd.backward(context_id, [loss_of(batch)])
        ...     dist_autograd.allreduce_gradients(context_id, layer.parameters())
        ...     optimizer.step(context_id)
    """
    context = get_context(context_id)
    gradients = context.gradients()
    every = as_list(params, "params must be a list of tensors")
    for p in every:
        if not isinstance(p, torch.Tensor):
            raise ArgumentTypeError(f"params must be a list of tensors; one of them is {p!r}")
        if p in gradients and gradients[p].layout is not torch.strided:
            raise AutogradError(f"the gradient of a parameter of shape {tuple(p.shape)} is sparse")
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for p in dict.fromkeys(every):
        buckets.setdefault((gradient_dtype(p) or p.dtype, p.device), []).append(p)
    replicas = dist.get_world_size(group) if average else 1
    for (dtype, device), members in buckets.items():
        present = torch.tensor([float(p in gradients) for p in members], dtype=dtype, device=device)
        parts = [gradients[p] if p in gradients else torch.zeros_like(p) for p in members]
        flat = torch.cat([present, *(part.detach().to(dtype).reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        anywhere, *sums = torch.split(flat, [len(members), *(p.numel() for p in members)])
        for p, there, total in zip(members, anywhere.tolist(), sums, strict=True):
            if there:
                context.replace(p, (total / replicas).view_as(p))
