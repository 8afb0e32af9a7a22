"""A distributed autograd context on one worker: its sends, its gradients, its peers.

A worker creates its part of a context at the first message of it. When the ``with`` block is left, all
workers release theirs. The active context of a thread is a context variable; engine threads set it in each
call.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zmqgrad.autograd.graph.sums import OrderedSum, Place, SumOfCalls, added
from zmqgrad.autograd.graph.validation import in_layout_of
from zmqgrad.autograd.send_recv import RecvMetadata, Send, attach_recv, line_of_program, record_send
from zmqgrad.autograd.torch_internals import storage_address
from zmqgrad.errors import ArgumentTypeError, AutogradError
from zmqgrad.rpc.calls import Description, describe
from zmqgrad.rpc.hooks import Hooks
from zmqgrad.wire.ids import IdSource, show_id, split_id

if TYPE_CHECKING:
    from zmqgrad.autograd.engine.executor import LocalPass
    from zmqgrad.autograd.versions import ParameterVersions

MAX_RELEASED_IDS = 10_000
"""How many ids of released contexts are kept, so that a late message does not create a context again."""

MAX_ENDED_PASSES = 16
"""After this many passes in one context, its workers are notified to forget all but the last."""


Part = tuple[torch.Tensor, torch.Tensor, bool, Place]
"""A leaf, a gradient to add, whether anything else holds that, and its place among those of the pass."""


class Context:
    """One context on one worker."""

    has_history = False
    """Whether a pass with ``create_graph`` was recorded: later passes need not reach all sends."""
    keeps_graphs = False
    """Whether a checkpointed call has used a tensor of this worker that is no leaf, as it will again: so
    passes keep what is saved for it, and before it on other workers."""
    computes_again = False
    """Whether a checkpoint has made a call of this worker, which a pass may make again."""
    entered_by: Callable[[], object] | None = None
    """A weak reference to what was entered by ``with``; None: it began on another worker."""
    _last_send = 0
    _checkpointed_calls = 0

    def __init__(self, context_id: int, read_at: int = 0, released: bool = False) -> None:
        self.id = context_id
        self.read_at = read_at
        """The latest step of shared parameters that it saw here when it began, or after its own last step."""
        self.pending_steps: Collection[int] = ()
        """Later ones of its own, which were not published when it took the last."""
        self.released = released
        """Whether the context has ended. Messages still in flight are not recorded any more."""
        # Guards sends, recvs, gradients, open sums and storages. A signal handler may call while it is held.
        self._lock = threading.RLock()
        self._sends: dict[int, Send] = {}
        self._recvs: dict[int, Any] = {}  # nodes of torch's graph, by autograd id
        # By id of the leaf, with the leaf: the hash of a tensor is a slow Python function.
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # What the latest pass adds to them in any order, with the id of the pass.
        self._open_sums: dict[int, tuple[torch.Tensor, int, OrderedSum]] = {}
        # What checkpointed calls add, apart from them: it comes at any time in a pass.
        self._sums_of_calls: dict[int, tuple[torch.Tensor, SumOfCalls]] = {}
        self._storages: set[int] = set()  # addresses of the gradients' memory
        self._peers: set[int] = set()  # changed by atomic operations only
        self.add_peer: Callable[[int], None] = self._peers.add
        """Add a worker that participates, and will be notified of the release."""
        self.running: dict[int, Callable[[BaseException], None]] = {}
        """Fails a pass that runs and began here, by pass id. Changed by atomic operations only."""
        # A signal handler may describe the context, or begin a pass in it, while it is held.
        self.pass_lock = threading.RLock()  # guards the three below
        self.passes: dict[int, LocalPass] = {}
        """This worker's part of each backward pass, by pass id."""
        self._ended: list[int] = []  # passes that began here and that workers may still hold
        self._forgotten: set[int] = set()  # ids of passes that a late message must not start again

    def end(self) -> None:
        """Mark the context as released, and drop its passes; those that run fail."""
        self.released = True  # before its peers are read: see Autograd.outgoing; and before add_pass
        with self.pass_lock:
            for each in self.passes.values():
                each.abandon()
            self.passes.clear()  # they refer to the context: the cycle would keep graphs and gradients alive
        with self._lock:
            for send in filter(_checkpoint, list(self._sends.values())):
                del self._sends[send.autograd_id]  # so do checkpointed calls
        for fail in list(self.running.values()):
            fail(self._released_error())

    def _released_error(self) -> AutogradError:
        return AutogradError(
            f"autograd context {show_id(self.id)} has been released during a backward pass: leave its "
            "'with' block only when all passes in it have returned"
        )

    def add_pass(self, number: int, local_pass: LocalPass) -> None:
        """Add this worker's part of a pass. The caller holds ``pass_lock``.

        Raises:
            AutogradError: if the context has been released.
        """
        if self.released:
            raise self._released_error()
        self.passes[number] = local_pass

    def peers(self) -> set[int]:
        """Return the workers that this one has exchanged messages of the context with."""
        return set(self._peers)

    def add_send(self, send: Send) -> None:
        """Add a send whose message is about to be sent."""
        with self._lock:
            self._sends[send.autograd_id] = send
            if send.autograd_id > self._last_send:
                self._last_send = send.autograd_id

    def record(
        self,
        ids: IdSource,
        peer: int,
        tensors: Iterable[torch.Tensor],
        what: Description,
        reply: bool = False,
    ) -> int:
        """Add a send of those of ``tensors`` that require grad, which are about to be sent to ``peer``.

        Args:
            ids: makes the autograd id.
            peer: the worker that will receive them.
            tensors: all tensors of the message.
            what: names the call, for errors.
            reply: whether they are sent in a reply, for which the program has no line.

        Returns:
            The autograd id; 0 if none of them requires grad.
        """
        differentiable = list(filter(_requires_grad, tensors))
        if not differentiable:
            return 0
        autograd_id = ids.next()
        line = ("", 0) if reply else line_of_program(4)  # behind this, its caller, and what sends for that
        self.add_send(
            record_send(autograd_id, peer, differentiable, describe(what), line, *recomputation.get())
        )
        return autograd_id

    def number_call(self) -> int:
        """Return the number of a checkpointed call on this worker, from 0."""
        with self._lock:
            self._checkpointed_calls += 1
            return self._checkpointed_calls - 1

    def remove_send(self, autograd_id: int) -> None:
        """Remove a send whose message could not be sent."""
        with self._lock:
            self._sends.pop(autograd_id, None)

    def sends(self, pass_id: int = 0) -> list[Send]:
        """Return the sends so far that a pass leads through: those of others' recomputations are not."""
        with self._lock:
            found = list(self._sends.values())
        if any(map(_recomputation, found)):
            # Calls are made again at the same time, in any order; gradients are added in the order of sends.
            found = sorted(
                [send for send in found if send.recomputation in (0, pass_id)], key=_place_in_program
            )
        return found

    def recvs(self) -> dict[int, Any]:
        """Return the recv nodes by autograd id, in the order in which their messages arrived."""
        with self._lock:
            return dict(self._recvs)

    def receive(
        self,
        autograd_id: int,
        peer: int,
        tensors: list[torch.Tensor],
        requiring_grad: Sequence[int],
        in_reply: bool = False,
    ) -> list[torch.Tensor]:
        """Attach a recv to received tensors.

        Args:
            autograd_id: the id of the send.
            peer: the worker that sent them.
            tensors: all tensors of the message.
            requiring_grad: the indices of those that require grad.
            in_reply: whether they arrived in a reply, not in a call.

        Returns:
            ``tensors``, in which those at ``requiring_grad`` are outputs of the recv.
        """
        if requiring_grad:
            metadata = RecvMetadata(
                self.id, autograd_id, peer, len(requiring_grad), in_reply, self._last_send
            )
            every = len(requiring_grad) == len(tensors)
            outputs, node = attach_recv(metadata, tensors if every else [tensors[i] for i in requiring_grad])
            if not recomputation.get()[0]:  # the others live as long as their part of the graph
                self._recvs[autograd_id] = node
            if every:
                return list(outputs)
            for i, output in zip(requiring_grad, outputs, strict=True):
                tensors[i] = output
        return tensors

    def end_pass(self, number: int) -> list[int]:
        """Record the end of a pass that began here. Returns the passes that all workers may forget now."""
        with self.pass_lock:
            self._ended.append(number)
            if len(self._ended) < MAX_ENDED_PASSES:
                return []
            *old, last = self._ended
            self._ended = [last]
            return old

    def forget_passes(self, numbers: Sequence[int]) -> list[int]:
        """Forget passes that have ended or failed. Returns those that had not been forgotten before."""
        with self.pass_lock:
            fresh = [number for number in numbers if number not in self._forgotten]
            self._forgotten.update(fresh)
            for number in fresh:
                if number in self.passes:
                    self.passes.pop(number).abandon()
        with self._lock:
            for each in [send for send in list(self._sends.values()) if send.recomputation in fresh]:
                del self._sends[each.autograd_id]
        for number in fresh:
            self.close_inner_pass(number)
        return fresh

    def close_inner_pass(self, number: int) -> None:
        """Add what an inner pass, which has ended, has produced to what others have."""
        with self._lock:
            for _, each in self._sums_of_calls.values():
                each.close(number)

    def local_passes(self) -> dict[int, LocalPass]:
        """Return the passes that this worker has taken part in and has not forgotten, by id."""
        with self.pass_lock:
            return dict(self.passes)

    def was_repeated(self, number: int) -> bool:
        """Whether a recomputation for this pass has left anything here that leads to other workers."""
        with self._lock:
            return number in self.passes or any(s.recomputation == number for s in list(self._sends.values()))

    def is_forgotten(self, number: int) -> bool:
        """Whether this pass was forgotten. The caller holds ``pass_lock``."""
        return number in self._forgotten

    def accumulate(
        self, leaf: torch.Tensor, gradient: torch.Tensor, shared: bool = False
    ) -> torch.Tensor | None:
        """Add ``gradient`` to the gradient of ``leaf``, unless the leaf no longer requires grad.

        Args:
            leaf: the leaf.
            gradient: what to add.
            shared: whether anything else holds ``gradient``.

        Returns:
            The sum; for a leaf that no longer requires grad what it has, if anything.
        """
        if not leaf.requires_grad:
            return self.gradient(leaf)
        with self._lock:
            self._close_sums((id(leaf),))
            present = self._gradients.get(id(leaf))
            total = self._unshared(shared, gradient) if present is None else added(present[1], gradient)
            return self._store(leaf, total)

    def accumulate_parts(self, parts: Iterable[Part], of: int) -> None:
        """As :meth:`accumulate`, where the pass ``of`` produces several gradients of a leaf, in any order."""
        with self._lock:
            for leaf, gradient, shared, place in parts:
                if not leaf.requires_grad:
                    continue
                found = self._open_sums.get(id(leaf))
                if found is None or found[1] != of:
                    if found is not None:
                        self._close_sums((id(leaf),))
                    found = self._open_sums[id(leaf)] = leaf, of, OrderedSum()
                self._add_part(found[2], place, gradient, shared)

    def accumulate_of_call(self, parts: Iterable[Part], inner_pass: int, origin: Sequence[int]) -> None:
        """As :meth:`accumulate_parts`, in an inner pass: its calls are added in a fixed order, too.

        Args:
            parts: what to add.
            inner_pass: the id of the pass.
            origin: what it is a part of (see ``PassOptions``).
        """
        of, *way, number = origin
        with self._lock:
            for leaf, gradient, shared, place in parts:
                if not leaf.requires_grad:
                    continue
                _, total = self._sums_of_calls.get(id(leaf), (leaf, None))
                if total is None or total.of != of:
                    total = SumOfCalls(of, None if total is None else total.total())
                    self._sums_of_calls[id(leaf)] = leaf, total
                self._add_part(total.of_call(inner_pass, (tuple(way), number)), place, gradient, shared)

    def _add_part(self, total: OrderedSum, place: Place, gradient: torch.Tensor, shared: bool) -> None:
        neighbour = total.add(place, gradient, partial(self._unshared, shared))
        if neighbour is not None:
            self._storages.discard(storage_address(neighbour))

    def _close_sums(self, leaves: Iterable[int], *, of_calls: bool = False) -> None:
        """Add the open sums of ``leaves``, given by ids, to their gradients. The caller holds the lock."""
        for key in leaves if self._open_sums or (of_calls and self._sums_of_calls) else ():
            if key in self._open_sums:
                leaf, _, parts = self._open_sums.pop(key)
                self._add(leaf, parts.total())
            if of_calls and key in self._sums_of_calls:
                leaf, calls = self._sums_of_calls.pop(key)
                self._add(leaf, calls.total())

    def _add(self, leaf: torch.Tensor, total: torch.Tensor | None) -> None:
        present = self._gradients.get(id(leaf))
        if total is not None:
            self._store(leaf, total if present is None else added(present[1], total))

    def _store(self, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        laid_out = in_layout_of(leaf, gradient)
        self._gradients[id(leaf)] = leaf, laid_out
        return laid_out

    def replace(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Set the gradient of ``leaf``, or remove it."""
        with self._lock:
            self._close_sums((id(leaf),), of_calls=True)
            if gradient is None:
                self._gradients.pop(id(leaf), None)
            else:
                self._store(leaf, gradient)

    def _unshared(self, shared: bool, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient``, or a copy of it if its memory is used elsewhere. The caller holds the lock."""
        if gradient.requires_grad:  # its own graph may hold it
            with torch.enable_grad():
                return gradient.clone()
        if gradient.layout is not torch.strided:
            return gradient.clone() if shared else gradient
        if gradient._is_zerotensor():  # it has no memory at all, and is immutable
            gradient = gradient.clone()
        address = storage_address(gradient)
        if shared or not address or address in self._storages or 0 in gradient.stride():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            address = storage_address(gradient)
        self._storages.add(address)
        return gradient

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of ``leaf`` so far."""
        return self.gradients_of((leaf,))[0]

    def gradients_of(self, leaves: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradient so far of each of ``leaves``; None where there is none."""
        with self._lock:
            ids = list(map(id, leaves))
            self._close_sums(ids, of_calls=True)
            return [None if each is None else each[1] for each in map(self._gradients.get, ids)]

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of all leaves so far."""
        with self._lock:
            self._close_sums([*self._open_sums, *self._sums_of_calls], of_calls=True)
            return dict(self._gradients.values())

    def __repr__(self) -> str:
        return f"<Context {show_id(self.id)}: {len(self._sends)} sends, {len(self._gradients)} gradients>"


_requires_grad: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")
_recomputation: Callable[[Send], int] = operator.attrgetter("recomputation")
_checkpoint: Callable[[Send], Any] = operator.attrgetter("checkpoint")


def _place_in_program(send: Send) -> tuple[int, tuple[int, int], int]:
    """Where a send of a recomputation comes among others; those before it keep their order."""
    return (1, send.request, send.autograd_id) if send.recomputation else (0, (0, 0), 0)


_active_context: ContextVar[Context | None] = ContextVar("zmqgrad_autograd_context", default=None)
recomputation: ContextVar[tuple[int, tuple[int, int]]] = ContextVar(
    "zmqgrad_autograd_recomputation", default=(0, (0, 0))
)
"""The number of the pass for which the calling thread computes again (0: it does not), and which request it
serves meanwhile (its caller, and its number there)."""

_wants_result_grad: ContextVar[bool] = ContextVar("zmqgrad_autograd_wants_result_grad", default=True)


pass_context: ContextVar[Context | None] = ContextVar("zmqgrad_autograd_pass_context", default=None)
"""The context of the pass that the calling thread computes for. What a checkpoint of torch calls again
meanwhile belongs to it; other calls only if it is the active one."""

own_context: Callable[[], Context | None] = _active_context.get
"""Returns the context that the calling thread records for, although that may have been released."""
set_own_context: Callable[[Context | None], object] = _active_context.set
"""Sets the context that the calling thread records for; None to record nothing."""


def active_context() -> Context | None:
    """Return the context that the calling thread records for, unless it has been released."""
    context = own_context()
    return None if context is None or context.released else context


def check_not_nested() -> Context | None:
    """Check that the calling thread has no active context.

    Returns:
        A context that it has nevertheless, but not inside of a ``with``: Ctrl-C came as that was left. It
        counts as released from now on.

    Raises:
        AutogradError: if it has one.
    """
    context = active_context()
    if context is not None and context.entered_by is not None and context.entered_by() is None:
        context.released = True
        return context
    if context is not None:
        raise AutogradError("Already have an autograd context id for this thread: contexts do not nest")
    return None


def set_active_context(context: Context | None, result: bool = True) -> None:
    """Set the active context of the calling thread, until its context variables are reset.

    Args:
        context: the context; None to record nothing.
        result: whether to record the reply of the call that the thread serves, too.
    """
    _active_context.set(context)
    _wants_result_grad.set(result)


def wants_result_grad() -> bool:
    """Whether the caller of what this thread runs will differentiate its result."""
    return _wants_result_grad.get()


class ActiveContext:
    """Context manager that sets the active context of the calling thread; None to record nothing."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _active_context.set(self._context)

    def __exit__(self, *exc: object) -> None:
        _active_context.reset(self._token)


class Contexts:
    """The contexts of one worker.

    Args:
        hooks: have what records their begin and end.
        versions: the shared parameters, if any.
    """

    def __init__(self, hooks: Hooks | None = None, versions: ParameterVersions | None = None) -> None:
        self._lock = threading.RLock()  # guards all below
        self._live: dict[int, Context] = {}
        self._lost: set[int] = set()  # workers
        self._released: OrderedDict[int, None] = OrderedDict()
        self._hooks = hooks or Hooks()
        self._versions = versions

    def _created(self, context_id: int) -> Context:
        versions = self._versions
        read_at = 0 if versions is None else versions.published
        context = Context(context_id, read_at)
        if (tracer := self._hooks.tracer) is not None:
            tracer.context_created(context_id)
        self._live[context_id] = context  # last: who finds it, without the lock, may have something to trace
        return context

    def new(self, context_id: int) -> Context:
        """Create a context that begins here."""
        with self._lock:
            return self._created(context_id)

    def get_or_create(self, context_id: int) -> Context | None:
        """Return the context of a message, created if need be.

        None if it was released before, or the worker that began it is lost: nobody would release it.
        """
        context = self._live.get(context_id)  # without the lock: one that is being released may be returned
        if context is not None:
            return context
        with self._lock:
            if context_id in self._released:
                return None
            context = self._live.get(context_id)
            if context is None and split_id(context_id)[0] not in self._lost:
                context = self._created(context_id)
            return context

    def lose(self, worker: int) -> None:
        """Create no more contexts that ``worker``, which is lost, has begun."""
        with self._lock:
            self._lost.add(worker)

    def get(self, context_id: int) -> Context | None:
        """Return a context, or None if it is not known."""
        with self._lock:
            return self._live.get(context_id)

    def find(self, context_id: int) -> Context:
        """Return a context.

        Raises:
            AutogradError: if it is not known; the message says whether it was released.
            ArgumentTypeError: if ``context_id`` is not an int.
        """
        if type(context_id) is not int:
            raise ArgumentTypeError(
                f"incompatible function arguments: context_id must be an int, the id that context() yielded, "
                f"not {context_id!r}"
            )
        context = self._live.get(context_id)
        if context is not None:
            return context
        with self._lock:
            released = context_id in self._released
        creator, _ = split_id(context_id)
        why = f"it was not created here, and no call inside it has arrived from worker {creator} or others"
        if released:
            why = "it has been released: its 'with' block was left, or the worker that created it has left"
        raise AutogradError(f"Could not find autograd context with id: {context_id}; {why}")

    def release(self, context_id: int) -> Context | None:
        """Forget a context. Returns it if it was known."""
        with self._lock:
            self._released[context_id] = None
            if len(self._released) > MAX_RELEASED_IDS:
                self._released.popitem(last=False)
            context = self._live.pop(context_id, None)
            if context is not None and (tracer := self._hooks.tracer) is not None:
                tracer.context_released(context_id)
        if context is not None:
            context.end()  # which wakes who waits for its passes
        return context

    def live(self) -> list[Context]:
        """Return all contexts."""
        with self._lock:
            return list(self._live.values())
