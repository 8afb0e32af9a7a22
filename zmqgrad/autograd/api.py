"""The public API: names, arguments and defaults of ``torch.distributed.autograd``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from zmqgrad.autograd.context import ActiveContext, Context, check_not_nested
from zmqgrad.autograd.engine.participant import MODES
from zmqgrad.autograd.forwarding import autograd_of
from zmqgrad.autograd.grads import Input, RequestedInputs
from zmqgrad.autograd.profiling import PASS_NAME, profiled
from zmqgrad.autograd.roots import check_inputs, check_outputs, check_roots
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.current import current_worker
from zmqgrad.rpc.rref.api import RRef
from zmqgrad.rpc.torch_internals import python_only
from zmqgrad.wire.messages import PassOptions
from zmqgrad.wire.tensors.streams import wait_for_default_streams


class context:
    """Context manager that records RPCs for backward passes. Yields the id of the context.

    Leaving it releases the context, with its gradients, on all workers. The object may be entered again after
    that, which creates a new context.

    Raises:
        AutogradError: if the calling thread is inside a context already, or this object has been entered and
            not left.
        NotInitializedError: if RPC is not initialized.

    Example:
        >>> with dist_autograd.context() as context_id:
        ...     x = torch.ones(2, requires_grad=True)
        ...     loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     print(dist_autograd.get_gradients(context_id)[x])
        tensor([3., 3.])
    """

    _context: Context | None = None  # these three are set as far as it is entered
    _reading: Any = None
    _activation: ActiveContext | None = None

    def __init__(self) -> None:
        self._entered = threading.Lock()

    def __enter__(self) -> int:
        worker = current_worker()
        if check_not_nested() is not None:
            autograd_of(worker).releases.release_left()
        if not self._entered.acquire(blocking=False):
            raise AutogradError("This context() has been entered already: make one for each 'with'")
        try:
            autograd = autograd_of(worker)
            self._releases = autograd.releases
            self._reading = autograd.versions.reading(fresh=True)
            self._reading.__enter__()
            self._context = autograd.begin()
            self._context.entered_by = weakref.ref(self)
            activation = ActiveContext(self._context)
            activation.__enter__()
            self._activation = activation
            return self._context.id
        except BaseException:  # Ctrl-C: nobody would leave it
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered.locked():
            raise AutogradError("This context() is left without having been entered, or for the second time")
        self._leave()

    def _leave(self) -> None:
        try:
            if self._activation is not None:
                self._activation.__exit__()
        finally:  # a token of another thread cannot be reset, but the context ends nevertheless
            try:
                if self._reading is not None:
                    self._reading.__exit__(None, None, None)
            finally:
                if self._context is not None:
                    self._context.released = True
                    self._releases.release_left()
                self._context = self._reading = self._activation = None
                self._entered.release()


@python_only
def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: str = "auto",
    create_graph: bool = False,
) -> None:
    """Run one backward pass from ``roots`` on all workers of the context.

    Gradients of leaves are accumulated in the context, on the worker of each leaf; see
    :func:`get_gradients`. The first error ends the pass on all workers; as with ``Tensor.backward``, some
    gradients have been accumulated by then and some have not.

    Args:
        context_id: the id that :class:`context` yielded.
        roots: local scalars (one element, any shape) that require grad.
        retain_graph: whether to keep the graphs for another pass.
        mode: "fast" expects, as torch does, that every part of the graph which one gradient reaches gets all
            of its gradients. If a part still waits when no message is in flight, it raises an error that
            names the calls without a gradient (torch waits until its timeout). A call that no waiting part
            depends on may stay without one: that is no error. "smart" first finds out which calls will never
            get a gradient, by a round of small messages. "auto" starts like fast and continues like smart
            only where fast would raise. After a pass with ``create_graph``, fast is the same as auto: what
            the first pass sent is usually not all that the second one reaches.
        create_graph: whether to record the pass itself on all workers, so that its gradients require grad and
            can be differentiated in the same context. Implies ``retain_graph``.

    Raises:
        AutogradError: if the context is not known here, a root is invalid, or, in fast mode, a part of the
            graph waits for a gradient that will never arrive.
        Exception: any error of a backward function on any worker, with its own type; it is a RuntimeError as
            well, and names the worker.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.exp, args=(x,)).sum()])
        ...     print(x.grad, len(dist_autograd.get_gradients(context_id)))
        None 1
    """
    _check_mode(mode)
    autograd = autograd_of(current_worker())
    found = autograd.contexts.find(context_id)
    options = PassOptions(bool(retain_graph or create_graph), bool(create_graph))
    with profiled(PASS_NAME):
        autograd.participant.run(found, check_roots(roots), options, mode)


def grad(
    context_id: int,
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: Input | Sequence[Input],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    mode: str = "auto",
) -> tuple[torch.Tensor | None, ...]:
    """Compute the gradients of ``outputs`` with respect to ``inputs``, as ``torch.autograd.grad``.

    Nothing is accumulated, in the context or elsewhere.

    Args:
        context_id: the id that :class:`context` yielded.
        outputs: tensors of this worker, of any shape.
        inputs: tensors of this worker, or RRefs to tensors of any worker; all require grad.
        grad_outputs: the gradients of ``outputs``; None, for all or one of them: ones for a scalar.
        retain_graph: whether to keep the graphs for another pass; None: if ``create_graph``.
        create_graph: whether the gradients can be differentiated in the same context.
        allow_unused: whether inputs without a gradient give None instead of an error.
        mode: as for :func:`backward`.

    Returns:
        The gradient of each input, on this worker. That of an RRef arrives by a call in the context: with
        ``create_graph`` a later pass leads back through it.

    Raises:
        AutogradError: if the context is not known here, an argument is invalid, or an input is not used.
        Exception: as :func:`backward`.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.pow, args=(x, 3)).sum()
        ...     dist_autograd.grad(context_id, y, x)
        (tensor([3., 3.]),)
    """
    _check_mode(mode)
    worker = current_worker()
    autograd = autograd_of(worker)
    found = autograd.contexts.find(context_id)
    roots, gradients = check_outputs(outputs, grad_outputs, create_graph)
    wanted = check_inputs(inputs, RRef)
    keep = create_graph if retain_graph is None else retain_graph
    options = PassOptions(bool(keep or create_graph), bool(create_graph), accumulate=False)
    requested = RequestedInputs(worker, found, options, wanted)
    with profiled(PASS_NAME):
        autograd.participant.run(found, roots, options, mode, gradients, requested)
    if not allow_unused and any(each is None for each in requested.gradients):
        unused = ", ".join(f"inputs[{i}]" for i, each in enumerate(requested.gradients) if each is None)
        raise AutogradError(
            f"One of the differentiated Tensors appears to not have been used in the graph: {unused}. "
            f"Set allow_unused=True if this is the desired behavior."
        )
    wait_for_default_streams([each for each in requested.gradients if each is not None])
    return tuple(requested.gradients)


@python_only
def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that all backward passes of a context have accumulated on this worker.

    Args:
        context_id: the id that :class:`context` yielded.

    Returns:
        A dictionary from leaf tensors to gradients.

    Raises:
        AutogradError: if the context is not known here.
        ArgumentTypeError: if ``context_id`` is not an int.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.neg, args=(x,)).sum()])
        ...     dist_autograd.get_gradients(context_id)[x]
        tensor([-1., -1.])
    """
    gradients = get_context(context_id).gradients()
    wait_for_default_streams(gradients.values())
    return gradients


def _check_mode(mode: object) -> None:
    if mode not in MODES:
        raise AutogradError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")


def gradients_of(context_id: int, params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each of ``params`` in a context; None where there is none.

    Faster than :func:`get_gradients` followed by look-ups: the hash of a tensor is a Python function.

    Raises:
        AutogradError: if the context is not known here.
    """
    gradients = get_context(context_id).gradients_of(params)
    wait_for_default_streams(gradients)
    return gradients


def get_context(context_id: int) -> Context:
    """Return the state of a context on this worker.

    Raises:
        AutogradError: if it is not known here.
    """
    return autograd_of(current_worker()).contexts.find(context_id)
