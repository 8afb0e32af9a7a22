"""The public functions: those of ``torch.distributed.rpc``, with its names, arguments and defaults.

Type checkers know the result of a call from ``func``: of a function that returns a future
(``async_execution``), it is what the future has. They can check arguments only where ``func`` takes them
directly, as in :func:`checkpoint` and by ``rref.rpc_sync()``, and not in a sequence (``args``), as torch has
it: one that names the types of ``args`` refuses functions with optional arguments, and lists.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, overload

from torch.futures import Future

from zmqgrad.errors import ArgumentTypeError, NotInitializedError, PeerLostError, RpcError
from zmqgrad.rendezvous import has_world_size, open_store, rendezvous_beside
from zmqgrad.rpc.backend_registry import construct_rpc_backend_options, init_backend, is_own
from zmqgrad.rpc.calls import PendingCall
from zmqgrad.rpc.current import current_worker, set_default_worker
from zmqgrad.rpc.debug import debug_info
from zmqgrad.rpc.futures import RpcFuture
from zmqgrad.rpc.in_flight import is_serving
from zmqgrad.rpc.membership.bootstrap import join_group, shared_name
from zmqgrad.rpc.membership.events import JoinCallback, LossCallback
from zmqgrad.rpc.membership.group import Group, close_quietly
from zmqgrad.rpc.membership.worker_info import WorkerInfo, check_name, check_names
from zmqgrad.rpc.names import remote_named
from zmqgrad.rpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    check_timeout,
)
from zmqgrad.rpc.profiling import caller_range, profiled_here
from zmqgrad.rpc.rref.api import RRef, call_remote
from zmqgrad.rpc.rref.api import RRef as PyRRef  # noqa: F401
from zmqgrad.rpc.torch_internals import python_only
from zmqgrad.rpc.torch_leftovers import warn_of_leftovers
from zmqgrad.rpc.torch_names import AllGatherStates as AllGatherStates
from zmqgrad.rpc.torch_names import _all_gather as _all_gather
from zmqgrad.rpc.torch_names import _barrier as _barrier
from zmqgrad.rpc.torch_names import _get_current_rpc_agent as _get_current_rpc_agent
from zmqgrad.rpc.torch_names import _get_debug_info as _get_debug_info
from zmqgrad.rpc.torch_names import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from zmqgrad.rpc.torch_names import _require_initialized as _require_initialized
from zmqgrad.rpc.torch_names import _rref_context_get_debug_info as _rref_context_get_debug_info
from zmqgrad.rpc.torch_names import _thread_local_var as _thread_local_var
from zmqgrad.rpc.torch_names import _wait_all as _wait_all
from zmqgrad.rpc.torch_names import _wait_all_workers as _wait_all_workers
from zmqgrad.rpc.torch_names import note_future
from zmqgrad.runtime.arguments import check_callable
from zmqgrad.runtime.blocking import blocking_section
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.exit import run_at_exit
from zmqgrad.store import Store

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

NO_LIMIT = 1e8
"""Seconds; a store has no timeout that means none."""

# Guards _group; held while joining and leaving, which a signal handler may interrupt that calls shutdown.
_lock = threading.RLock()
_group: Group | None = None
_joining = False


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int | None = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join the group; returns when all workers have joined.

    Args:
        name: the name of this worker, unique in the group.
        backend: None for the built-in backend, or one that the program has registered
            (:mod:`zmqgrad.rpc.backend_registry`).
        rank: 0 to ``world_size`` - 1, unique in the group; -1: from the environment or the URL. Without a
            world size, None: the next free one.
        world_size: the number of workers; None: from the environment or the URL. If none of these has it,
            any number of workers may join, leave and come back; rank 0 or another process serves the store.
        rpc_backend_options: init method, default timeout, how long to wait for the others, threads.

    Raises:
        ConfigurationError: if an argument or an environment variable is invalid.
        RendezvousError: if the rendezvous fails: setting missing, port in use, name or rank taken
            (``DuplicateWorkerError``), missing workers (``RendezvousTimeoutError``, with their names).
        RpcError: if this process has joined a group already, or is about to in another thread.

    Example:
        >>> rpc.init_rpc("alone", rank=0, world_size=1)
        >>> rpc.shutdown()
    """
    global _group, _joining
    name = check_name(name)
    own = is_own(backend)
    options: Any = rpc_backend_options
    if options is None:
        options = RpcBackendOptions() if own else construct_rpc_backend_options(backend)
    _check_options(backend, own, options)
    options.check_devices()
    warn_of_leftovers()
    if _joining:  # not with the lock, which that call holds until the last worker has joined
        raise RpcError(
            "init_rpc is running already, in another thread or interrupted by this signal handler: let that "
            "return first"
        )
    with _lock:
        if _group is not None:
            raise RpcError(
                f"RPC is already initialized in this process (as {_group.worker.name}); call shutdown() first"
            )
        try:
            _joining = True
            deadline = Deadline.after(options.join_timeout or None)
            store, rank, world_size = _meet(rank, world_size, options)
            if own:
                group = join_group(store, name, rank, world_size, options, deadline)
            else:
                group = _join_by(backend, store, name, rank, world_size, options)
        finally:
            _joining = False
        _group = group
        set_default_worker(group.worker)
        group.worker.server.serve()  # last: a call may read what the program sets next


def _meet(
    rank: int | None, world_size: int | None, options: RpcBackendOptions
) -> tuple[Store, int | None, int | None]:
    """Run the rendezvous. Returns store, rank and world size (None: not fixed)."""
    url, timeout = options.init_method, options.join_timeout or NO_LIMIT
    if world_size is None and not has_world_size(url):
        store, rank = open_store(url, rank, timeout, shared_name(url, None, rank))
    else:
        size = -1 if world_size is None else world_size
        store, rank, world_size = rendezvous_beside(
            url, -1 if rank is None else rank, size, timeout, group=shared_name(url, size)
        )
    store.set_timeout(min(timeout, options.rpc_timeout or NO_LIMIT))  # of each query, as with torch
    return store, rank, world_size


def _join_by(
    backend: Any, store: Store, name: str, rank: int | None, world_size: int | None, options: Any
) -> Group:
    """Join through a backend that the program has registered."""
    try:
        group: Group = init_backend(
            backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options
        )
    except BaseException:
        store.close()
        raise
    return group


def _check_options(backend: Any, own: bool, options: object) -> None:
    if not isinstance(options, RpcBackendOptions):
        raise ArgumentTypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r}"
        )
    if not own or type(options) is RpcBackendOptions or isinstance(options, TensorPipeRpcBackendOptions):
        options.__post_init__()  # the attributes may have been changed since
        return
    if backend is None:
        raise ArgumentTypeError(f"Could not infer backend for options {options!r}")
    raise ArgumentTypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {options!r}")


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. ``init_rpc`` works again afterwards.

    Args:
        graceful: wait until all workers have called this and no call is pending anywhere. Without it, this
            also ends a graceful shutdown that another thread has begun, or that a signal handler interrupts.
        timeout: seconds; 0 for no limit.

    Raises:
        NotInitializedError: if this process has not joined a group, or another thread is still joining one.
        RpcError: if called inside a remote call, which would wait for itself, or gracefully by a callback in
            a thread of the worker, or by a signal handler during shutdown.
        RpcTimeoutError: if other workers did not call it in time, with their names. This worker has left all
            the same.

    Example:
        >>> rpc.init_rpc("alone", rank=0, world_size=1)
        >>> rpc.shutdown()  # waits for all workers; with graceful=False it does not
    """
    global _group
    seconds = check_timeout(timeout)
    if is_serving():
        raise RpcError(
            "shutdown was called inside a remote call, and would wait until that has ended; let the function "
            "return, and call shutdown where init_rpc was called"
        )
    if _joining:
        raise NotInitializedError(
            "RPC has not been initialized yet: init_rpc is running, in another thread or interrupted by this "
            "signal handler. Call shutdown() when it has returned; join_timeout (RpcBackendOptions) bounds it"
        )
    group = _group
    if graceful and group is not None and group.worker.pool.runs_here():
        raise RpcError(
            "shutdown was called by a callback in a thread of the worker, and would wait until that has "
            "ended; let it return, and call shutdown where init_rpc was called, or leave at once by "
            "shutdown(graceful=False)"
        )
    if group is not None and group.leaving and not graceful:
        group.hurry()
        with _lock:  # until it has left; not if a signal handler is to return first
            return
    with _lock:
        group = _group
        if group is None:
            raise NotInitializedError("RPC has not been initialized. Call zmqgrad.rpc.init_rpc first.")
        if group.leaving:
            raise RpcError(
                "shutdown was called by a signal handler that interrupts shutdown, which goes on when the "
                "handler returns; call shutdown(graceful=False) to leave at once"
            )
        deadline = Deadline.after(seconds or None)
        try:
            group.leave(graceful, deadline)
        finally:
            group.leaving = False
            if group.worker.closed:  # else Ctrl-C came in between, and this can be called again
                _group = None
                set_default_worker(None)


@run_at_exit
def _leave_at_exit() -> None:
    """Stop the threads before the interpreter finalizes, if the program ends without shutdown."""
    if _group is not None:
        close_quietly(_group)
        _group.wait_for_lost_processes()


def _forget_in_fork() -> None:
    """A forked child has the memory of its parent's group but not its threads, so it has not joined one."""
    global _group, _lock, _joining
    if _group is not None:
        _inherited.append(_group)  # finalizers of the parent's objects must not run here
    _group, _lock, _joining = None, threading.RLock(), False


_inherited: list[Group] = []

os.register_at_fork(after_in_child=_forget_in_fork)


@overload
def rpc_sync(
    to: object,
    func: Callable[..., Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T: ...
@overload
def rpc_sync(
    to: object,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T: ...
@python_only
def rpc_sync(
    to: object,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result.

    Args:
        to: a name, a rank or a WorkerInfo.
        func: any callable; it is sent by name if both sides can import it, and by value otherwise.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds for connecting, queueing and running; 0 for no limit; default: the worker's.

    Returns:
        The result, whose tensors are copies.

    Raises:
        RpcTimeoutError: if the result does not arrive in time.
        PeerLostError: if ``to`` died.
        UnknownWorkerError, PayloadError, FunctionNotFoundError: if the call cannot be made.
        Exception: what ``func`` raised, with the remote traceback in its text.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    worker = current_worker()
    send = partial(worker.call, to, func, args, kwargs, timeout, True)  # it waits
    if not profiled_here():
        return worker.decode(worker.send_and_wait(send))
    with caller_range("sync", worker, to, func):
        return worker.decode(worker.send_and_wait(send))


@overload
def rpc_async(
    to: object,
    func: Callable[..., Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RpcFuture[T]: ...
@overload
def rpc_async(
    to: object,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RpcFuture[T]: ...
@python_only
def rpc_async(
    to: object,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RpcFuture[Any]:
    """As :func:`rpc_sync`, but returns a ``torch.futures.Future`` at once.

    You must not change tensors in ``args`` before it is done: where they are sent without a copy (between
    hosts, for example), they are read until then.

    Args:
        to: a name, a rank or a WorkerInfo.
        func: any callable, as for :func:`rpc_sync`.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds for connecting, queueing and running; 0 for no limit; default: the worker's.

    Returns:
        A future of the result. It has the errors of :func:`rpc_sync`, a lost ``to`` included.

    Raises:
        UnknownWorkerError, PayloadError: if the call cannot be made.

    Example:
        >>> future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1), timeout=30)
        >>> future.wait()
        tensor([2., 2.])
    """
    worker = current_worker()
    try:
        with caller_range("async", worker, to, func):
            future = worker.future(worker.call(to, func, args, kwargs, timeout))
    except PeerLostError as e:
        future = worker.replies.failed_future(e)
    return note_future(future)


@overload
def remote(
    to: object,
    func: Callable[..., Future[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    name: str | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: object,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    name: str | None = None,
) -> RRef[T]: ...
@python_only
def remote(
    to: object,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    name: str | None = None,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result.

    Args:
        to: a name, a rank or a WorkerInfo; it becomes the owner.
        func: any callable, as for :func:`rpc_sync`.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds for connecting, queueing and running; 0 for no limit; default: the worker's.
        name: by which all workers find the result (:func:`get_ref`), once it has been made. The name keeps
            the result alive, until ``to`` is lost or leaves, or :func:`remove_ref` takes it back.

    Returns:
        A reference to the result, at once. If the function fails or does not end within ``timeout``, using
        the reference raises the error.

    Raises:
        UnknownWorkerError, PayloadError, PeerLostError: if the call cannot be made.
        DuplicateNameError: if another object has the ``name``; ``func`` is not called then.

    Example:
        >>> rref = rpc.remote("worker1", torch.zeros, args=(2,))
        >>> rref.rpc_sync().add_(1)  # runs on worker1, as do the next calls with this reference
        tensor([1., 1.])
        >>> rref.to_here()
        tensor([1., 1.])
    """
    worker = current_worker()
    with caller_range("remote", worker, to, func):
        if name is not None:
            return remote_named(worker, name, to, func, args, kwargs, timeout)
        return call_remote(worker, to, func, args, kwargs, timeout)


@overload
def checkpoint(to: object, func: Callable[..., T], *args: Any, timeout: float, **kwargs: Any) -> T: ...
@overload
def checkpoint(to: object, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...
def checkpoint(  # type: ignore[misc]  # a ``timeout`` is never passed to ``func``
    to: object, func: Callable[..., Any], *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
) -> Any:
    """As :func:`rpc_sync`, but the callee keeps the arguments until the backward pass, and not the graph.

    It runs ``func`` without a graph, and again when the gradients of its results arrive: with the same
    arguments, random numbers and ``torch.autocast``. So ``func`` must do the same both times, and must not
    change its arguments. All floating-point tensors of the result require grad.

    Outside of an autograd context, and under ``torch.no_grad``, this is :func:`rpc_sync`. So are calls that
    ``func`` makes in turn: they are repeated with it.

    Args:
        to: a name, a rank or a WorkerInfo.
        func: any callable, as for :func:`rpc_sync`.
        args: positional arguments of ``func``.
        timeout: seconds for connecting, queueing and running; 0 for no limit; default: the worker's.
        kwargs: keyword arguments of ``func``.

    Returns:
        The result, whose tensors are copies.

    Raises:
        Exception: as :func:`rpc_sync`; ``backward`` raises what the second run raises.
        AutogradError: if ``func`` has changed an argument in place.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.checkpoint("worker1", torch.exp, x).sum()
        ...     dist_autograd.backward(context_id, [loss])  # worker1 computes exp again
        ...     print(dist_autograd.get_gradients(context_id)[x])
        tensor([2.7183, 2.7183])
    """
    worker = current_worker()

    def send() -> PendingCall:
        with worker.hooks.checkpointing():
            return worker.call(to, func, args, kwargs, timeout, waits=True)

    with caller_range("sync", worker, to, func):
        return worker.decode(worker.send_and_wait(send))


@overload
def checkpoint_async(
    to: object, func: Callable[..., T], *args: Any, timeout: float, **kwargs: Any
) -> RpcFuture[T]: ...
@overload
def checkpoint_async(to: object, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> RpcFuture[T]: ...
def checkpoint_async(  # type: ignore[misc]  # a ``timeout`` is never passed to ``func``
    to: object, func: Callable[..., Any], *args: Any, timeout: float = UNSET_RPC_TIMEOUT, **kwargs: Any
) -> RpcFuture[Any]:
    """As :func:`checkpoint`, but returns a ``torch.futures.Future`` at once, as :func:`rpc_async`.

    Args:
        to: a name, a rank or a WorkerInfo.
        func: any callable, as for :func:`rpc_sync`.
        args: positional arguments of ``func``.
        timeout: seconds for connecting, queueing and running; 0 for no limit; default: the worker's.
        kwargs: keyword arguments of ``func``.

    Returns:
        A future of the result. It has the errors of :func:`checkpoint`.

    Raises:
        UnknownWorkerError, PayloadError: if the call cannot be made.

    Example:
        >>> rpc.checkpoint_async("worker1", torch.exp, torch.zeros(2)).wait()
        tensor([1., 1.])
    """
    with current_worker().hooks.checkpointing():
        return rpc_async(to, func, args, kwargs, timeout)


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and id of a worker.

    Args:
        worker_name: None: this worker.

    Raises:
        UnknownWorkerError: if there is no worker of that name.

    Example:
        >>> rpc.get_worker_info()
        WorkerInfo(id=0, name=worker0)
        >>> rpc.get_worker_info("worker1").id
        1
    """
    membership = current_worker().membership
    return membership.own.info if worker_name is None else membership.find(worker_name).info


def get_worker_infos() -> list[WorkerInfo]:
    """All known members of the group, this worker included, sorted by id.

    Example:
        >>> [info.name for info in rpc.get_worker_infos()]
        ['worker0', 'worker1']
    """
    return sorted((record.info for record in current_worker().membership.all()), key=lambda info: info.id)


def wait_for_workers(names: Sequence[str], timeout: float = UNSET_RPC_TIMEOUT) -> list[WorkerInfo]:
    """Wait until the workers of these ``names`` have joined.

    Args:
        names: the names of the workers.
        timeout: seconds; 0 for no limit; default: that of calls.

    Returns:
        Their infos, in the order of ``names``.

    Raises:
        RpcTimeoutError: if some have not joined in time, with their names.
        ArgumentTypeError: if ``names`` is no list of names.

    Example:
        >>> rpc.wait_for_workers(["worker1"], timeout=30)
        [WorkerInfo(id=1, name=worker1)]
    """
    names = check_names(names, "names")
    worker = current_worker()
    deadline = Deadline.after(worker.resolve_timeout(timeout) or None)
    with blocking_section():
        return [record.info for record in worker.membership.wait_for(names, deadline)]


def on_join(callback: JoinCallback) -> None:
    """Call ``callback(info)`` for every worker that joins from now on, in an engine thread.

    Exceptions of the callback are logged.

    Raises:
        ArgumentTypeError: if ``callback`` cannot be called.

    Example:
        >>> rpc.on_join(lambda info: print(info.name, "has joined"))
    """
    check_callable(callback)
    current_worker().events.on_join(callback)


def on_loss(callback: LossCallback) -> None:
    """Call ``callback(info, reason)`` for every worker that leaves or dies from now on, in an engine thread.

    Exceptions of the callback are logged.

    Raises:
        ArgumentTypeError: if ``callback`` cannot be called.

    Example:
        >>> rpc.on_loss(lambda info, reason: print(info.name, "is lost:", reason))
    """
    check_callable(callback)
    current_worker().events.on_loss(callback)


def get_stats() -> dict[str, Any]:
    """Statistics of this worker: bytes sent and received by path, shared memory, and flow control.

    Returns:
        ``sent_by_path`` and ``received_by_path``: bytes sent ``inline`` (small values, beside the header), in
        ``frames`` (of a socket) and in the ``arena`` (shared memory). ``arena``: its ``limit``, the
        ``memory`` it takes, ``bytes_leased`` to peers, ``blocks_in_use`` here of those leased by peers, and
        the number of messages sent in frames instead (``fallbacks``, by reason). ``inflight``: the ``limit``
        of bytes in flight to a peer through sockets, and by worker id the ``bytes`` in flight and what is
        ``waiting`` for credit. ``kept_warm``: bytes of free memory kept for the next large tensor from
        another host.

    Example:
        >>> rpc.get_stats()["arena"]["limit"]  # doctest: +SKIP
        8589934592
    """
    return current_worker().mailbox.statistics()


def get_debug_info() -> dict[str, Any]:
    """What this worker is doing; see :func:`zmqgrad.rpc.debug.debug_info`.

    Example:
        >>> rpc.get_debug_info()["pending_calls"]
        []
    """
    return debug_info(current_worker())


def is_available() -> bool:
    """Whether RPC can be used in this process: always True.

    Example:
        >>> rpc.is_available()
        True
    """
    return True


def get_rpc_timeout() -> float:
    """The default timeout of calls in seconds; 0: no limit.

    Example:
        >>> rpc.get_rpc_timeout()
        20.0
    """
    return current_worker().default_timeout


def set_rpc_timeout(seconds: float) -> None:
    """Set the default timeout of this worker's calls.

    Args:
        seconds: 0 for no limit.

    Raises:
        ConfigurationError: if it is negative.

    Example:
        >>> rpc.set_rpc_timeout(5)
        >>> rpc.get_rpc_timeout()
        5.0
    """
    current_worker().default_timeout = check_timeout(seconds)


_set_rpc_timeout = set_rpc_timeout
