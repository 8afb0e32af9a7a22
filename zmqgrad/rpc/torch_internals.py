"""All that this layer uses of torch's private API; ``tests/rpc/test_torch_internals.py`` checks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed.rpc  # makes torch._C._distributed_rpc
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import EventList

from zmqgrad.errors import ConfigurationError
from zmqgrad.import_hooks import AfterImport

F = TypeVar("F", bound=Callable[..., Any])

CppFuture = torch._C.Future
"""The C++ class under ``torch.futures.Future``. ``collect_all`` and C++'s ``then`` return plain instances."""

set_unwrap_func: Callable[[Any, Callable[[Any], object]], None] = torch._C.Future._set_unwrap_func
"""(future, function): ``wait`` and ``value`` of the future call the function with the result first.

``torch.futures.Future.set_exception`` raises errors in it. ``torch.futures.wait_all`` and ``collect_all``
call the functions of their futures, but no method that a Python subclass overrides.
"""

PyRRef: type = torch._C._distributed_rpc.PyRRef
"""The C++ class of torch's own references."""

disable_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass
"""Context in which no ``__torch_function__`` of a subclass is called."""


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of ``kind`` may be made of others: they have a ``__torch_dispatch__``."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def jagged_parts(nested: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return offsets, lengths and the ragged dimension of a nested tensor of layout ``torch.jagged``."""
    found: Any = nested
    return found.offsets(), found.lengths(), found._ragged_idx


def contents_of(tensor: torch.Tensor) -> tuple[object, int, int, int] | None:
    """The storage, the offset in it, the version and the size in bytes of what ``tensor`` shows.

    While they are the same, so are the contents. None: changes of it are not counted.
    """
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_inference():
        return None
    return tensor.untyped_storage(), int(tensor.storage_offset()), tensor._version, tensor.nbytes


profiler_enabled_here: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler records the calling thread."""

start_legacy_profiler: Callable[[Any], None] = torch.autograd._enable_profiler_legacy  # type: ignore[attr-defined]
"""Begins to record the calling thread, by the config of a ``profiler_legacy.profile``."""

stop_legacy_profiler: Callable[[], Any] = torch.autograd._disable_profiler_legacy  # type: ignore[attr-defined]
"""Ends recording the calling thread; returns the records."""

parse_legacy_records: Callable[[Any], list[Any]] = profiler_legacy._parse_legacy_records
"""Converts the records of the legacy profiler to events."""


def profiled_anywhere() -> bool:
    """Whether a profiler records any thread of this process."""
    return profiler._is_profiler_enabled


def profiled_here() -> bool:
    """Whether a profiler may record the calling thread. (One for all threads sets no flag of the thread.)"""
    return profiler._is_profiler_enabled or profiler_enabled_here()


def event_tree(events: list[Any], **options: Any) -> EventList:
    """Return ``events`` as a list that knows which event contains which; ``options`` are its settings."""
    tree = EventList(events, **options)  # type: ignore[no-untyped-call]
    tree._build_tree()  # type: ignore[no-untyped-call]
    return tree


def operator_name(function: object) -> str:
    """The name of an operator that TorchScript knows: ``aten::add`` of ``torch.add``. Empty: it is none."""
    return torch.jit._builtins._find_builtin(function) or ""  # type: ignore[no-untyped-call]


def python_only(function: F) -> F:
    """Decorator: ``torch.jit.script`` refuses functions that call ``function``, and does not compile it."""

    def refuse() -> NoReturn:
        name = f"{function.__module__.removesuffix('.api')}.{function.__name__}"
        raise ConfigurationError(
            f"TorchScript cannot compile {name}: call it from Python; calls may run script functions"
        )

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function


_COMPILER = "torch._dynamo.trace_rules"


def keep_out_of_graphs() -> None:
    """Make ``torch.compile`` run this package between its graphs, now or once its compiler is imported.

    It would trace the code of a call like that of the program, with tensors that have no memory to send.
    Idempotent.
    """
    _after_compiler.remove()
    if _COMPILER in sys.modules:
        _skip_package()
    else:
        _after_compiler.install()


def _skip_package() -> None:
    _after_compiler.remove()
    rules: Any = sys.modules[_COMPILER]
    if not rules.check_file(__file__).skipped:
        rules.add("zmqgrad")


_after_compiler = AfterImport(_COMPILER.__eq__, _skip_package)
