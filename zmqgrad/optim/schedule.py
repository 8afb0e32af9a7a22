"""DistributedLRScheduler: learning-rate schedules for DistributedOptimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from zmqgrad.errors import ArgumentTypeError
from zmqgrad.optim.local import LocalOptimizer
from zmqgrad.optim.optimizer import DistributedOptimizer
from zmqgrad.optim.owners import call_owners, check_owners
from zmqgrad.rpc import RRef
from zmqgrad.runtime.arguments import check_callable


def _make(local: RRef[LocalOptimizer], make: Callable[..., Any], args: Any, kwargs: Any) -> RRef[Any]:
    return RRef(make(local.local_value().optimizer, *args, **kwargs))


def _follow(local: RRef[LocalOptimizer], how: Sequence[Any], state: dict[str, Any]) -> RRef[Any]:
    """As :func:`_make`, for an owner that has come later; ``state`` is that of the others."""
    groups = local.local_value().optimizer.param_groups
    rates = [copy.deepcopy(group["lr"]) for group in groups]  # of now, which a new scheduler would set
    schedule = _make(local, *how)
    schedule.local_value().load_state_dict(copy.deepcopy(state))
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return schedule


def _step(schedule: RRef[Any], args: Any, kwargs: Any) -> None:
    schedule.local_value().step(*args, **kwargs)


def _last_lr(schedule: RRef[Any]) -> list[float]:
    return [float(lr) for lr in schedule.local_value().get_last_lr()]


def _state(schedule: RRef[Any]) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(schedule.local_value().state_dict())
    return state


def _load(schedule: RRef[Any], state: dict[str, Any]) -> None:
    schedule.local_value().load_state_dict(copy.deepcopy(state))


class DistributedLRScheduler:
    """Schedules the learning rates of a distributed optimizer, by one local scheduler on each owner.

    Args:
        optimizer: the optimizer whose learning rates are scheduled.
        make: a class of ``torch.optim.lr_scheduler``, or a function that takes a local optimizer and returns
            a scheduler (for chained ones).
        args, kwargs: the further arguments of ``make``.

    Raises:
        Exception: the error of ``make`` on an owner.

    Example:
        >>> weight = rpc.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
        >>> schedule = DistributedLRScheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=10)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.rpc_sync().exp().sum()])
        ...     optimizer.step(context_id)
        >>> schedule.step()
    """

    def __init__(
        self, optimizer: DistributedOptimizer, make: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(optimizer, DistributedOptimizer):
            raise ArgumentTypeError(f"optimizer must be a DistributedOptimizer, not {optimizer!r}")
        check_callable(make, "make")
        self._optimizer, self._how = optimizer, (make, args, kwargs)
        locals_ = optimizer.local_optimizers
        made = call_owners(_make, {owner: (local, *self._how) for owner, local in locals_.items()})
        self._schedules: dict[str, RRef[Any]] = made

    def _of_all_owners(self) -> dict[str, RRef[Any]]:
        """Return the schedulers. Owners that the optimizer has got since get theirs now."""
        owners = self._optimizer.local_optimizers
        further = {owner: local for owner, local in owners.items() if owner not in self._schedules}
        if further:
            (state,) = call_owners(_state, {o: (s,) for o, s in list(self._schedules.items())[:1]}).values()
            self._schedules |= call_owners(
                _follow, {owner: (local, self._how, state) for owner, local in further.items()}
            )
        return self._schedules

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedulers on all owners. Call it after the step of the optimizer.

        Args:
            args, kwargs: the arguments of the scheduler's ``step``, such as the metric of
                ``ReduceLROnPlateau``.
        """
        call_owners(
            _step, {owner: (schedule, args, kwargs) for owner, schedule in self._of_all_owners().items()}
        )

    def get_last_lr(self) -> dict[str, list[float]]:
        """Return the learning rates of the parameter groups, by owner."""
        return call_owners(
            _last_lr, {owner: (schedule,) for owner, schedule in self._of_all_owners().items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of the schedulers, by owner."""
        return call_owners(_state, {owner: (schedule,) for owner, schedule in self._of_all_owners().items()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        Args:
            state: from :meth:`state_dict` of a scheduler of the same optimizer.

        Raises:
            ConfigurationError: if the owners differ.
            Exception: the error of torch's ``load_state_dict`` on an owner.
        """
        schedules = self._of_all_owners()
        check_owners(state, schedules)
        call_owners(_load, {owner: (schedule, state[owner]) for owner, schedule in schedules.items()})
