"""Distributed optimizers: each parameter is optimized by its owner.

    optimizer = DistributedOptimizer(torch.optim.Adam, params_rref, lr=1e-3)
    schedule = DistributedLRScheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=10)
    with context() as context_id:
        backward(context_id, [loss()])
        clip_grad_norm(context_id, params_rref, max_norm=1.0)
        optimizer.step(context_id)
    schedule.step()

Each step uses the gradients of one distributed autograd context, not those in ``.grad``. Concurrent steps on
one worker are serialized, so that optimizers can share parameters.

The other optimizers of ``torch.distributed.optim`` have nothing to do with RPC: they are torch's own, loaded
on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from zmqgrad.optim.clipping import clip_grad_norm
from zmqgrad.optim.optimizer import DistributedOptimizer, StepResult
from zmqgrad.optim.schedule import DistributedLRScheduler

__all__ = [
    "DistributedLRScheduler",
    "DistributedOptimizer",
    "PostLocalSGDOptimizer",
    "StepResult",
    "ZeroRedundancyOptimizer",
    "as_functional_optim",
    "clip_grad_norm",
]

_TORCH = {
    "PostLocalSGDOptimizer": "post_localSGD_optimizer",
    "ZeroRedundancyOptimizer": "zero_redundancy_optimizer",
    "as_functional_optim": "utils",
    "_FunctionalAdadelta": "functional_adadelta",
    "_FunctionalAdagrad": "functional_adagrad",
    "_FunctionalAdam": "functional_adam",
    "_FunctionalAdamW": "functional_adamw",
    "_FunctionalAdamax": "functional_adamax",
    "_FunctionalRMSprop": "functional_rmsprop",
    "_FunctionalRprop": "functional_rprop",
    "_FunctionalSGD": "functional_sgd",
    "_NamedOptimizer": "named_optimizer",
    "_apply_optimizer_in_backward": "apply_optimizer_in_backward",
    "_get_in_backward_optimizers": "apply_optimizer_in_backward",
}
"""Names of torch's own, and the submodules of ``torch.distributed.optim`` that define them."""


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        return getattr(importlib.import_module(f"torch.distributed.optim.{_TORCH[name]}"), name)
    if name in _TORCH.values():
        return importlib.import_module(f"torch.distributed.optim.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
