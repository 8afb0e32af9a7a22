"""DistributedOptimizer: one local optimizer on each worker that owns parameters (DESIGN section 11).

Each step uses the gradients of one distributed autograd context, not those in ``.grad``. Steps on one
worker are serialised by a lock, so that optimizers which share parameters do not mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zmqgrad.autograd import get_gradients
from zmqgrad.autograd.hooks import grads_lent
from zmqgrad.errors import ConfigurationError
from zmqgrad.rpc import RRef, rpc_async

__all__ = ["DistributedOptimizer"]


class _LocalOptimizer:
    """Lives on the owner of its parameters."""

    def __init__(self, optimizer_class: type, params: Sequence[RRef[Any]], args: Any, kwargs: Any) -> None:
        self._optimizer = optimizer_class([p.local_value() for p in params], *args, **kwargs)

    def step(self, context_id: int) -> None:
        """One step on the gradients of a context. ``.grad`` of the parameters is as before afterwards."""
        gradients = get_gradients(context_id)
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        with grads_lent(params, [gradients.get(p) for p in params]):
            self._optimizer.step()


def _make(optimizer_class: type, params: Sequence[RRef[Any]], args: Any, kwargs: Any) -> RRef[Any]:
    return RRef(_LocalOptimizer(optimizer_class, params, args, kwargs))


def _step(local: RRef[Any], context_id: int) -> None:
    local.local_value().step(context_id)


class DistributedOptimizer:
    """Optimizes parameters wherever they live.

    Args:
        optimizer_class: a class of ``torch.optim``, or like one.
        params_rref: references to the parameters.
        args, kwargs: for the optimizer on each owner.

    Raises:
        ConfigurationError: if there are no parameters, or what is given are no references.
        Anything else: what making an optimizer raised, on any owner.
    """

    def __init__(
        self, optimizer_class: type, params_rref: Sequence[RRef[Any]], *args: Any, **kwargs: Any
    ) -> None:
        by_owner: dict[int, list[RRef[Any]]] = {}
        for i, param in enumerate(params_rref):
            if not isinstance(param, RRef):
                raise ConfigurationError(f"params_rref[{i}] must be an RRef, not {type(param).__name__}")
            by_owner.setdefault(param.owner().id, []).append(param)
        if not by_owner:
            raise ConfigurationError("optimizer got an empty parameter list")
        making = [
            rpc_async(owner, _make, (optimizer_class, params, args, kwargs))
            for owner, params in by_owner.items()
        ]
        self._owners = list(by_owner)
        self._locals: list[RRef[Any]] = _all(making)

    def step(self, context_id: int) -> None:
        """One step on all owners, in parallel, on the gradients of context ``context_id``.

        Raises:
            what a step raised on any owner, naming it; the steps of the others are done all the same.
        """
        _all(
            [
                rpc_async(owner, _step, (local, context_id))
                for owner, local in zip(self._owners, self._locals, strict=True)
            ]
        )


def _all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """All results; waits for all of them even if one fails, so that nothing runs on behind the caller."""
    results: list[Any] = []
    failed: Exception | None = None
    for future in futures:
        try:
            results.append(future.wait())
        except Exception as e:
            failed = failed or e
    if failed is not None:
        raise failed
    return results
