"""Replicas of a stage, each on a worker of its own, average their gradients: data parallel beside RPC.

The replicas are a process group of ``torch.distributed`` (gloo, nccl). Each runs its share of the batch in a
context, its own or one for all, and calls :func:`allreduce_gradients` after ``backward`` and before the
optimizer's step; then all of them make the same step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from zmqgrad.autograd.api import get_context
from zmqgrad.errors import AutogradError


def allreduce_gradients(
    context_id: int,
    params: Iterable[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    average: bool = True,
) -> None:
    """Replace the gradients of ``params`` in the context by their mean over the process group.

    A replica without a gradient for a parameter counts with zeros; one that no replica has a gradient for
    stays without. One message for each type of numbers and device.

    Args:
        context_id: the context of this replica.
        params: its parameters, in the same order on all replicas.
        group: of ``torch.distributed``; None for all processes.
        average: divide by the number of replicas; False leaves the sum.

    Raises:
        AutogradError: if the context is not known here, or a gradient is sparse.
        Anything else: as ``torch.distributed.all_reduce`` raises.
    """
    context = get_context(context_id)
    gradients = context.gradients()
    every = list(dict.fromkeys(params))
    for p in every:
        if p in gradients and gradients[p].layout is not torch.strided:
            raise AutogradError(f"the gradient of a parameter of shape {tuple(p.shape)} is sparse")
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for p in every:
        buckets.setdefault((p.dtype, p.device), []).append(p)
    replicas = dist.get_world_size(group) if average else 1
    for (dtype, device), members in buckets.items():
        present = torch.tensor([float(p in gradients) for p in members], dtype=dtype, device=device)
        parts = [gradients[p] if p in gradients else torch.zeros_like(p) for p in members]
        flat = torch.cat([present, *(part.detach().reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        anywhere, *sums = torch.split(flat, [len(members), *(p.numel() for p in members)])
        for p, there, total in zip(members, anywhere.tolist(), sums, strict=True):
            if there:
                context.replace(p, (total / replicas).view_as(p))
