"""DistributedOptimizer: one local optimizer on each worker that owns parameters."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zmqgrad.autograd.api import gradients_of
from zmqgrad.errors import ConfigurationError
from zmqgrad.optim import torch_internals
from zmqgrad.optim.owners import as_list, call_method, call_owners, group_by_owner, local_values
from zmqgrad.rpc import RRef
from zmqgrad.runtime.blocking import blocking_section

Group = dict[str, Any]
"""A parameter group: ``params``, and options for them."""


_stepping = threading.Lock()  # several optimizers of this process may share parameters


class LocalOptimizer:
    """The local optimizer of one owner, and the parameters that it optimizes.

    The optimizer steps on aliases of the parameters, which share their memory: ``.grad`` of an alias is the
    gradient of a context, while that of the parameter belongs to the program, which may train it locally.
    """

    def __init__(self, optimizer_class: type, groups: Sequence[Group], args: Any, kwargs: Any) -> None:
        self._params: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the alias, with the alias
        self._aliases: dict[int, torch.Tensor] = {}  # by id of the parameter
        aliased: list[Any] = [{**group, "params": self._aliases_of(group["params"])} for group in groups]
        if len(aliased) == 1 and len(aliased[0]) == 1:
            aliased = aliased[0]["params"]  # some optimizers accept no groups
        self.optimizer: torch.optim.Optimizer = torch_internals.construct(
            optimizer_class, aliased, args, kwargs
        )
        _refuse_closures(self.optimizer)

    def _aliases_of(self, references: Sequence[RRef[Any]]) -> list[Any]:
        aliases = []
        for param in local_values(references):
            alias = self._aliases.setdefault(id(param), _alias(param))
            self._params[id(alias)] = alias, param
            aliases.append(alias)
        return aliases

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer, by its name in torch's local optimizers."""
        return self.optimizer

    def step(self, context_id: int) -> None:
        """Take one step with the gradients of a context; ``.grad`` of the parameters does not change."""
        aliases = [alias for group in self.optimizer.param_groups for alias in group["params"]]
        params = [self._param_of(alias) for alias in aliases]
        gradients = gradients_of(context_id, params)
        with _turn():
            try:
                for alias, param, gradient in zip(aliases, params, gradients, strict=True):
                    alias.data = param.data  # the program may have given the parameter other memory
                    alias.grad = gradient
                torch_internals.step(self.optimizer)
            finally:
                for alias in aliases:
                    alias.grad = None

    def _param_of(self, alias: torch.Tensor) -> torch.Tensor:
        found = self._params.get(id(alias))
        if found is None:
            raise ConfigurationError(
                "a parameter was added to a local optimizer: use DistributedOptimizer.add_param_group"
            )
        return found[1]

    def state(self) -> dict[str, Any]:
        """Return a copy of the state dictionary, whose tensors a local caller does not share either."""
        return copy.deepcopy(torch_internals.call(self.optimizer, "state_dict"))


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other step runs in this process."""
    if not _stepping.acquire(blocking=False):
        with blocking_section():
            _stepping.acquire()
    try:
        yield
    finally:
        _stepping.release()


def _alias(param: Any) -> Any:
    """Return a leaf with the memory, the version counter, the kind and the attributes of ``param``."""
    if not isinstance(param, torch.Tensor) or not param.is_leaf:
        return param  # the optimizer refuses it
    alias = param.detach()
    if isinstance(param, torch.nn.Parameter):
        alias = torch.nn.Parameter(alias, param.requires_grad)
    alias.requires_grad_(param.requires_grad)
    vars(alias).update(vars(param))
    return alias


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be distributed: its step needs a closure that recomputes the "
            "loss, and each owner would call it separately"
        )


def _make(optimizer_class: type, groups: Sequence[Group], args: Any, kwargs: Any) -> RRef[Any]:
    return RRef(LocalOptimizer(optimizer_class, groups, args, kwargs))


def _load(local: RRef[LocalOptimizer], state: dict[str, Any]) -> None:
    torch_internals.call(local.local_value().optimizer, "load_state_dict", copy.deepcopy(state))


class DistributedOptimizer:
    """Optimizes parameters on the workers that own them.

    Args:
        optimizer_class: a class of ``torch.optim``, or a similar one, whose ``step`` needs no closure.
        params_rref: references to the parameters, or parameter groups as for torch's optimizers:
            dictionaries with ``params`` and options.
        args, kwargs: the further arguments of ``optimizer_class`` on each owner.

    Raises:
        ConfigurationError: if there are no parameters, an item is not a reference, or ``step`` needs a
            closure.
        Exception: the error of the constructor on an owner.
    """

    def __init__(
        self,
        optimizer_class: type,
        params_rref: Sequence[RRef[Any]] | Sequence[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = _groups_by_owner(params_rref)
        made = call_owners(
            _make, {owner: (optimizer_class, mine, args, kwargs) for owner, mine in groups.items()}
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

    def step(self, context_id: int) -> None:
        """Take one step on all owners in parallel, with the gradients of a context.

        Args:
            context_id: the id of the distributed autograd context.

        Raises:
            Exception: the error of the step on an owner, with the owner's name. The other owners complete
                their steps. If several steps failed, the cause of the exception lists the others.
        """
        call_method(self._locals, "step", context_id)

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
        if set(state) != set(self._locals):
            raise ConfigurationError(
                f"the state belongs to optimizers on {', '.join(sorted(state)) or 'no worker'}, but the "
                f"parameters are owned by {', '.join(sorted(self._locals))}"
            )
        call_owners(_load, {owner: (local, state[owner]) for owner, local in self._locals.items()})

    def __repr__(self) -> str:
        return f"<DistributedOptimizer on {', '.join(self._locals)}>"


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
