"""DistributedLRScheduler: one of torch's learning-rate schedules, for every owner of an optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from zmqgrad.optim.optimizer import DistributedOptimizer, LocalOptimizer
from zmqgrad.optim.owners import on_all
from zmqgrad.rpc import RRef


def _make(local: RRef[LocalOptimizer], make: Callable[..., Any], args: Any, kwargs: Any) -> RRef[Any]:
    return RRef(make(local.local_value().optimizer, *args, **kwargs))


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
    """A schedule on each owner of the parameters of ``optimizer``.

    Args:
        optimizer: whose learning rates it sets.
        make: a class of ``torch.optim.lr_scheduler``, or any function of a local optimizer that gives a
            schedule (for chained ones).
        args, kwargs: for ``make``, after the optimizer.

    Raises:
        what making a schedule raised, on any owner.
    """

    def __init__(
        self, optimizer: DistributedOptimizer, make: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        locals_ = optimizer.local_optimizers
        made = on_all(_make, {owner: (local, make, args, kwargs) for owner, local in locals_.items()})
        self._schedules: dict[str, RRef[Any]] = made

    def step(self, *args: Any, **kwargs: Any) -> None:
        """The next step of the schedule on all owners; call it after the optimizer's.

        Arguments are the schedule's, such as the metric of ``ReduceLROnPlateau``.
        """
        on_all(_step, {owner: (schedule, args, kwargs) for owner, schedule in self._schedules.items()})

    def get_last_lr(self) -> dict[str, list[float]]:
        """Owner to the learning rates of its groups."""
        return on_all(_last_lr, {owner: (schedule,) for owner, schedule in self._schedules.items()})

    def state_dict(self) -> dict[str, Any]:
        """Owner to the state of its schedule."""
        return on_all(_state, {owner: (schedule,) for owner, schedule in self._schedules.items()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        on_all(_load, {owner: (schedule, state[owner]) for owner, schedule in self._schedules.items()})
