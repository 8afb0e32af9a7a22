"""What distributed autograd uses of torch's private API, in one place.

Torch may change any of it in a release. ``tests/autograd/test_torch_internals.py`` has a test for each name
here, so a failure there names what a release broke. Where torch has a slower public equivalent, the module
falls back to it.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any_only, tree_map_only
from torch.utils.hooks import RemovableHandle

Edge = tuple[Any, int]
"""A node, and the number of its output. Every ``GradientEdge`` begins with that."""

Hooks = list[Callable[..., Any]]

# ---- the engine ------------------------------------------------------------------------------------------

_run_backward: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)

_gradient_edge: Callable[[Edge], GradientEdge] = functools.partial(tuple.__new__, GradientEdge)
"""Makes what the engine expects without a call of Python code; it reads the two items of an edge."""


_silently: Callable[..., Any] = types.FunctionType(
    (lambda run, *args, **kwargs: run(*args, **kwargs)).__code__, {"__name__": None, "__builtins__": builtins}
)
"""Calls a C function without its warnings: CPython drops those of a frame whose module is None, as at exit.
So no other thread is affected, which a change of the filters of warnings or of anomaly mode would be."""


set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""As ``torch.set_grad_enabled``, an object that takes three calls of Python code."""


def run_engine(
    gradients: Mapping[Edge, torch.Tensor],
    ends: Iterable[Edge],
    retain_graph: bool,
    create_graph: bool = False,
    silent: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Compute gradients at ``ends`` from ``gradients``, like ``torch.autograd.grad``.

    ``silent``: without warnings of the engine.

    ``torch.autograd.grad`` itself first checks and completes its arguments, which takes as long as the engine
    needs for a small graph; the first call also imports sympy (half a second). So the engine is called
    directly where torch allows it.
    """
    if _run_backward is None:
        starts, stops = ([GradientEdge(node, i) for node, i in edges] for edges in (gradients, ends))
        return torch.autograd.grad(
            starts,
            stops,
            tuple(gradients.values()),
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    run = functools.partial(_silently, _run_backward) if silent else _run_backward
    found: Sequence[torch.Tensor | None] = run(
        tuple(map(_gradient_edge, gradients)),
        tuple(gradients.values()),
        retain_graph,
        create_graph,
        tuple(map(_gradient_edge, ends)),
        True,
        accumulate_grad=False,
    )
    return found


def run_leaf_nodes(
    nodes: Iterable[Any], gradients: Sequence[torch.Tensor], create_graph: bool = False
) -> None:
    """Run the nodes of leaves: they add ``gradients`` to ``.grad``."""
    edges = tuple([GradientEdge(node, 0) for node in nodes])
    if _run_backward is None:
        torch.autograd.backward(edges, tuple(gradients), create_graph=create_graph)
    else:
        _run_backward(edges, tuple(gradients), create_graph, create_graph, (), True, accumulate_grad=True)


# ---- the graph task --------------------------------------------------------------------------------------


class GraphTask(Protocol):
    """What torch's functions report as the graph task in which a hook or node runs."""

    id: int
    replicas_due: list[Any]

    def reaches(self, node: Any) -> bool:
        """Return whether ``node`` may get a gradient."""

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of the task."""


_GRAPH_TASK = "zmqgrad_graph_task"
"""The key in torch's thread-local state, which the engine passes on to its own threads."""

_own_graph_task_id = torch._C._current_graph_task_id
_own_will_execute = torch._C._will_engine_execute_node
_own_engine: Any = torch.autograd.Variable._execution_engine
_is_stored = torch._C._is_key_in_tls
_stored: Callable[[str], GraphTask | None] = torch._C._get_obj_in_tls
_own_store: Callable[[str, Any], None] = torch._C._stash_obj_in_tls
# Earlier versions of torch cannot remove what is stored.
_remove: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", lambda key: _store(key, None))


def _store_kept(key: str, stored: Any) -> None:
    """Store an object, and keep it as long as it is stored."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stored))
    _own_store(key, stored)


def _store_steals() -> bool:
    """Return whether torch takes the reference of whoever stores an object, and ends it, as 2.9 does."""
    probe, key = object(), f"{_GRAPH_TASK}_probe"
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    _own_store(key, probe)
    steals = sys.getrefcount(probe) == before + 1
    if not steals:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(probe))
    return steals


_store: Callable[[str, Any], None] = _store_kept if _store_steals() else _own_store


def graph_task() -> GraphTask | None:
    """Return the task that the calling thread runs a part of, if any."""
    return _stored(_GRAPH_TASK) if _is_stored(_GRAPH_TASK) else None


class as_graph_task:
    """Context manager that makes calls of the engine, and code between them, parts of ``task``."""

    __slots__ = ("_before", "_task")

    def __init__(self, task: GraphTask | None) -> None:
        self._task = task

    def __enter__(self) -> None:
        self._before = _stored(_GRAPH_TASK) if _is_stored(_GRAPH_TASK) else None
        _store(_GRAPH_TASK, self._task)

    def __exit__(self, *exc: object) -> None:
        if self._before is None:
            _remove(_GRAPH_TASK)
        else:
            _store(_GRAPH_TASK, self._before)


def _graph_task_id() -> int:
    task = graph_task()
    return _own_graph_task_id() if task is None else task.id


def _will_execute(node: Any) -> bool:
    task = graph_task()
    if task is None:
        return _own_will_execute(node)
    reached = task.reaches(node)
    if reached:  # it may turn out to get none, or an undefined one, without which its hooks do not run
        complete = _completion(sys._getframe(1).f_locals)
        if complete is not None:
            task.queue_callback(complete)
    return reached


_watchers: list[Callable[[Sequence[Any], Sequence[Any]], object]] = []


def watch_engine(watcher: Callable[[Sequence[Any], Sequence[Any]], object]) -> None:
    """Call ``watcher`` with the outputs and inputs of each local pass that has inputs, before it runs.

    Python code enters the engine by an object that torch lets others replace. :func:`run_engine` does not.
    """
    if watcher not in _watchers:
        _watchers.append(watcher)


class _Engine(type(_own_engine)):  # type: ignore[misc]
    """Torch's engine, watched, where a backward pass inside one of ours is a graph task of its own."""

    def run_backward(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and args[3]:
            for each in _watchers:
                each(outputs, args[3])
        if graph_task() is None:
            return _own_engine.run_backward(outputs, *args, **kwargs)
        with as_graph_task(None):
            return _own_engine.run_backward(outputs, *args, **kwargs)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        task = graph_task()
        if task is None:
            _own_engine.queue_callback(callback)
        else:
            task.queue_callback(callback)


_engine = _Engine()


def show_passes_to_torch() -> None:
    """Make torch report passes as graph tasks, from the first worker of this process on.

    Checkpoints, hooks of several tensors and modules such as FSDP look these up in each call.
    """
    torch._C._current_graph_task_id = _graph_task_id
    torch._C._will_engine_execute_node = _will_execute
    torch.autograd.Variable._execution_engine = _engine


def _collects(hook: Any) -> bool:
    """Whether ``hook`` is one of ``register_multi_grad_hook`` (mode "all"), which counts its calls."""
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.")


def _completion(hook: Mapping[str, Any]) -> Callable[[], None] | None:
    """Return what completes a hook of ``register_multi_grad_hook`` (mode "all") that is being called.

    The hook asks once which of its tensors will have a gradient, and waits for as many. What is returned
    calls it with those that have one by then, unless it has been called. None if something else asks.

    Args:
        hook: the local variables of what asks.
    """
    try:
        function, gradients, counts, task = (hook[name] for name in ("fn", "buffer", "count", "id"))
    except KeyError:
        return None

    def complete() -> None:
        if counts.pop(task, None) is not None:
            function(gradients.pop(task))

    return complete


# ---- checkpoints -----------------------------------------------------------------------------------------

saved_tensor_hooks: Callable[[bool], tuple[Any, Any] | None] = (
    torch._C._autograd._top_saved_tensors_default_hooks
)
"""Returns the hooks of saved tensors of the calling thread, if any; with True, even while it traces."""

_CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")


def in_checkpoint() -> bool:
    """Whether the calling thread runs a checkpointed function, for the first time or again."""
    hooks = saved_tensor_hooks(False)
    return hooks is not None and is_checkpoint_hook(hooks[0])


def in_recomputation() -> bool:
    """Whether the calling thread runs a function of ``torch.utils.checkpoint`` again."""
    hooks = saved_tensor_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(_CHECKPOINT_HOOKS[1])


def is_checkpoint_hook(hook: Any) -> bool:
    """Whether this hook of saved tensors computes again what it does not keep."""
    return getattr(hook, "__qualname__", "").startswith(_CHECKPOINT_HOOKS)


def is_first_checkpoint_hook(hook: Any) -> bool:
    """Whether this is a hook with which a checkpointed function runs for the first time."""
    return getattr(hook, "__qualname__", "").startswith(_CHECKPOINT_HOOKS[0])


_own_enter = saved_tensors_hooks.__enter__
_replacing: list[Callable[[Any, Any], tuple[Any, Any]]] = []


def replace_saved_tensor_hooks(replace: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Let ``replace`` return other hooks in place of those of saved tensors that a thread enters."""
    _replacing.append(replace)


@functools.wraps(_own_enter)
def _enter_hooks(hooks: saved_tensors_hooks) -> None:
    pack, unpack = hooks.pack_hook, hooks.unpack_hook
    for replace in _replacing:
        pack, unpack = replace(pack, unpack)
    _own_enter(saved_tensors_hooks(pack, unpack))


saved_tensors_hooks.__enter__ = _enter_hooks  # type: ignore[method-assign]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation in the calling thread has an input for which ``wanted`` holds."""

    found = False

    def __init__(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted = wanted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or any_tensor(self._wanted, (args, kwargs))
        return function(*args, **(kwargs or {}))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to the tensors in its containers."""
    return tree_map_only(torch.Tensor, function, value)


def any_tensor(holds: Callable[[torch.Tensor], bool], value: Any) -> bool:
    """Return whether ``holds`` does for any of the tensors in the containers of ``value``."""
    return tree_any_only(torch.Tensor, holds, value)


# ---- kinds of nodes --------------------------------------------------------------------------------------


def error_function(message: str, outputs: int) -> Callable[..., Any]:
    """Return a function of ``outputs`` tensors that returns them; its node raises ``message`` if it runs."""
    made: Callable[..., Any] = torch._C._functions.DelayedError(message, outputs)
    return made


_LEAF = torch.empty(0, requires_grad=True, device="cpu")

ERROR_NODE: Any = type(error_function("", 1)(_LEAF).grad_fn)
"""The class of the nodes of an :func:`error_function`."""

LEAF_NODE: Any = type(_LEAF.view(0).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
"""The class of the nodes of leaves (AccumulateGrad), whose leaf is ``variable``."""


def is_python_function(node: Any) -> bool:
    """Whether ``node`` is a ``torch.autograd.Function``. It runs even on undefined gradients."""
    return isinstance(node, torch._C._FunctionBase)


is_of_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of ``torch.func`` has made of another."""


# ---- nodes -----------------------------------------------------------------------------------------------


def outputs_of(node: Any) -> int:
    """Return the number of outputs of ``node``, each of which has a gradient."""
    return len(node._input_metadata)


def input_metadata(node: Any, output: int) -> Any:
    """Return ``shape`` (a list), ``dtype``, ``device`` and ``is_nested_tensor`` of an output of ``node``."""
    return node._input_metadata[output]


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that torch casts the gradient of ``tensor`` to; None if it may have any."""
    return tensor.grad_dtype if _HAS_GRAD_DTYPE and tensor.is_leaf else tensor.dtype


_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # since 2.10


def zeros_for(node: Any, output: int) -> torch.Tensor:
    """Return zeros with the shape, dtype and device of an output of ``node``."""
    form = input_metadata(node, output)
    return torch.zeros(form.shape, dtype=form.dtype, device=form.device)


def forward_traceback(node: Any) -> str:
    """Return where ``node`` was made; empty unless anomaly mode was enabled then."""
    return "".join(node.metadata.get("traceback_", ()))


def drop_saved_tensors(node: Any, unpack: Callable[[None], torch.Tensor]) -> None:
    """Free what ``node`` has saved. A later access calls ``unpack``.

    Tensors that ``saved_tensors_hooks`` have packed (such as checkpoints) live as long as the graph.
    """
    for saved in saved_tensors(node):
        try:
            saved.register_hooks(_discard, unpack)
        except RuntimeError:
            continue  # None, freed or packed: torch cannot be queried for that, but raises


def saved_tensors(node: Any) -> list[Any]:
    """Return what ``node`` has saved and no pass has freed, each as torch's own object around a tensor."""
    found: list[Any] = []
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            saved = getattr(node, name)
        except RuntimeError:
            continue  # freed before, by another pass
        found += saved if isinstance(saved, (tuple, list)) else (saved,)
    return found


@functools.lru_cache(maxsize=4096)
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _discard(_: torch.Tensor) -> None:
    """A pack hook that keeps nothing of the saved tensor."""


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_users(tensor: torch.Tensor) -> int:
    """Return how much refers to the storage of ``tensor``: tensors, itself included, and what is being sent.

    Very many if unknown.
    """
    if _use_count is None or tensor.layout is not torch.strided:
        return 1 << 30
    return 1 + _references(_use_count, tensor) - _references(_use_count, torch.empty(0, device="cpu"))


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    except RuntimeError:  # it is made of others
        return 0


def _references(use_count: Callable[[int], int], tensor: torch.Tensor) -> int:
    """Count what refers to a storage. Torch counts the object of Python as one, however many hold that."""
    storage = tensor.untyped_storage()  # is counted, too, and in some versions of torch ends with its name
    return use_count(storage._cdata) + sys.getrefcount(storage)


# ---- hooks -----------------------------------------------------------------------------------------------


def hook_handles_made() -> int:
    """Return how many hooks this process has registered so far, each of which has or is like a handle.

    Torch keeps gradients of ``retain_grad()`` by a hook which has no handle and cannot be seen at the node.
    -1 if torch does not count handles.
    """
    handles: int = getattr(RemovableHandle, "next_id", -1)
    return handles if handles < 0 else handles + _retained


def node_hook_handles_made() -> int:
    """Return how many of these hooks, internal ones included, are hooks of nodes."""
    return _of_nodes


def has_tensor_hooks(node: Any) -> bool:
    """Whether the engine may run hooks of tensors where it returns gradients at edges to ``node``, no leaf.

    It runs those of all outputs of a node then, with None where an output has no gradient. True also if all
    of them have been removed. The hook of ``retain_grad()`` moves with its tensor when that is changed in
    place, which :func:`follow_retained` notices.
    """
    return _HOOKED in node.metadata


def follow_retained() -> None:
    """Mark where tensors that retain their gradients are now, if they have been changed in place."""
    for reference, version in list(_retaining.values()):
        tensor = reference()
        if tensor is not None and tensor._version != version:
            _note_retained(tensor)


_counting = threading.RLock()
"""Guards the counts of hooks, with which a pass learns that there are any: none may be missed."""

_retained = 0
_retaining: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
"""The tensors, by their ids, with the version that each had when its node was marked."""

_of_nodes = 0
_HOOKED = "zmqgrad_hooked"
"""The key in the metadata of a node, which lives as long as the node, if any of its outputs has hooks."""

_own_retain_grad = torch.Tensor.retain_grad
_own_register_hook: Callable[..., Any] = torch.Tensor.register_hook
_own_node_hook: Callable[..., Any] = torch.autograd.Function._register_hook


class cut_at:
    """Context manager around a call of the engine, in a graph task, that returns partial sums at some edges.

    What runs meanwhile may register hooks of tensors there, which are for the complete sums that follow.

    Args:
        is_partial: whether the sums before a node are partial.
    """

    def __init__(self, is_partial: Callable[[Any], bool]) -> None:
        self.is_partial = is_partial
        self.task = graph_task()
        self.retaining: list[torch.Tensor] = []

    def __enter__(self) -> None:
        _cuts.append(self)

    def __exit__(self, *exc: object) -> None:
        _cuts.remove(self)
        for tensor in self.retaining:
            tensor.retain_grad()


_cuts: list[cut_at] = []


def _cuts_at(tensor: torch.Tensor) -> list[cut_at]:
    return [cut for cut in list(_cuts) if cut.is_partial(tensor.grad_fn)]


@functools.wraps(_own_retain_grad)
def _retain_grad(tensor: torch.Tensor) -> None:
    global _retained
    if _cuts and (cuts := _cuts_at(tensor)):
        cuts[0].retaining.append(tensor)
        return
    if not (tensor.is_leaf or tensor.retains_grad):
        with _counting:
            _retained += 1
        _note_retained(tensor)
    _own_retain_grad(tensor)


def _note_retained(tensor: torch.Tensor) -> None:
    key, version = id(tensor), tensor._version
    _mark(tensor)
    _retaining[key] = weakref.ref(tensor, lambda _: _retaining.pop(key, None)), version


def _mark(tensor: torch.Tensor) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_HOOKED] = True


@functools.wraps(_own_register_hook)
def _register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    _mark(tensor)  # before the hook is there
    if type(tensor.grad_fn) is ERROR_NODE and not _collects(hook):
        hook = functools.wraps(hook)(functools.partial(_if_reached, hook))
    if _cuts and (cuts := _cuts_at(tensor)):
        return _own_register_hook(tensor, functools.partial(_except_at, cuts, hook))
    return _own_register_hook(tensor, hook)


def _if_reached(hook: Callable[..., Any], gradient: torch.Tensor | None) -> Any:
    """Run a hook of a received tensor, but not because another tensor of the same message has a gradient."""
    return None if gradient is None else hook(gradient)


def _except_at(cuts: list[cut_at], hook: Callable[..., Any], gradient: torch.Tensor) -> Any:
    """Run a hook, but not on a sum that is partial because of one of ``cuts``."""
    task = graph_task()
    return None if any(cut.task is task and cut in _cuts for cut in cuts) else hook(gradient)


@functools.wraps(_own_node_hook)
def _register_node_hook(*args: Any) -> Any:
    """Called by torch for each hook of a node, before or after it."""
    global _of_nodes
    with _counting:
        _of_nodes += 1
    return _own_node_hook(*args)


_own_handle = RemovableHandle.__init__


@functools.wraps(_own_handle)
def _make_handle(handle: RemovableHandle, *args: Any, **kwargs: Any) -> None:
    """Torch numbers its handles without a lock. With one number, two hooks of a tensor would be one."""
    with _counting:
        _own_handle(handle, *args, **kwargs)


if not getattr(sys, "_is_gil_enabled", lambda: True)():  # free-threaded Python
    RemovableHandle.__init__ = _make_handle  # type: ignore[assignment, method-assign]

torch.Tensor.retain_grad = _retain_grad  # type: ignore[assignment, method-assign]
torch.Tensor.register_hook = _register_hook  # type: ignore[method-assign]
torch.autograd.Function._register_hook = staticmethod(_register_node_hook)  # type: ignore[method-assign]


def tensor_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """Return the hooks of a tensor by their ids: torch's own dictionary, if there are any."""
    return tensor._backward_hooks or {}


def post_accumulate_hooks(leaf: torch.Tensor) -> Hooks:
    """Return the hooks that run once ``leaf.grad`` has been accumulated."""
    return list((leaf._post_accumulate_grad_hooks or {}).values())


def hooks_beside(handle: RemovableHandle) -> Hooks:
    """Return the hooks, in order, that are registered at the same place as that of ``handle``.

    A node does not show its hooks, but a handle refers to the dictionary that holds its hook. This makes a
    copy, as another thread may register a hook meanwhile.
    """
    return list((handle.hooks_dict_ref() or {}).values())


# ---- DistributedDataParallel -----------------------------------------------------------------------------


def replica_of(node: Any) -> Any:
    """Return the DDP replica that may have unused parameters whose outputs ``node`` has made, or None."""
    known_by = getattr(node, "ddp_weakref", None) if is_python_function(node) else None
    return None if known_by is None else known_by()


def postpones_all_reduce(replica: Any) -> bool:
    """Whether a DDP replica averages only after its current pass: with a static graph, in the first one."""
    return bool(replica.static_graph and not replica._static_graph_delay_allreduce_enqueued)


def mark_postponed(replica: Any) -> None:
    """Tell a DDP replica that :func:`all_reduce` will be called for it after the pass."""
    replica._static_graph_delay_allreduce_enqueued = True


def all_reduce(replica: Any) -> None:
    """Let a DDP replica, which has been marked, average its gradients."""
    replica.reducer._delay_all_reduce()


# ---- fully_shard (FSDP2) ---------------------------------------------------------------------------------


def fully_sharded_parameters() -> set[int]:
    """Return the ids of the parameters that modules under ``fully_shard`` compute with."""
    composable = sys.modules.get("torch.distributed._composable_state")
    states = [ref() for ref in list(composable._module_state_mapping.values())] if composable else []
    found: set[int] = set()
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in [param for group in groups if group is not None for param in group.fsdp_params]:
            found.add(id(getattr(param, "_unsharded_param", None)))
    return found
