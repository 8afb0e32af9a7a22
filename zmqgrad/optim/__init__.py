"""Distributed optimizers: each parameter is optimized by its owner (DESIGN section 11).

    optimizer = DistributedOptimizer(torch.optim.Adam, params_rref, lr=1e-3)
    schedule = DistributedLRScheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=10)
    with context() as context_id:
        backward(context_id, [loss()])
        clip_grad_norm(context_id, params_rref, max_norm=1.0)
        optimizer.step(context_id)
    schedule.step()

Each step uses the gradients of one distributed autograd context, not those in ``.grad``. Concurrent steps on
one worker are serialised, so that optimizers can share parameters.
"""

from __future__ import annotations

from zmqgrad.optim.clipping import clip_grad_norm
from zmqgrad.optim.optimizer import DistributedOptimizer
from zmqgrad.optim.schedule import DistributedLRScheduler

__all__ = ["DistributedLRScheduler", "DistributedOptimizer", "clip_grad_norm"]
