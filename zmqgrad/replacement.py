"""``install``: replaces ``torch.distributed.rpc`` and what belongs to it by this library, in this process.

For programs and libraries whose imports cannot be changed. All that is replaced stands in one table: entries
of ``sys.modules``, attributes of torch's packages and of its C++ modules, and names that torch's own modules
have imported from those. :func:`uninstall` restores it. Modules of torch that take long to import are
replaced when they are imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.futures

import zmqgrad.autograd
import zmqgrad.nn
import zmqgrad.optim
import zmqgrad.rpc
from zmqgrad.errors import RpcError
from zmqgrad.import_hooks import AfterImport
from zmqgrad.rpc.api import _is_current_rpc_agent_set
from zmqgrad.rpc.futures import PythonFuture

_RPC_SUBMODULES = (
    "api",
    "backend_registry",
    "constants",
    "functions",
    "internal",
    "options",
    "rref_proxy",
    "server_process_global_profiler",
)

_CLASSES: Mapping[str, Mapping[str, Any]] = {
    "torch.distributed.optim.optimizer": {"DistributedOptimizer": zmqgrad.optim.DistributedOptimizer},
    "torch.distributed.optim": {"DistributedOptimizer": zmqgrad.optim.DistributedOptimizer},
    "torch.distributed.nn.api.remote_module": {
        "RemoteModule": zmqgrad.nn.RemoteModule,
        "_RemoteModule": zmqgrad.nn.RemoteModule,
    },
    "torch.distributed.nn": {"RemoteModule": zmqgrad.nn.RemoteModule},
}
"""Classes in modules of torch that stay torch's otherwise."""

_GENERATED_BY_TORCH = "_remote_module_"
"""Prefix of the modules that ``torch.distributed.nn`` generates."""

_DEFINED_BY_TORCH = ("torch.distributed.", "torch._C._distributed_")

_lock = threading.Lock()  # guards _installed
_installed: _Replacement | None = None


def install() -> None:
    """Replace ``torch.distributed.rpc`` by this library in this process.

    From then on ``torch.distributed.rpc``, ``torch.distributed.autograd``,
    ``torch.distributed.optim.DistributedOptimizer`` and ``torch.distributed.nn.RemoteModule`` are those of
    this library, wherever they are imported from, and so are ``PyRRef`` and ``WorkerInfo`` of
    ``torch._C._distributed_rpc``. Call it before the modules that use them are imported: what a module has
    imported by name stays torch's, and a warning names such modules. Has no effect if it has been called.

    A forked child inherits the replacement. A spawned one calls ``install`` itself, at the top level of its
    main module; ``zmqgrad run --replace-torch-rpc`` arranges that for all processes of a program.

    Raises:
        RpcError: if torch's own RPC is initialized, here or in the process that this one was forked from.

    Example:
        >>> zmqgrad.install()
        >>> import torch.distributed.rpc  # in a library, for example
        >>> torch.distributed.rpc.rpc_sync is zmqgrad.rpc.rpc_sync
        True
        >>> zmqgrad.uninstall()
    """
    global _installed
    with _lock:
        if _installed is not None:
            return

        if _is_torch_rpc_running():
            raise RpcError(
                "torch's own RPC is initialized already, in this process or in the one that it was forked "
                "from: call zmqgrad.install() before torch.distributed.rpc.init_rpc, or call "
                "torch.distributed.rpc.shutdown() first"
            )
        _installed = _Replacement()
        outside = _installed.apply()
    if outside:
        names = "; ".join(f"{module} ({', '.join(sorted(found))})" for module, found in outside.items())
        warnings.warn(
            f"imported from torch's RPC before zmqgrad.install(), and still torch's: {names}. Call install() "
            f"before these modules are imported",
            RuntimeWarning,
            stacklevel=2,
        )


def uninstall() -> None:
    """Restore what :func:`install` has replaced. Has no effect if nothing is replaced.

    Modules outside torch that were imported in between keep the names that they have imported.

    Raises:
        RpcError: while RPC is initialized.

    Example:
        >>> zmqgrad.install()
        >>> zmqgrad.uninstall()
        >>> torch.distributed.rpc is zmqgrad.rpc
        False
    """
    global _installed
    with _lock:
        if _installed is None:
            return
        if _is_current_rpc_agent_set():
            raise RpcError("RPC is initialized: call shutdown() before zmqgrad.uninstall()")
        _installed.undo()
        _installed = None


def _is_torch_rpc_running() -> bool:
    module = getattr(torch._C, "_distributed_rpc", None)
    return module is not None and module._is_current_rpc_agent_set()


class _Pair(NamedTuple):
    """An object of torch, the name under which torch's modules have it, and what replaces it."""

    name: str
    theirs: Any
    ours: Any


class _Replacement:
    """All that ``install`` replaces. ``_undo`` restores it when called in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._modules = dict(_module_pairs())
        self._pairs = [
            *(
                _Pair(name.rpartition(".")[2], sys.modules[name], ours)
                for name, ours in self._modules.items()
            ),
            *(pair for name, ours in self._modules.items() for pair in _pairs(sys.modules[name], ours)),
        ]

    def apply(self) -> dict[str, set[str]]:
        """Replace everything. Returns the modules outside torch that have names of torch's, with these."""
        outside = self._rebind({id(pair.theirs): pair.ours for pair in reversed(self._pairs)})
        for name, ours in self._modules.items():
            theirs = sys.modules[name]  # a program that imported it before install() still has it
            for pair in list(_pairs(theirs, ours)):
                self._set_attribute(theirs, pair.name, pair.ours)
            self._set_module(name, ours)
        for name in ("rpc", "autograd"):
            self._set_attribute(torch.distributed, name, self._modules[f"torch.distributed.{name}"])
        for name in _RPC_SUBMODULES:  # torch's, where this library has no module of that name
            full_name = f"torch.distributed.rpc.{name}"
            if full_name not in self._modules and full_name in sys.modules:
                self._set_attribute(zmqgrad.rpc, name, sys.modules[full_name])
        for name in _CLASSES:
            self._replace_classes(name, outside)
        self._set_attribute(torch.futures, "wait_all", _wait_all_until_failure(torch.futures.wait_all))
        return outside

    def undo(self) -> None:
        """Restore everything, and the names that torch's modules have imported since."""
        while self._undo:
            self._undo.pop()()
        by_name = {(id(pair.ours), pair.name): pair.theirs for pair in reversed(self._pairs)}
        by_object = {id(pair.ours): pair.theirs for pair in reversed(self._pairs)}
        for module in _modules_of_torch():
            for name, value in list(vars(module).items()):
                if id(value) in by_object:
                    setattr(module, name, by_name.get((id(value), name), by_object[id(value)]))

    def _rebind(self, ours: Mapping[int, Any]) -> dict[str, set[str]]:
        """Replace what torch's modules have imported. Returns what others have: names by module."""
        outside: dict[str, set[str]] = {}
        done = {id(sys.modules[name]) for name in self._modules}
        for module_name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or id(module) in done or _is_within(module_name, "zmqgrad"):
                continue
            done.add(id(module))
            for name, value in list(vars(module).items()):
                if id(value) not in ours:
                    continue
                if _is_of_torch(module_name):
                    self._set_attribute(module, name, ours[id(value)])
                elif not isinstance(value, ModuleType):  # the module itself has our names from now on
                    outside.setdefault(module_name, set()).add(name)
        return outside

    def _replace_classes(self, module_name: str, outside: dict[str, set[str]]) -> None:
        if module_name in sys.modules:  # perhaps only in part: a thread that imports it is waited for
            self._replace_classes_in(importlib.import_module(module_name), outside)
            return
        hook = AfterImport(
            module_name.__eq__, lambda: self._replace_classes_in(sys.modules[module_name], outside)
        )
        hook.install()
        self._undo.append(hook.remove)

    def _replace_classes_in(self, module: ModuleType, outside: dict[str, set[str]]) -> None:
        for name, ours in _CLASSES[module.__name__].items():
            theirs = getattr(module, name, None)
            if theirs is None or theirs is ours:
                continue
            self._pairs.append(_Pair(name, theirs, ours))
            for found, names in self._rebind({id(theirs): ours}).items():
                outside.setdefault(found, set()).update(names)

    def _set_module(self, name: str, module: ModuleType) -> None:
        before = sys.modules[name]
        self._undo.append(lambda: sys.modules.__setitem__(name, before))
        sys.modules[name] = module

    def _set_attribute(self, owner: ModuleType, name: str, value: Any) -> None:
        if name in vars(owner):
            before = vars(owner)[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)


def _wait_all_until_failure(theirs: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Return a ``torch.futures.wait_all`` that ends with the first failure, as torch's does for its own RPC.

    C++ does not see that a future of this library has failed.
    """

    @functools.wraps(theirs)
    def wait_all(futures: list[Any]) -> list[Any]:
        has_ours = isinstance(futures, list) and any(isinstance(future, PythonFuture) for future in futures)
        return zmqgrad.rpc.wait_all(futures) if has_ours else theirs(futures)

    return wait_all


def _module_pairs() -> Iterator[tuple[str, ModuleType]]:
    """Names of torch's modules, and ours for each."""
    yield "torch.distributed.rpc", zmqgrad.rpc
    for name in _RPC_SUBMODULES:
        if f"torch.distributed.rpc.{name}" in sys.modules and importlib.util.find_spec(f"zmqgrad.rpc.{name}"):
            yield f"torch.distributed.rpc.{name}", importlib.import_module(f"zmqgrad.rpc.{name}")
    yield "torch.distributed.autograd", zmqgrad.autograd


def _pairs(theirs: ModuleType, ours: ModuleType) -> Iterator[_Pair]:
    """The classes and functions that torch's RPC defines and both modules have."""
    for name, value in vars(theirs).items():
        defined_in = getattr(value, "__module__", None)
        if (
            callable(value)
            and isinstance(defined_in, str)
            and defined_in.startswith(_DEFINED_BY_TORCH)
            and hasattr(ours, name)
        ):
            yield _Pair(name, value, getattr(ours, name))


def _is_within(module_name: str, package: str) -> bool:
    return module_name == package or module_name.startswith(f"{package}.")


def _modules_of_torch() -> list[ModuleType]:
    return [m for n, m in list(sys.modules.items()) if isinstance(m, ModuleType) and _is_of_torch(n)]


def _is_of_torch(module_name: str) -> bool:
    return _is_within(module_name, "torch") or module_name.startswith(_GENERATED_BY_TORCH)
