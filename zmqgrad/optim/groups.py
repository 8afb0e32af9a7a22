"""Parameter groups of a distributed optimizer, as torch's own tools use them: schedulers by hand, GradScaler.

The parameters and their gradients are on other workers. One tensor in ``params`` stands for all of them, and
its ``grad`` for all gradients in the active context. ``torch.amp.GradScaler`` passes that to one function of
torch, which here runs on the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from zmqgrad.autograd.context import active_context
from zmqgrad.errors import AutogradError

Unscale = Callable[[int, float], dict[str, bool]]
"""(context id, factor) -> whether the gradients of each owner had an infinite or nan element."""


class ParamGroup(dict[str, Any]):
    """A parameter group. Setting an option sets it on all owners."""

    def __init__(self, options: dict[str, Any], set_option: Callable[[str, Any], object]) -> None:
        super().__init__(options)
        self._set_option = set_option

    def __setitem__(self, name: str, value: Any) -> None:
        self._set_option(name, value)
        super().__setitem__(name, value)

    # those of dict would set options here only
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, options: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> ParamGroup:  # type: ignore[override,misc]
        self.update(options)
        return self


class RemoteParameters(torch.Tensor):
    """Stands for the parameters of a distributed optimizer."""

    _unscale: Unscale

    @staticmethod
    def of(unscale: Unscale) -> RemoteParameters:
        """Return a tensor that stands for the parameters whose gradients ``unscale`` scales."""
        made = torch.zeros(()).as_subclass(RemoteParameters)
        made._unscale = unscale
        return made

    @property
    def grad(self) -> RemoteGradients:  # type: ignore[override]
        """Stands for the gradients in the active context.

        Raises:
            AutogradError: if the calling thread is in no context.
        """
        context = active_context()
        if context is None:
            raise AutogradError(
                "the gradients of a distributed optimizer belong to a context: call unscale_ and step of "
                "GradScaler inside 'with context()'"
            )
        made = torch.zeros(()).as_subclass(RemoteGradients)
        made._unscale, made._context_id = self._unscale, context.id
        return made


class RemoteGradients(torch.Tensor):
    """Stands for the gradients of a distributed optimizer in one context."""

    _unscale: Unscale
    _context_id: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch._amp_foreach_non_finite_check_and_unscale_:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        (gradients,), found_inf, inverse = args
        if any(gradients._unscale(gradients._context_id, float(inverse)).values()):
            found_inf.fill_(1.0)
        return None
