"""Constructs and steps the optimizers of ``torch.optim`` without importing ``torch._dynamo``.

Torch decorates methods of its optimizers for ``torch.compile``, and the decorators import the compiler
(``torch._dynamo``: 800 modules, more than a second of CPU time) when a process first calls one. Nothing
compiles an optimizer that an owner steps, so this module calls the functions under the decorators. The
results are the same, bit for bit.

Torch may change its decorators in a release: then the methods are called as usual, and the import comes back.
``tests/test_optim_torch_internals.py`` fails in that case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def construct(optimizer_class: Any, params: Sequence[Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Return ``optimizer_class(params, *args, **kwargs)``."""
    if not _is_torchs_class(optimizer_class):
        return optimizer_class(params, *args, **kwargs)
    optimizer = optimizer_class.__new__(optimizer_class)
    optimizer.add_param_group = MethodType(_undecorated(optimizer_class.add_param_group), optimizer)
    optimizer.__init__(params, *args, **kwargs)
    del optimizer.add_param_group
    return optimizer


def step(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, with the hooks of optimizers."""
    function = type(optimizer).step
    undecorated = _undecorated(function)
    if undecorated is function or "step" in vars(optimizer):  # schedulers replace it in the instance
        optimizer.step()
    else:
        _hooked(undecorated)(optimizer)


def call(optimizer: Optimizer, method: str, *args: Any) -> Any:
    """Call a method other than ``step``."""
    return _undecorated(getattr(type(optimizer), method))(optimizer, *args)


def steps_alone(optimizer: Optimizer) -> bool:
    """Whether :func:`step` runs nothing but torch's own code: no other class, and no hooks."""
    own = vars(optimizer).get("step")
    return (
        _is_torchs_class(type(optimizer))
        and (own is None or _is_torchs(getattr(own, "__func__", own)))
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    )


@functools.cache
def _hooked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``step`` that sets the grad mode and runs the hooks, as torch's decorators do."""

    def eager(optimizer: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):
            return function(optimizer)

    return Optimizer.profile_hook_step(eager)


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under torch's decorators, or ``function`` if any of them is not torch's."""
    *_, innermost = chain = list(_decorators(function))
    return innermost if all(map(_is_torchs, chain)) else function


def _decorators(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_torchs_class(optimizer_class: Any) -> bool:
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        return False
    return f"{optimizer_class.__module__}.".startswith("torch.optim.")


def _is_torchs(function: Any) -> bool:
    # __module__ is copied by functools.wraps; the globals show where the code comes from
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.startswith("torch.")
