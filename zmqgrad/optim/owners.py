"""The same thing on every worker that owns some parameters, in parallel; and what went wrong anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zmqgrad.errors import ConfigurationError, RpcError
from zmqgrad.rpc import RRef, get_worker_info, rpc_async


def several(params_rref: Iterable[Any], name: str = "params_rref") -> list[Any]:
    """References, or groups of them, as a list.

    Raises:
        ConfigurationError: if it is one reference by itself.
    """
    if isinstance(params_rref, RRef):
        raise ConfigurationError(f"{name} must be a list of RRefs, not an RRef: put it into a list")
    return list(params_rref)


def by_owner(params_rref: Iterable[RRef[Any]], name: str = "params_rref") -> dict[str, list[RRef[Any]]]:
    """The references by the name of the worker that owns what they refer to.

    Raises:
        ConfigurationError: if what is given are no references.
    """
    found: dict[str, list[RRef[Any]]] = {}
    for i, param in enumerate(several(params_rref, name)):
        if not isinstance(param, RRef):
            raise ConfigurationError(f"{name}[{i}] must be an RRef, not {type(param).__name__}")
        found.setdefault(param.owner_name(), []).append(param)
    return found


def on_all(function: Callable[..., Any], args: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """``function(*args[owner])`` on each owner, and what they give. Waits for all, even if one fails.

    What this worker owns it sees to itself, while the others are at work.

    Raises:
        what it raised on the first owner that failed; its cause tells of the others, if there are more.
    """
    own = get_worker_info().name
    return _at_once(
        {
            owner: partial(function, *given)
            if owner == own
            else partial(rpc_async, owner, function, tuple(given))
            for owner, given in args.items()
        },
        own,
    )


def on_each(values: Mapping[str, RRef[Any]], method: str, *args: Any) -> dict[str, Any]:
    """``value.method(*args)`` for each of ``values``, by the names of their owners; otherwise as `on_all`.

    The reference need not travel, which takes less than calling a function with it.
    """
    own = get_worker_info().name
    return _at_once(
        {
            owner: partial(_call_here if owner == own else _call_there, value, method, *args)
            for owner, value in values.items()
        },
        own,
    )


def _call_here(value: RRef[Any], method: str, *args: Any) -> Any:
    return getattr(value.local_value(), method)(*args)


def _call_there(value: RRef[Any], method: str, *args: Any) -> Any:
    return getattr(value.rpc_async(), method)(*args)


def _at_once(begin: Mapping[str, Callable[[], Any]], own: str) -> dict[str, Any]:
    """What ``begin`` gives, by owner: futures to wait for, but for ``own``, which is begun last."""
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    begun: dict[str, Callable[[], Any]] = {}
    for owner in sorted(begin, key=lambda owner: owner == own):
        try:
            if owner == own:
                results[owner] = begin[owner]()
            else:
                begun[owner] = begin[owner]().wait
        except Exception as e:  # of those that are gone it may be known before anything is sent
            errors[owner] = e
    for owner, wait in begun.items():
        try:
            results[owner] = wait()
        except Exception as e:
            errors[owner] = e
    if errors:
        _raise({owner: errors[owner] for owner in begin if owner in errors})
    return {owner: results[owner] for owner in begin}


def _raise(errors: dict[str, Exception]) -> None:
    (_, first), *others = errors.items()
    if not others:
        raise first
    said = "\n".join(f"on {owner}: {type(e).__name__}: {e}" for owner, e in others)
    raise first from RpcError(f"it failed on {len(errors)} owners, also:\n{said}")


def local_values(params: Iterable[RRef[Any]]) -> list[torch.Tensor]:
    """On the owner: the parameters themselves."""
    return [param.local_value() for param in params]
