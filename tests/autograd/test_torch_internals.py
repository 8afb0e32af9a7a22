"""Each private name of torch that distributed autograd uses: a failure here names what a release changed."""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPSink

from zmqgrad.autograd import torch_internals as internals


class Double(torch.autograd.Function):
    """Written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def leaf() -> torch.Tensor:
    return torch.rand(3, requires_grad=True)


def test_the_engine_is_called_directly() -> None:
    """Variable._execution_engine.run_backward."""
    assert internals._run_backward is not None


def test_the_grad_mode_can_be_set() -> None:
    """torch._C._set_grad_enabled."""
    assert torch.is_grad_enabled()
    for mode in (False, False, True):
        internals.set_grad_mode(mode)
        assert torch.is_grad_enabled() == mode


@pytest.mark.parametrize("direct", [True, False])
def test_the_engine_computes_what_torch_does(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of run_backward, and the public functions that replace it."""
    if not direct:
        monkeypatch.setattr(internals, "_run_backward", None)
    x, unused = leaf(), leaf()
    start, *ends = [tuple(get_gradient_edge(t))[:2] for t in (x * x, x, unused)]
    found = internals.run_engine({start: torch.ones(3)}, ends, True)
    assert found[0] is not None
    assert torch.equal(found[0], 2 * x)
    assert found[1] is None
    assert x.grad is None
    internals.run_engine({start: torch.ones(3)}, ends, False)
    with pytest.raises(RuntimeError, match="second time"):
        internals.run_engine({start: torch.ones(3)}, ends, False)


@pytest.mark.parametrize("direct", [True, False])
def test_nodes_of_leaves_accumulate(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """run_backward with accumulate_grad."""
    if not direct:
        monkeypatch.setattr(internals, "_run_backward", None)
    x = leaf()
    for _ in range(2):
        internals.run_leaf_nodes([get_gradient_edge(x).node], [torch.ones(3)])
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_the_node_that_must_not_run() -> None:
    """torch._C._functions.DelayedError, and Node.metadata."""
    anchor = torch.empty(0, requires_grad=True)
    value, passed = internals.error_function("not here", 2)(torch.ones(3), anchor)
    assert torch.equal(value, torch.ones(3))
    assert value.requires_grad
    assert passed.requires_grad
    assert type(value.grad_fn) is internals.ERROR_NODE
    value.grad_fn.metadata["key"] = "kept"
    assert passed.grad_fn.metadata["key"] == "kept"
    with pytest.raises(RuntimeError, match="not here"):
        value.sum().backward()


def test_the_node_of_a_leaf() -> None:
    """The class AccumulateGrad, and its attribute ``variable``."""
    x = leaf()
    node: Any = get_gradient_edge(x).node
    assert type(node) is internals.LEAF_NODE
    assert node.variable is x


def test_functions_in_python() -> None:
    """torch._C._FunctionBase."""
    assert internals.is_python_function(Double.apply(leaf()).grad_fn)
    assert not internals.is_python_function((leaf() * 2).grad_fn)


def test_the_outputs_of_a_node() -> None:
    """Node._input_metadata: its length, and shape, dtype and device of its items."""
    node = torch.rand(4, 2, dtype=torch.float64, requires_grad=True).unbind(1)[0].grad_fn
    assert internals.outputs_of(node) == 2
    zeros = internals.zeros_for(node, 1)
    assert zeros.shape == (4,)
    assert zeros.dtype == torch.float64
    assert zeros.device.type == "cpu"
    assert not zeros.any()


def test_the_dtype_of_the_gradient_of_a_leaf() -> None:
    """Tensor.grad_dtype, which only leaves have."""
    leaf = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert internals.gradient_dtype(leaf) is internals.gradient_dtype(leaf * 2) is torch.bfloat16
    if hasattr(torch.Tensor, "grad_dtype"):
        for dtype in (torch.float32, None):
            leaf.grad_dtype = dtype
            assert internals.gradient_dtype(leaf) is dtype


def _freed(_: None) -> torch.Tensor:
    raise RuntimeError("freed by the test")


def test_a_node_knows_its_forward_call_in_anomaly_mode() -> None:
    """Node.metadata["traceback_"]."""
    assert internals.forward_traceback((leaf() * 2).grad_fn) == ""
    with torch.autograd.set_detect_anomaly(True):
        node: Any = (leaf() * 2).grad_fn
    assert "in test_a_node_knows_its_forward_call" in internals.forward_traceback(node)


def test_the_engine_can_be_silent() -> None:
    """CPython drops the warnings of C functions in a frame whose module is None."""
    y = leaf() * 2

    def stop(*_: Any) -> None:
        raise ValueError("stopped")

    y.grad_fn.register_hook(stop)  # type: ignore[union-attr]
    start, end = tuple(get_gradient_edge(y))[:2], y.grad_fn.next_functions[0]  # type: ignore[union-attr]
    with torch.autograd.set_detect_anomaly(True):
        for silent in (True, False):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with pytest.raises(ValueError, match="stopped"):
                    internals.run_engine({start: torch.ones(3)}, [end], True, silent=silent)
            assert bool(caught) is not silent


def test_a_pass_is_a_graph_task() -> None:
    """torch._C._current_graph_task_id, _will_engine_execute_node and _stash_obj_in_tls; queue_callback;
    and the variables of register_multi_grad_hook."""
    internals.show_passes_to_torch()
    ids: list[int] = []

    def note(_: Any) -> None:
        ids.append(torch._C._current_graph_task_id())

    class Task:
        id = 12345

        def __init__(self) -> None:
            self.queued: list[Any] = []

        def reaches(self, node: Any) -> bool:
            return True

        def queue_callback(self, callback: Any) -> None:
            self.queued.append(callback)

    x, unused, seen = leaf(), leaf(), list[Any]()
    y = x * 2
    y.register_hook(note)
    register_multi_grad_hook((y, unused), seen.append)
    y.sum().backward(retain_graph=True)
    assert [[each is not None for each in gradients] for gradients in seen] == [[True, False]]
    task = Task()
    with internals.as_graph_task(task):
        internals.run_engine({get_gradient_edge(y)[:2]: torch.ones(3)}, [get_gradient_edge(x)[:2]], True)
        y.sum().backward()  # inside of a pass, yet a graph task of its own
        torch.autograd.Variable._execution_engine.queue_callback(note)
    assert ids[1] == task.id
    assert task.id not in (ids[0], ids[2])
    assert torch._C._current_graph_task_id() == -1
    *completions, queued = task.queued
    assert queued is note
    assert len(seen) == 2
    for complete in completions:
        complete()
    assert len(seen) == 3


def test_a_graph_task_is_kept_as_long_as_it_is_stored_and_no_longer() -> None:
    stored = SimpleNamespace(id=7)
    before = sys.getrefcount(stored)
    for _ in range(3):
        with internals.as_graph_task(stored), internals.as_graph_task(None):
            pass
    assert sys.getrefcount(stored) == before  # torch 2.9 ends a reference that it does not own


def test_the_tensors_of_a_storage_are_counted() -> None:
    t = torch.ones(3)
    assert [internals.storage_users(t) for _ in range(2)] == [1, 1]
    alias = t.detach()
    assert internals.storage_users(t) == 2
    del alias
    assert internals.storage_users(t) == 1
    held = t.untyped_storage()
    assert internals.storage_users(t) == 2
    del held
    assert internals.storage_users(t) == 1


def test_saved_tensors_are_dropped() -> None:
    """Node._raw_saved_*, and SavedTensor.register_hooks."""
    x = torch.rand(3, requires_grad=True)
    saved = torch.rand(3)
    alive = weakref.ref(saved)
    y = x * saved
    del saved
    assert alive() is not None
    internals.drop_saved_tensors(y.grad_fn, _freed)
    assert alive() is None
    with pytest.raises(RuntimeError, match="freed by the test"):
        y.sum().backward()


def test_handles_of_hooks_are_counted() -> None:
    """RemovableHandle.next_id."""
    before = internals.hook_handles_made()
    assert before >= 0
    leaf().register_hook(lambda gradient: None)
    assert internals.hook_handles_made() > before


def test_gradients_that_are_retained_count_as_hooks() -> None:
    """Tensor.retain_grad."""
    x = leaf()
    x.retain_grad()
    before = internals.hook_handles_made()
    y = x * 2
    y.retain_grad()
    assert internals.hook_handles_made() > before
    y.sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, torch.ones(3))


def test_hooks_of_tensors() -> None:
    """Tensor._backward_hooks and Tensor._post_accumulate_grad_hooks."""
    x = leaf()
    assert not internals.tensor_hooks(x)
    assert not internals.post_accumulate_hooks(x)

    def hook(gradient: torch.Tensor) -> None:
        calls.append("hook")

    def post_hook(tensor: torch.Tensor) -> None:
        calls.append("post hook")

    calls: list[str] = []
    x.register_hook(hook)
    x.register_post_accumulate_grad_hook(post_hook)
    assert list(internals.tensor_hooks(x).values()) == [hook]
    assert internals.post_accumulate_hooks(x) == [post_hook]
    internals.tensor_hooks(x).clear()  # the engine reads the same dictionary
    x.sum().backward()
    assert calls == ["post hook"]


def test_hooks_of_nodes() -> None:
    """RemovableHandle.hooks_dict_ref."""
    node: Any = (leaf() * 2).grad_fn

    def first(*_: Any) -> None: ...

    def second(*_: Any) -> None: ...

    node.register_hook(first)
    handle = node.register_hook(second)
    assert internals.hooks_beside(handle) == [first, second]


def test_static_replicas_report_a_postponed_all_reduce() -> None:
    """DDP: ddp_weakref, static_graph, _static_graph_delay_allreduce_enqueued, reducer._delay_all_reduce.

    The behaviour is tested with real replicas in tests/processes.
    """
    used = {
        name
        for f in vars(DistributedDataParallel).values()
        if inspect.isfunction(f)
        for name in f.__code__.co_names
    }
    assert {"static_graph", "_static_graph_delay_allreduce_enqueued"} <= used
    assert hasattr(torch.distributed.Reducer, "_delay_all_reduce")
    assert "ddp_weakref" in _DDPSink.forward.__code__.co_names
    reducer = SimpleNamespace(calls=0)
    replica = SimpleNamespace(
        static_graph=True, _static_graph_delay_allreduce_enqueued=False, reducer=reducer
    )
    reducer._delay_all_reduce = lambda: setattr(reducer, "calls", reducer.calls + 1)
    assert internals.postpones_all_reduce(replica)
    internals.mark_postponed(replica)
    assert not internals.postpones_all_reduce(replica)
    internals.all_reduce(replica)
    assert reducer.calls == 1


def test_an_edge_is_a_pair() -> None:
    """GradientEdge is made of, and unpacks to, a node and the number of its output."""
    node: Any = (leaf() * 2).grad_fn
    assert tuple(GradientEdge(node, 0))[:2] == (node, 0)


def test_watch_engine_sees_local_passes_with_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variable._execution_engine, and the order of the arguments of its run_backward."""
    seen: list[Any] = []
    monkeypatch.setattr(internals, "_watchers", [*internals._watchers])
    internals.watch_engine(lambda outputs, inputs: seen.append((*outputs, *inputs)))
    x = leaf()
    y = (x * 2).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward(inputs=[x], retain_graph=True)
    y.backward()
    assert len(seen) == 2
    assert all(each[0] is y and each[1] is x for each in seen)


def test_tensors_of_transforms_are_known() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        assert internals.is_of_transform(x)
        return x * x

    x = torch.ones((), requires_grad=True)
    assert not internals.is_of_transform(x)
    assert torch.func.grad(square)(x).item() == 2


def test_map_tensors_finds_them_in_containers() -> None:
    """torch.utils._pytree."""
    x = leaf()
    found = internals.map_tensors(lambda t: t * 2, {"a": [x, 1], "b": (None, "text")})
    torch.testing.assert_close(found["a"][0], x * 2)
    assert (found["a"][1:], found["b"]) == ([1], (None, "text"))


def test_in_checkpoint_knows_the_hooks_of_a_checkpoint() -> None:
    """_top_saved_tensors_default_hooks, _checkpoint_hook and _recomputation_hook."""
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(internals.in_checkpoint())
        return x.sin()

    function(leaf())
    torch.utils.checkpoint.checkpoint(function, leaf() * 1, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        function(leaf())
    assert seen == [False, True, True, False]


def test_hooks_of_saved_tensors_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """saved_tensors_hooks.__enter__, also of its subclasses."""
    replaced: list[bool] = []

    def replace(pack: Any, unpack: Any) -> Any:
        replaced.append(internals.is_first_checkpoint_hook(pack))
        return (lambda tensor: tensor * 2), lambda saved: saved

    monkeypatch.setattr(internals, "_replacing", [replace])
    x = leaf()
    with torch.autograd.graph.save_on_cpu():
        y = x * x.detach()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())
    monkeypatch.setattr(
        internals,
        "_replacing",
        [lambda *hooks: replaced.append(internals.is_first_checkpoint_hook(hooks[0])) or hooks],
    )
    torch.utils.checkpoint.checkpoint(torch.sin, x * 1, use_reentrant=False).sum().backward()
    assert replaced == [False, True, False]


def test_a_watch_sees_the_inputs_of_operations() -> None:
    """TorchDispatchMode."""
    x, other = leaf(), leaf()
    for used in (other, x):
        with internals.Watch(lambda t: t.data_ptr() == x.data_ptr()) as watch:
            torch.add(1, used.detach()).sum()
        assert watch.found is (used is x)


def test_a_node_of_torchs_own_can_be_called() -> None:
    """Without looking at what follows it; the engine runs the hooks of its tensors if it is its own end."""
    x = leaf()
    y = x * 2
    y.register_hook(lambda g: g + 1)
    node: Any = y.grad_fn
    (hooked,) = internals.run_engine({(node, 0): torch.ones_like(y)}, [(node, 0)], True)
    assert hooked is not None
    assert torch.equal(hooked, torch.full_like(y, 2))
    assert torch.equal(node(hooked)[0], torch.full_like(y, 4))


def test_a_tensor_marks_its_node_when_it_gets_a_hook() -> None:
    """Node.metadata, and that torch looks up Tensor.register_hook."""
    y = leaf().unbind()[1]
    assert not internals.has_tensor_hooks(y.grad_fn)
    y.register_hook(lambda gradient: None)
    assert internals.has_tensor_hooks(y.grad_fn)


def test_the_engine_runs_the_hooks_of_all_outputs_of_a_node_where_it_stops() -> None:
    seen: list[Any] = []
    first, second = leaf().unbind()[:2]
    second.register_hook(seen.append)
    internals.run_engine({(first.grad_fn, 0): torch.ones_like(first)}, [(first.grad_fn, 0)], True)
    assert seen == [None]


def test_a_multi_gradient_hook_of_received_tensors_counts_calls_without_a_gradient() -> None:
    """The qualified name of what register_multi_grad_hook registers."""
    x, y = internals.error_function("", 2)(leaf(), leaf())
    register_multi_grad_hook([x, y], lambda gradients: None)
    assert all(map(internals._collects, [*internals.tensor_hooks(x).values()]))
    y.register_hook(abs)
    assert [*internals.tensor_hooks(y).values()][1](None) is None


def test_a_tensor_that_is_changed_in_place_leaves_its_hooks_behind() -> None:
    """So its mark stays at the right node, and a hook that is registered afterwards marks another."""
    y = leaf() * 2
    before, seen = y.grad_fn, list[str]()
    y.register_hook(lambda gradient: seen.append("before"))
    y.mul_(3)
    assert internals.has_tensor_hooks(before)
    assert not internals.has_tensor_hooks(y.grad_fn)
    y.register_hook(lambda gradient: seen.append("after"))
    assert internals.has_tensor_hooks(y.grad_fn)
    y.sum().backward()
    assert seen == ["after", "before"]


def test_tensors_of_subclasses_mark_theirs_too() -> None:
    class Own(torch.Tensor):
        pass

    y = leaf().as_subclass(Own) * 2
    y.register_hook(lambda gradient: None)
    assert internals.has_tensor_hooks(y.grad_fn)


def test_a_retained_gradient_marks_where_its_tensor_is_after_changes_in_place() -> None:
    """Tensor.retain_grad, Tensor._version, and weak references to tensors."""
    other, y = leaf() * 2, leaf() * 2
    y.retain_grad()
    assert internals.has_tensor_hooks(y.grad_fn)
    assert not internals.has_tensor_hooks(other.grad_fn)
    y.mul_(3)
    internals.follow_retained()
    assert internals.has_tensor_hooks(y.grad_fn)
    y[0].exp_()
    internals.follow_retained()
    assert internals.has_tensor_hooks(y.grad_fn)
    assert not internals.has_tensor_hooks(other.grad_fn)
    reference = weakref.ref(y)
    del y
    internals.follow_retained()
    assert reference() is None


def test_tensors_in_containers_are_found() -> None:
    """tree_any_only, tree_map_only."""
    value = {"a": [1, (torch.zeros(2), leaf())]}
    assert internals.any_tensor(lambda tensor: tensor.requires_grad, value)
    value = internals.map_tensors(torch.Tensor.detach, value)
    assert not internals.any_tensor(lambda tensor: tensor.requires_grad, value)


def test_only_hooks_of_nodes_count_as_such() -> None:
    """torch.autograd.Function._register_hook."""
    before = internals.node_hook_handles_made()
    y = leaf() * 2
    y.register_hook(lambda gradient: None)
    leaf().register_post_accumulate_grad_hook(lambda tensor: None)
    torch.nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert internals.node_hook_handles_made() == before
    node: Any = y.grad_fn
    node.register_hook(lambda *_: None)
    node.register_prehook(lambda *_: None)
    torch.autograd.graph.get_gradient_edge(leaf()).node.register_prehook(lambda *_: None)
    assert internals.node_hook_handles_made() == before + 3
