"""The part of a distributed optimizer that runs on an owner of parameters."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zmqgrad.autograd.api import get_context, gradients_of
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.autograd.versions import ParameterVersions, SharedParameter
from zmqgrad.errors import ConfigurationError
from zmqgrad.optim import torch_internals
from zmqgrad.optim.owners import local_values
from zmqgrad.rpc import RRef
from zmqgrad.rpc.current import current_worker
from zmqgrad.runtime.blocking import holding

Group = dict[str, Any]
"""A parameter group: ``params``, and options for them."""

_stepping = threading.RLock()
"""Held by what changes an optimizer or copies its state: several of this process may share parameters, and
several trainers an optimizer. A hook of a step may ask for the state."""


class Sharing(NamedTuple):
    """How an optimizer treats parameters that other trainers step, too."""

    versions: bool = False
    max_staleness: int | None = None


class LocalOptimizer:
    """The local optimizer of one owner, and the parameters that it optimizes.

    The optimizer steps on aliases of the parameters, which share their memory: ``.grad`` of an alias is the
    gradient of a context, while that of the parameter belongs to the program, which may train it locally.
    """

    def __init__(
        self, optimizer_class: type, groups: Sequence[Group], args: Any, kwargs: Any, sharing: Sharing
    ) -> None:
        self._sharing = sharing
        self._versions: ParameterVersions | None = None
        if sharing.versions:
            self._versions = autograd_of(current_worker()).versions
        self._params: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the alias, with the alias
        self._aliases: dict[int, torch.Tensor] = {}  # by id of the parameter
        self._empty: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # aliases, with what they hold between steps
        self._shared: dict[int, SharedParameter] = {}  # by id of the alias
        aliased: list[Any] = [self._aliased(group) for group in groups]
        if len(aliased) == 1 and len(aliased[0]) == 1:
            aliased = aliased[0]["params"]  # some optimizers accept no groups
        self.optimizer: torch.optim.Optimizer = torch_internals.construct(
            optimizer_class, aliased, args, kwargs
        )
        _refuse_closures(self.optimizer)
        self._let_go()

    def _aliased(self, group: Group) -> Group:
        """Return ``group`` with aliases instead of references to parameters."""
        aliases = []
        for param in local_values(group["params"]):
            alias = self._aliases.get(id(param))
            if alias is None:
                alias = self._aliases[id(param)] = _alias(param, self._versions is None)
                self._params[id(alias)] = alias, param
                if self._versions is not None and alias is not param:
                    self._shared[id(alias)] = self._versions.share(param)
                    if param.layout is torch.strided:  # others get new memory in each step
                        self._empty.append((alias, param.detach().new_empty(0)))
            aliases.append(alias)
        return {**group, "params": aliases}

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer, by its name in torch's local optimizers."""
        return self.optimizer

    def step(self, context_id: int) -> tuple[int, bool]:
        """Take one step with the gradients of a context; ``.grad`` of the parameters does not change.

        Returns:
            How many steps of others the gradients did not see, and whether the step was taken.
        """
        aliases = [alias for group in self.optimizer.param_groups for alias in group["params"]]
        params = [self._param_of(alias) for alias in aliases]
        gradients = gradients_of(context_id, params)
        with holding(_stepping):
            if self._versions is None:
                self._step(aliases, params, gradients)
                return 0, True
            stepped = [n for n, gradient in enumerate(gradients) if gradient is not None]
            shared = [self._shared[id(aliases[n])] for n in stepped]
            context = get_context(context_id)
            staleness, limit = self._versions.staleness(context, shared), self._sharing.max_staleness
            applied = limit is None or staleness <= limit
            if applied:
                may_wait = not torch_internals.steps_alone(self.optimizer)
                with self._versions.stepping(context, shared, may_wait) as changed:
                    memory = dict(zip(stepped, changed, strict=True))
                    # All of them: Ctrl-C may have kept one from dropping its last gradient.
                    self._step(aliases, [memory.get(n) for n in range(len(aliases))], gradients)
        tracer = current_worker().hooks.tracer
        if tracer is not None:
            tracer.step_taken(context_id, staleness, applied)
        return staleness, applied

    def _step(
        self,
        aliases: Sequence[torch.Tensor],
        memory: Sequence[torch.Tensor | None],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        try:
            for alias, data, gradient in zip(aliases, memory, gradients, strict=True):
                if data is not None:
                    alias.data = data.data  # the program may have given the parameter other memory
                alias.grad = gradient
            torch_internals.step(self.optimizer)
            for alias, data in zip(aliases, memory, strict=True):
                # A sparse one gets other memory when it is changed in place.
                if data is not None and data.layout is torch.sparse_coo:
                    data.data = alias.data
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Drop the gradients, and shared memory, which is not held between steps."""
        for alias, _ in self._params.values():
            alias.grad = None
        for alias, empty in self._empty:
            alias.data = empty

    def _param_of(self, alias: torch.Tensor) -> torch.Tensor:
        found = self._params.get(id(alias))
        if found is None:
            raise ConfigurationError(
                "a parameter was added to a local optimizer: use DistributedOptimizer.add_param_group"
            )
        return found[1]

    def add_param_group(self, group: Group) -> None:
        """Add a group of parameters of this worker, possibly an empty one."""
        with holding(_stepping):
            torch_internals.call(self.optimizer, "add_param_group", self._aliased(group))
            self._let_go()

    def keep_groups(self, count: int) -> None:
        """Remove all groups but the first ``count``: another owner has refused one."""
        with holding(_stepping):
            del self.optimizer.param_groups[count:]
            self._let_go()

    def options(self) -> list[Group]:
        """Return the options of all groups."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def set_option(self, group: int, name: str, value: Any) -> None:
        """Set an option of a group, such as ``lr``."""
        self.optimizer.param_groups[group][name] = value

    def unscale(self, context_id: int, inverse: float) -> bool:
        """Multiply the gradients in a context by ``inverse``. Returns whether any was infinite or nan.

        Raises:
            ValueError: if a gradient has dtype float16, as in torch.
        """
        params = [self._param_of(each) for group in self.optimizer.param_groups for each in group["params"]]
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        context = get_context(context_id)
        for param, gradient in zip(params, gradients_of(context_id, params), strict=True):
            if gradient is None:
                continue
            if gradient.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                context.replace(param, gradient)
                gradient = gradient._values()
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = False
        for (device, _), gradients in by_kind.items():
            flag, factor = (torch.tensor(each, dtype=torch.float32, device=device) for each in (0.0, inverse))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, factor)
            found |= bool(flag.item())
        return found

    def state(self) -> dict[str, Any]:
        """Return a copy of the state dictionary, whose tensors a local caller does not share either."""
        with holding(_stepping):
            return copy.deepcopy(torch_internals.call(self.optimizer, "state_dict"))

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        with holding(_stepping):
            torch_internals.call(self.optimizer, "load_state_dict", copy.deepcopy(state))


def _alias(param: Any, counted: bool) -> Any:
    """Return a leaf with the memory, the kind and the attributes of ``param``.

    Args:
        counted: whether a change of it counts as one of ``param``, as it has the same version counter.
    """
    if not isinstance(param, torch.Tensor) or not param.is_leaf:
        return param  # the optimizer refuses it
    alias = param.detach() if counted else param.data
    if isinstance(param, torch.nn.Parameter):
        alias = torch.nn.Parameter(alias, param.requires_grad)
    alias.requires_grad_(param.requires_grad)
    if (dtype := getattr(param, "grad_dtype", param.dtype)) is not param.dtype:
        alias.grad_dtype = dtype
    vars(alias).update(vars(param))
    return alias


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} cannot be distributed: its step needs a closure that recomputes the "
            "loss, and each owner would call it separately"
        )


def make(
    optimizer_class: type, groups: Sequence[Group], args: Any, kwargs: Any, sharing: Sharing
) -> RRef[Any]:
    """Make a local optimizer. Runs on the owner."""
    return RRef(LocalOptimizer(optimizer_class, groups, args, kwargs, sharing))
