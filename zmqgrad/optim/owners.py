"""The same thing on every worker that owns some parameters, in parallel; and what went wrong anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zmqgrad.errors import ConfigurationError, RpcError
from zmqgrad.rpc import RRef, rpc_async


def by_owner(params_rref: Iterable[RRef[Any]], name: str = "params_rref") -> dict[str, list[RRef[Any]]]:
    """The references by the name of the worker that owns what they refer to.

    Raises:
        ConfigurationError: if there are none, or what is given are no references.
    """
    found: dict[str, list[RRef[Any]]] = {}
    for i, param in enumerate(params_rref):
        if not isinstance(param, RRef):
            raise ConfigurationError(f"{name}[{i}] must be an RRef, not {type(param).__name__}")
        found.setdefault(param.owner_name(), []).append(param)
    return found


def on_all(function: Callable[..., Any], args: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """``function(*args[owner])`` on each owner, and what they give. Waits for all, even if one fails.

    Raises:
        what it raised on the first owner that failed; its cause tells of the others, if there are more.
    """
    futures = {owner: rpc_async(owner, function, tuple(given)) for owner, given in args.items()}
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for owner, future in futures.items():
        try:
            results[owner] = future.wait()
        except Exception as e:
            errors[owner] = e
    if errors:
        _raise(errors)
    return results


def _raise(errors: dict[str, Exception]) -> None:
    (_, first), *others = errors.items()
    if not others:
        raise first
    said = "\n".join(f"on {owner}: {type(e).__name__}: {e}" for owner, e in others)
    raise first from RpcError(f"it failed on {len(errors)} owners, also:\n{said}")


def local_values(params: Iterable[RRef[Any]]) -> list[torch.Tensor]:
    """On the owner: the parameters themselves."""
    return [param.local_value() for param in params]
