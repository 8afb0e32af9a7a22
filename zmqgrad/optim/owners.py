"""Parallel calls to all workers that own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zmqgrad.errors import ConfigurationError, RpcError
from zmqgrad.rpc import RRef, get_worker_info, rpc_async
from zmqgrad.runtime import arguments


def as_list(params_rref: Iterable[Any], name: str = "params_rref") -> list[Any]:
    """Return references, or groups of them, as a list.

    Raises:
        ConfigurationError: if ``params_rref`` is a single reference.
        ArgumentTypeError: if it is no list.
    """
    if isinstance(params_rref, RRef):
        raise ConfigurationError(f"{name} must be a list of RRefs, not an RRef: put it into a list")
    return arguments.as_list(params_rref, f"{name} must be a list of RRefs")


def group_by_owner(params_rref: Iterable[RRef[Any]], name: str = "params_rref") -> dict[str, list[RRef[Any]]]:
    """Group references by the names of their owners.

    Raises:
        ConfigurationError: if an item is not an ``RRef``.
    """
    found: dict[str, list[RRef[Any]]] = {}
    for i, param in enumerate(as_list(params_rref, name)):
        if not isinstance(param, RRef):
            raise ConfigurationError(f"{name}[{i}] must be an RRef, not {type(param).__name__}")
        found.setdefault(param.owner_name(), []).append(param)
    return found


def check_owners(state: Mapping[str, Any], owners: Mapping[str, Any]) -> None:
    """Check that ``state``, which is by owner, is one of ``owners``.

    Raises:
        ConfigurationError: if it has other owners.
    """
    if not isinstance(state, Mapping) or set(state) != set(owners):
        found = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise ConfigurationError(
            f"the state belongs to {found or 'no worker'}, but the parameters are owned by "
            f"{', '.join(sorted(owners))}"
        )


def call_owners(function: Callable[..., Any], args: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Run ``function(*args[owner])`` on each owner, and wait for all, even if one fails.

    If this worker is an owner, it runs the function itself while the other owners run it.

    Returns:
        The results, by owner.

    Raises:
        Exception: the error of the first owner that failed. If several failed, the cause of the exception
            lists the others.
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


def call_method(values: Mapping[str, RRef[Any]], method: str, *args: Any) -> dict[str, Any]:
    """Run ``value.method(*args)`` for each of ``values``, by owner; otherwise as :func:`call_owners`.

    Cheaper than a function with the reference as an argument.
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
    """Call all functions of ``begin``, that of ``own`` last; wait for the futures of the others."""
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    begun: dict[str, Callable[[], Any]] = {}
    for owner in sorted(begin, key=lambda owner: owner == own):
        try:
            if owner == own:
                results[owner] = begin[owner]()
            else:
                begun[owner] = begin[owner]().wait
        except Exception as e:  # an owner may be known to be dead before anything is sent
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
    details = "\n".join(f"on {owner}: {type(e).__name__}: {e}" for owner, e in others)
    raise first from RpcError(f"it failed on {len(errors)} owners, also:\n{details}")


def local_values(params: Iterable[RRef[Any]]) -> list[torch.Tensor]:
    """Return the parameters of references that this worker owns."""
    return [param.local_value() for param in params]
