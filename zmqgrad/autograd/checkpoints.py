"""Checkpointed calls on the callee: it keeps the arguments, not the graph, and computes again.

    caller                     callee

    x -- send   - - - - - ->   recv -- x -- send of the call
                                            (the function, without a graph)
    loss -- y -- recv  <- -    send -- y -- recv of the call

To the plan of a pass, the call is a message of the callee to itself: its arguments are sent, and its results
are received. When the gradients of the results are complete, the function runs again, with a graph. An inner
pass leads them through that graph, to the arguments (where the outer pass continues) and to what else the
function has used. So each call runs twice, however calls are nested: those that a recomputation makes are not
checkpointed again.

The inner pass runs in one thread, unless the function has made calls. Then it is a pass of all workers, and
the calls carry its number, so that no other pass waits for their gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from zmqgrad.autograd.context import Context, recomputation, set_active_context
from zmqgrad.autograd.engine.executor import LocalPass
from zmqgrad.autograd.graph.node import Gradient
from zmqgrad.autograd.repeated_calls import is_repeated, random_states, restored
from zmqgrad.autograd.send_recv import RecvMetadata, Send, attach_recv, edge_or_leaf, follow
from zmqgrad.autograd.torch_internals import as_graph_task, map_tensors, tensor_hooks
from zmqgrad.errors import AutogradError
from zmqgrad.rpc.calls import describe
from zmqgrad.rpc.functions import MARK, DeferredResult, check_result
from zmqgrad.rpc.serialization.pickler import tensors_of
from zmqgrad.rpc.worker import Worker
from zmqgrad.runtime.blocking import blocking_section, holding
from zmqgrad.wire.messages import PassOptions, Result

checkpointed: ContextVar[CheckpointedCall | None] = ContextVar("zmqgrad_autograd_checkpointed", default=None)
"""The checkpointed call that the calling thread serves."""

_turn = threading.Lock()
"""Held by one recomputation of the process at a time: it sets the random generators, and takes memory."""


class Passes(Protocol):
    """Runs backward passes of all workers."""

    def run(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        options: PassOptions,
        mode: str,
        gradients: Sequence[torch.Tensor] | None = None,
        *,
        pass_id: int | None = None,
    ) -> None:
        """Run a pass, and return when it has finished."""

    def forget(self, context: Context, pass_id: int) -> None:
        """Free on all workers what a recomputation for this pass has left there."""


class CheckpointedCall:
    """One call. Its send, which the context holds, keeps it.

    Args:
        worker: this worker.
        context: the context of the call.
        caller: the worker that made it.
        tensors: all tensors among the arguments. Those that require grad are replaced in the list: the
            function gets outputs of a recv of this call, where inner passes end. (Leaves would differ: under
            autocast, the casts of leaves are cached.)
    """

    def __init__(self, worker: Worker, context: Context, caller: int, tensors: list[torch.Tensor]) -> None:
        self._worker = worker
        self._context = context
        self._caller = caller
        wanted = [i for i, each in enumerate(tensors) if each.requires_grad]
        self._edges = tuple([edge_or_leaf(tensors[i]) for i in wanted])
        if wanted:
            recv = RecvMetadata(context.id, 0, worker.id, len(wanted), arguments_of=weakref.ref(self))
            with torch.enable_grad():
                arguments, _ = attach_recv(recv, [tensors[i].detach() for i in wanted])
            for i, each in zip(wanted, arguments, strict=True):
                tensors[i] = each
        self._tensors = [(each, each._version) for each in tensors]
        self._lock = threading.Lock()  # held by one pass at a time; guards the next
        self._found: Sequence[Gradient] = ()  # the gradients of the arguments
        self._forms: list[tuple[Any, ...]] = []  # of the tensors of the result
        self._number = 0  # among the checkpointed calls of this worker in the context

    # ---- the first time ---------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``function`` without a graph, and return its result.

        Raises:
            AutogradError: if it has changed an argument in place.
            Exception: what it raises.
        """
        self._function, self._args, self._kwargs = function, args, kwargs
        self._name = f"{describe(function)} on {self._worker.name}"
        self._moment = self._parameters.now()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
        ]
        self._caches_casts = torch.is_autocast_cache_enabled()
        states = random_states()
        token = is_repeated.set(True)
        torch.set_autocast_cache_enabled(False)  # casts without history are not for others, who share it
        try:
            with torch.no_grad():
                value = function(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(self._caches_casts)
            is_repeated.reset(token)
        self._check_arguments()
        may_still_draw = hasattr(function, MARK) or isinstance(value, DeferredResult)
        unchanged = all(map(torch.equal, states, random_states()))
        self._states = [] if unchanged and not may_still_draw else states
        return map_tensors(_as_if_with_history, value)

    def record(self, result: Result, tensors: Sequence[torch.Tensor]) -> tuple[Result, list[torch.Tensor]]:
        """Record the call in its context, before its result is sent.

        Args:
            result: the reply.
            tensors: all tensors in it.

        Returns:
            The reply, whose floating-point tensors require grad, and these tensors with their history.
        """
        self._forms = list(map(_form, tensors))
        wanted = [i for i, each in enumerate(tensors) if _may_require_grad(each)]
        if not wanted:
            return result, []
        outputs = [tensors[i].detach() for i in wanted]
        number, own = self._worker.ids.next(), self._worker.id
        self._number = self._context.number_call()
        with torch.enable_grad():
            outputs = self._context.receive(number, own, outputs, range(len(outputs)))
        what = f"the arguments of {self._name}, which computes again"
        self._context.add_send(Send(number, own, self._edges, what, checkpoint=self))
        payload = replace(result.payload, tensors=result.payload.tensors.require_grad(wanted))
        return replace(result, payload=payload), outputs

    # ---- again ------------------------------------------------------------------------------------------

    def backward(self, passes: Passes, outer: LocalPass, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Compute again, and lead ``gradients`` through that.

        Args:
            passes: runs inner passes that lead to other workers.
            outer: this worker's part of the pass.
            gradients: of the results, as far as they may require grad.

        Returns:
            The gradients of the arguments that require grad; None where the function does not lead there.

        Raises:
            AutogradError: if the function now gives something else, or has changed its arguments; and where
                passes with these options are not possible.
            Exception: what the function raises, or a backward function.
        """
        if outer.options.create_graph:
            raise AutogradError(
                f"create_graph=True: the gradients of {self._name} cannot be differentiated, as the call is "
                f"checkpointed and its graph is not kept; make it by rpc_sync or rpc_async instead"
            )
        number = self._worker.ids.next()
        with holding(self._lock):
            self._found = [None] * len(self._edges)
            self._drop_hooks()
            try:
                self._lead_through(passes, outer, gradients, number)
                return list(self._found)
            finally:
                self._found = ()
                self._drop_hooks()
                passes.forget(self._context, number)

    def receive(self, gradients: Sequence[Gradient]) -> None:
        """Take the gradients of the arguments, which an inner pass has led there."""
        self._found = gradients

    def _lead_through(
        self, passes: Passes, outer: LocalPass, gradients: Sequence[Gradient], number: int
    ) -> None:
        origin = outer.origin_of(self._worker.id, self._number)
        options = PassOptions(retain_graph=True, accumulate=outer.options.accumulate, origin=origin)
        with holding(_turn):
            with self._parameters.computing_again(self._moment, self._name):
                outputs = self._run_again(number)
            found = zip(outputs, gradients, strict=True)
            pairs = [(y, g) for y, g in found if y.requires_grad and g is not None]
            if not pairs:
                return
            roots, given = [y for y, _ in pairs], [g for _, g in pairs]
            del outputs, pairs
            captures = () if outer.captures is None else outer.captures.again()
            inner = LocalPass(self._context, self._worker.id, options, roots, captures, (), pass_id=number)
            if not inner.leads_away:
                inner.run_inside(outer, given)
                return
        del inner
        if outer.captures is not None:
            raise AutogradError(
                f"zmqgrad.autograd.grad does not lead through the calls that {self._name} makes, as it is "
                f"checkpointed: use backward, or make the call by rpc_sync or rpc_async instead"
            )
        passes.run(self._context, roots, options, "auto", given, pass_id=number)

    def _run_again(self, number: int) -> list[torch.Tensor]:
        """Run the function with a graph. Returns its results, as far as they may require grad."""
        self._check_arguments()
        set_active_context(self._context)
        recomputation.set((number, (0, 0)))
        is_repeated.set(True)
        with ExitStack() as stack:
            stack.enter_context(as_graph_task(None))
            stack.enter_context(torch.enable_grad())
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self._caches_casts))
            stack.enter_context(restored(self._states))
            value = check_result(self._function, self._function(*self._args, **self._kwargs))
            if isinstance(value, DeferredResult):
                with blocking_section():
                    value.future.wait()
                value = value.value()
            constants: list[torch.Tensor] = []  # of subclasses, which the first run has sent as others
            tensors = self._tensors_of(map_tensors(partial(_as_before, constants), value))
            for each in constants:
                each.requires_grad_(False)  # so it accumulates nothing
            forms = list(map(_form, tensors))
            if forms != self._forms:
                raise AutogradError(
                    f"{self._name} gave {_show(forms)} when it was computed again for the backward pass, and "
                    f"{_show(self._forms)} before: a checkpointed function must do the same both times"
                )
            return [follow(y) if y.is_leaf else y for y in tensors if _may_require_grad(y)]

    def _tensors_of(self, value: Any) -> list[torch.Tensor]:
        """Return the tensors in a result, in the order in which they are sent."""
        if type(value) is torch.Tensor:
            return [value]
        requester = self._worker.membership.record(self._caller)
        return tensors_of(value, self._worker.contexts.for_replies(requester))

    def _drop_hooks(self) -> None:
        """Remove the hooks that a run has registered at the arguments: the next one registers them again."""
        for each, _ in self._tensors:
            tensor_hooks(each).clear()

    def _check_arguments(self) -> None:
        """Check that nothing has changed the arguments in place.

        Raises:
            AutogradError: if something has.
        """
        for each, version in self._tensors:
            if each._version != version:
                raise AutogradError(
                    f"an argument of {self._name}, [{each.type()} {list(each.shape)}], has been modified by "
                    f"an inplace operation (it is at version {each._version}; expected version {version}), "
                    f"but the checkpointed call is computed again from it: change a copy (.clone())"
                )

    @property
    def _parameters(self) -> Any:
        return self._worker.hooks.extensions["autograd"].versions


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _may_require_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a result is taken to require grad: the first run has no graph that would tell."""
    return tensor.is_floating_point() or tensor.is_complex()


def _as_if_with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a result as it is sent. Only subclasses with a history are sent with one."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not _may_require_grad(tensor):
        return tensor
    sent = tensor.detach().requires_grad_()
    vars(sent).update({name: value for name, value in vars(tensor).items() if name not in vars(sent)})
    return sent


def _as_before(constants: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a result as the first run has sent it; notes in ``constants`` one made for that."""
    sent = tensor if tensor.requires_grad else _as_if_with_history(tensor)
    if sent is not tensor:
        constants.append(sent)
    return sent


def _show(forms: Sequence[tuple[Any, ...]]) -> str:
    shown = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype, _ in forms)
    return f"{len(forms)} tensors ({shown})" if forms else "no tensors"
