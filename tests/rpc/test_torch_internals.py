"""What the rpc layer uses of torch's private API behaves as it relies on.

Each test fails with the name of what a torch release has changed.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import profiler_legacy

from zmqgrad.rpc import torch_internals


def test_cpp_future_is_the_base_of_torchs_future() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    assert isinstance(future, torch_internals.CppFuture)
    assert isinstance(torch.futures.collect_all([]), torch_internals.CppFuture)


def test_the_compiler_skips_the_package() -> None:
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    torch_internals.keep_out_of_graphs()
    assert rules.check_file(torch_internals.__file__).skipped
    assert not rules.check_file(__file__).skipped


def test_cpp_future_init_accepts_a_list_of_devices() -> None:
    class Derived(torch.futures.Future[int]):
        def __init__(self) -> None:
            torch_internals.CppFuture.__init__(self, [])

    future = Derived()
    future.set_result(1)
    assert future.wait() == 1


def test_add_done_callback_passes_the_python_object() -> None:
    seen: list[object] = []
    future: torch.futures.Future[int] = torch.futures.Future()
    torch_internals.CppFuture.add_done_callback(future, seen.append)
    future.set_result(1)
    assert seen == [future]


def test_set_unwrap_func_is_called_by_every_kind_of_wait() -> None:
    seen: list[int] = []
    future: torch.futures.Future[int] = torch.futures.Future()
    torch_internals.set_unwrap_func(future, seen.append)
    future.set_result(3)
    assert (future.wait(), future.value()) == (3, 3)
    assert seen == [3, 3]
    assert torch.futures.wait_all([future]) == [3]
    assert len(seen) > 2
    before = len(seen)
    torch.futures.collect_all([future]).wait()
    assert len(seen) > before


def test_set_unwrap_func_may_raise() -> None:
    def refuse(value: Any) -> None:
        raise KeyError(value)

    failed, done = torch.futures.Future[int](), torch.futures.Future[int]()
    torch_internals.set_unwrap_func(failed, refuse)
    failed.set_result(3)
    done.set_result(1)
    gathered = torch.futures.collect_all([done, failed])
    for wait in failed.wait, failed.value, gathered.wait, gathered.value:
        with pytest.raises(KeyError, match="3"):
            wait()
    with pytest.raises(KeyError, match="3"):
        torch.futures.wait_all([done, failed])


def test_profiler_flags() -> None:
    assert not torch_internals.profiler_enabled_here()
    assert not torch_internals.profiled_anywhere()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_internals.profiler_enabled_here()
        assert torch_internals.profiled_anywhere()


def test_legacy_profiler() -> None:
    torch_internals.start_legacy_profiler(profiler_legacy.profile().config())  # type: ignore[no-untyped-call]
    try:
        torch.ones(2) + 1
    finally:
        records = torch_internals.stop_legacy_profiler()
    marks = [mark.name() for thread in records for mark in thread]
    assert "__start_profile" in marks
    events = torch_internals.parse_legacy_records(records)
    names = {event.name for event in torch_internals.event_tree(events, use_device=None)}
    assert "aten::add" in names


def test_operator_name() -> None:
    assert torch_internals.operator_name(torch.add) == "aten::add"
    assert torch_internals.operator_name(test_operator_name) == ""


def test_pyrref_is_the_class_of_torchs_references() -> None:
    assert torch_internals.PyRRef is torch.distributed.rpc.PyRRef
    assert issubclass(torch.distributed.rpc.RRef, torch_internals.PyRRef)


def test_parts_of_a_jagged_tensor() -> None:
    nested = torch.nested.as_nested_tensor([torch.ones(1, 2), torch.ones(3, 2)], layout=torch.jagged)
    offsets, lengths, dim = torch_internals.jagged_parts(nested)
    assert (offsets.tolist(), lengths, dim) == ([0, 1, 4], None, 1)
    assert torch_internals.has_own_dispatch(type(nested))
    assert not torch_internals.has_own_dispatch(torch.nn.Parameter)


def test_disable_torch_function_disables_that_of_a_subclass() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("called")

    x = torch.ones(2).as_subclass(Refuses)
    with torch_internals.disable_torch_function():
        assert type(x.as_subclass(torch.Tensor)) is torch.Tensor


def test_contents_are_those_of_a_storage_at_a_version() -> None:
    table = torch.zeros(4, 3)
    first = torch_internals.contents_of(table)
    assert first is not None
    assert first == torch_internals.contents_of(table.detach())
    assert first[0] is table.untyped_storage()
    assert first != torch_internals.contents_of(table[1:])
    table.add_(1)
    assert first != torch_internals.contents_of(table)
    with torch.inference_mode():
        assert torch_internals.contents_of(torch.zeros(3)) is None
    assert torch_internals.contents_of(table.to_sparse()) is None
    reference = weakref.ref(table.untyped_storage())
    del table, first
    assert reference() is None
