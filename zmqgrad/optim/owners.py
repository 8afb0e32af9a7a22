"""The same thing on every worker that owns some parameters, in parallel; and what went wrong anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    waits: dict[str, Callable[[], Any]] = {
        owner: rpc_async(owner, function, tuple(given)).wait for owner, given in args.items() if owner != own
    }
    if own in args:
        waits[own] = lambda: function(*args[own])
    return _wait_for_all(waits, own, list(args))


def on_each(values: Mapping[str, RRef[Any]], method: str, *args: Any) -> dict[str, Any]:
    """``value.method(*args)`` for each of ``values``, by the names of their owners; otherwise as `on_all`.

    The reference need not travel, which takes less than calling a function with it.
    """
    own = get_worker_info().name
    waits: dict[str, Callable[[], Any]] = {
        owner: getattr(value.rpc_async(), method)(*args).wait
        for owner, value in values.items()
        if owner != own
    }
    if own in values:
        waits[own] = lambda: getattr(values[own].local_value(), method)(*args)
    return _wait_for_all(waits, own, list(values))


def _wait_for_all(waits: Mapping[str, Callable[[], Any]], own: str, owners: Sequence[str]) -> dict[str, Any]:
    """What ``waits`` give, by owner, in the order of ``owners``."""
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for owner in sorted(waits, key=lambda owner: owner != own):  # ours first: it waits for nobody
        try:
            results[owner] = waits[owner]()
        except Exception as e:
            errors[owner] = e
    if errors:
        _raise({owner: errors[owner] for owner in owners if owner in errors})
    return {owner: results[owner] for owner in owners}


def _raise(errors: dict[str, Exception]) -> None:
    (_, first), *others = errors.items()
    if not others:
        raise first
    said = "\n".join(f"on {owner}: {type(e).__name__}: {e}" for owner, e in others)
    raise first from RpcError(f"it failed on {len(errors)} owners, also:\n{said}")


def local_values(params: Iterable[RRef[Any]]) -> list[torch.Tensor]:
    """On the owner: the parameters themselves."""
    return [param.local_value() for param in params]
