"""DistributedOptimizer: one local optimizer on each worker that owns parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from zmqgrad.autograd.api import get_context
from zmqgrad.errors import ConfigurationError
from zmqgrad.optim.groups import ParamGroup, RemoteParameters
from zmqgrad.optim.local import Group, LocalOptimizer, Sharing, make
from zmqgrad.optim.owners import as_list, call_method, call_owners, check_owners, group_by_owner
from zmqgrad.rpc import RRef
from zmqgrad.runtime.arguments import as_integer, check_callable


@dataclass(frozen=True)
class StepResult:
    """What a step of an optimizer with ``versions=True`` did.

    Example:
        >>> weight = rpc.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5, versions=True)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.rpc_sync().exp().sum()])
        ...     result = optimizer.step(context_id)
        >>> result.staleness, result.applied  # no other trainer has stepped, so this step was taken
        (0, True)
    """

    staleness: int
    """How many steps of others had changed a parameter since the context read it, or since its own last
    step; the maximum over the owners."""
    applied: bool
    """Whether all owners took the step: not if the gradients were older than ``max_staleness`` allows."""
    owners: Mapping[str, tuple[int, bool]]
    """The same by owner."""
    loss: Any = None
    """What the closure returned."""


class DistributedOptimizer:
    """Optimizes remote parameters, on the workers that own them.

    Args:
        optimizer_class: a class of ``torch.optim``, or a similar one, whose ``step`` needs no closure.
        params_rref: references to the parameters, or parameter groups as for torch's optimizers:
            dictionaries with ``params`` and options.
        args, kwargs: the further arguments of ``optimizer_class`` on each owner, such as the learning rate.
        versions: whether other trainers may step the same parameters while a context uses them. A step gives
            a parameter new memory if a context may have seen or saved the old, so every gradient is exact for
            the values that its forward pass has seen. All optimizers of these parameters must set it.
        max_staleness: steps with gradients that did not see more than this many steps of others are not taken
            (:attr:`StepResult.applied`). None: no limit. Needs ``versions``.

    Raises:
        ConfigurationError: if there are no parameters, an item is not a reference, ``step`` needs a
            closure, or ``max_staleness`` is negative or without ``versions``.
        Exception: the error of the constructor on an owner.

    Example:
        >>> weight = rpc.remote("worker1", torch.ones, args=(2,), kwargs={"requires_grad": True})
        >>> optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.5)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [weight.rpc_sync().exp().sum()])
        ...     optimizer.step(context_id)
        >>> weight.rpc_sync().detach()
        tensor([-0.3591, -0.3591])
    """

    def __init__(
        self,
        optimizer_class: type,
        params_rref: Sequence[RRef[Any]] | Sequence[Mapping[str, Any]],
        *args: Any,
        versions: bool = False,
        max_staleness: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_callable(optimizer_class, "optimizer_class")
        if max_staleness is not None and not (versions and as_integer(max_staleness, "max_staleness") >= 0):
            raise ConfigurationError("max_staleness must be at least 0, and needs versions=True")
        groups = _groups_by_owner(params_rref)
        self._how = (args, kwargs, Sharing(versions, max_staleness))
        self._class = optimizer_class
        made = call_owners(
            make, {owner: (optimizer_class, mine, *self._how) for owner, mine in groups.items()}
        )
        self._locals: dict[str, RRef[LocalOptimizer]] = made

    @property
    def local_optimizers(self) -> dict[str, RRef[LocalOptimizer]]:
        """References to the optimizers, by the names of their owners."""
        return dict(self._locals)

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the optimizers, as in torch's class: their values have an attribute ``optim``."""
        return list(self._locals.values())

    def step(self, context_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on all owners in parallel, with the gradients of a context.

        Args:
            context_id: the id of the distributed autograd context.
            closure: computes the loss, runs ``backward`` in the context and returns the loss; called once,
                here, before the step.

        Returns:
            A :class:`StepResult` if the optimizer was made with ``versions=True``; otherwise what ``closure``
            returned, as in torch.

        Raises:
            AutogradError: if the context is not known here, for example because its block has been left.
            Exception: the error of the step on an owner, with the owner's name. The other owners complete
                their steps. If several steps failed, the cause of the exception lists the others.
        """
        if closure is not None:
            check_callable(closure, "closure")
        get_context(context_id)  # an owner may learn later that it has been released
        loss = None if closure is None else closure()
        owners = call_method(self._locals, "step", context_id)
        if not self._how[-1].versions:
            return loss
        staleness = max(staleness for staleness, _ in owners.values())
        return StepResult(staleness, all(applied for _, applied in owners.values()), owners, loss)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add a parameter group, whose parameters may be owned by further workers.

        Args:
            group: a dictionary with ``params``, references, and options.

        Raises:
            ConfigurationError: if an item is not a reference, or there are none.
            Exception: the error of an owner, such as that of a parameter that is in another group. Then the
                group is on no owner.
        """
        added = _groups_by_owner([group])
        former = next(iter(call_method(dict([next(iter(self._locals.items()))]), "options").values()))
        empty = [{**options, "params": []} for options in former]
        options = {k: v for k, v in group.items() if k != "params"}
        further = {owner: mine for owner, mine in added.items() if owner not in self._locals}
        try:
            call_owners(
                _add,
                {
                    owner: (local, *added.get(owner, [{**options, "params": []}]))
                    for owner, local in self._locals.items()
                },
            )
            made = call_owners(
                make, {owner: (self._class, [*empty, *mine], *self._how) for owner, mine in further.items()}
            )
        except BaseException:
            with suppress(Exception):  # an owner may be lost, which is why
                call_method(self._locals, "keep_groups", len(former))
            raise
        self._locals |= made

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The options of all groups, as the first owner has them. Setting one sets it on all owners.

        ``params`` of the first group holds one tensor that stands for all parameters, so that
        ``torch.amp.GradScaler`` works inside ``with context()``: ``scaler.step(optimizer, context_id)``.
        """
        (options,) = call_method(dict([next(iter(self._locals.items()))]), "options").values()
        remote = RemoteParameters.of(partial(call_method, self._locals, "unscale"))
        return [
            ParamGroup(
                {"params": [] if n else [remote], **group},
                partial(call_method, self._locals, "set_option", n),
            )
            for n, group in enumerate(options)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of all optimizers, by the names of their owners."""
        return call_method(self._locals, "state")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: from :meth:`state_dict` of an optimizer with the same parameters on each owner.

        Raises:
            ConfigurationError: if the owners differ.
            Exception: the error of torch's ``load_state_dict`` on an owner.
        """
        check_owners(state, self._locals)
        call_owners(_load, {owner: (local, state[owner]) for owner, local in self._locals.items()})

    def __repr__(self) -> str:
        return f"<DistributedOptimizer on {', '.join(self._locals)}>"


def _load(local: RRef[LocalOptimizer], state: dict[str, Any]) -> None:
    local.local_value().load(state)


def _add(local: RRef[LocalOptimizer], group: Group) -> None:
    local.local_value().add_param_group(group)


def _groups_by_owner(params_rref: Any) -> dict[str, list[Group]]:
    """Split the parameter groups by owner. Each owner gets all groups, some empty: indices must agree."""
    given = as_list(params_rref)
    if not given:
        raise ConfigurationError("optimizer got an empty parameter list")
    if not isinstance(given[0], Mapping):
        return {owner: [{"params": params}] for owner, params in group_by_owner(given).items()}
    split: list[tuple[dict[str, list[RRef[Any]]], Group]] = []
    for i, group in enumerate(given):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigurationError(f"params_rref[{i}] must be a dictionary with 'params', not {group!r}")
        params = group["params"]
        found = group_by_owner(
            [params] if isinstance(params, RRef) else params, f"params_rref[{i}]['params']"
        )
        split.append((found, {k: v for k, v in group.items() if k != "params"}))
    owners = list(dict.fromkeys(owner for found, _ in split for owner in found))
    if not owners:
        raise ConfigurationError("optimizer got an empty parameter list")
    return {
        owner: [{**options, "params": found.get(owner, [])} for found, options in split] for owner in owners
    }
