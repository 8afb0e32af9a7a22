"""Versions of parameters that several trainers share: what a context has saved stays as it was.

A step changes a parameter in place, so the contexts of other trainers that have saved it for backward fail
("modified by an inplace operation"). A parameter that is *shared* here gets new memory instead (copy on
write), unless nothing can have seen or saved the old. Three rules make every gradient exact for the values
that its forward pass has seen:

- What is saved inside a context is saved as an alias of the memory of that moment, as is what is being sent.
  (Torch saves the parameter itself, which follows the parameter to its new memory.) The storage counts its
  aliases, so a step knows whether any is left.
- Calls that run inside a context, and ``with context()`` blocks, are *readers*. A step leaves its new values
  aside; they are published, all at once, when no thread reads. So a function sees one version from its
  beginning to its end, except across waits of this library: a thread that waits does not read. Nobody waits
  for readers, so nothing can deadlock.
- Getting new memory counts as a change in place for what is saved outside of contexts: torch reports it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version, saved_tensors_hooks

from zmqgrad.autograd.torch_internals import (
    Watch,
    is_checkpoint_hook,
    is_first_checkpoint_hook,
    replace_saved_tensor_hooks,
    saved_tensor_hooks,
    storage_address,
    storage_users,
)
from zmqgrad.errors import AutogradError, ConfigurationError
from zmqgrad.runtime.blocking import blocking_section, thread_state

if TYPE_CHECKING:
    from zmqgrad.autograd.context import Context

_NOTHING = nullcontext()

Hook = Callable[[Any], Any]
"""A hook of saved tensors."""

MAX_STALENESS = 4096
"""Larger staleness is not told apart: this many of the latest steps are remembered."""

FAIR_SECONDS = 0.1
"""How long a reader waits for new values to be published before it begins, so that they are published soon
under constant load. Not longer, as running readers may be waiting for it."""


class Version:
    """The values of a shared parameter in one memory. What has saved them for backward refers to it."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended: int | None = None
        """The version counter of the parameter when it got new memory."""


class SharedParameter:
    """A parameter of this worker that several trainers step."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        self.version = Version()
        self.pending: torch.Tensor | None = None
        """The values of the latest steps, if they are not published yet."""
        self.steps: deque[int] = deque(maxlen=MAX_STALENESS)
        """The steps that changed it, by their numbers on this worker."""

    def latest(self) -> torch.Tensor:
        """Return the values after the latest step."""
        return self.param.data if self.pending is None else self.pending

    def steps_since(self, number: int, own: Collection[int]) -> int:
        """Return how many steps later than ``number``, and not among ``own``, changed it.

        ``MAX_STALENESS`` if that is too many.
        """
        count = 0
        for step in reversed(self.steps):
            if step <= number:
                break
            count += step not in own
        return count

    def end_version(self) -> None:
        """Note that the published values end here. Before any parameter changes: some share their counter."""
        if self.pending is not None:
            self.version.ended, self.version = self.param._version, Version()

    def publish(self) -> None:
        """Give the parameter the memory of the latest values, unless it has that: Ctrl-C may come behind."""
        if self.pending is None:
            return
        increment_version(self.param)  # before and after: whatever saved it outside of contexts is noticed
        self.param.data, self.pending = self.pending, None
        increment_version(self.param)


Moment = tuple[int, list[SharedParameter | None]]


class _Saved:
    """A tensor that is saved for backward."""

    __slots__ = ("counter", "shared", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, shared: SharedParameter | None) -> None:
        self.tensor = tensor
        self.counter = tensor._version
        self.shared = shared  # it stays shared, though its last optimizer may go
        self.version = None if shared is None else shared.version


def unpack(saved: _Saved) -> torch.Tensor:
    """Return a saved tensor; raises as torch does if it has been changed in place since."""
    tensor, version = saved.tensor, saved.version
    counter = tensor._version if version is None or version.ended is None else version.ended
    if counter != saved.counter:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {counter}; expected version "
            f"{saved.counter} instead"
        )
    return tensor


class ParameterVersions:
    """The shared parameters of one worker. Thread-safe."""

    def __init__(self) -> None:
        # By id of the parameter, which the value keeps alive; optimizers and what is saved keep the value.
        self._shared: weakref.WeakValueDictionary[int, SharedParameter] = weakref.WeakValueDictionary()
        # By the address of their memory; None: to be found again, as it has changed.
        self._by_address: dict[int, weakref.ref[SharedParameter]] | None = None
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        # What Ctrl-C has kept from ending is counted until it is dropped.
        self._readers: weakref.WeakSet[Reading] = weakref.WeakSet()
        self._paused: weakref.WeakSet[Reading] = weakref.WeakSet()  # those that wait
        self._writing = False  # a step changes published values in place
        self._pending: set[SharedParameter] = set()
        self._steps = 0
        self.published = 0
        """The number of the latest step whose values are published."""

    def share(self, param: torch.Tensor) -> SharedParameter:
        """Return the state of a parameter, which is shared from now on.

        Raises:
            ConfigurationError: if it is made of other tensors, as DTensor is: they would stay as they are.
        """
        if param.layout is torch.strided and param.numel() and not storage_address(param):
            raise ConfigurationError(
                f"versions=True: a parameter of type {type(param).__name__} has no memory of its own, so a "
                f"step cannot give it new memory"
            )
        with self._lock:
            self._by_address = None
            return self._shared.setdefault(id(param), SharedParameter(param))

    def are_shared(self) -> bool:
        """Whether there are shared parameters. Without these, calls pay nothing for them."""
        return bool(self._shared)

    def now(self) -> Moment:
        """Return the latest published step, and the shared parameters: what has them keeps them shared."""
        return self.published, [reference() for reference in self._shared.valuerefs()]

    @contextmanager
    def computing_again(self, moment: Moment, what: str) -> Iterator[None]:
        """Read, to compute again what was computed at ``moment``.

        Raises:
            AutogradError: if a step has changed a parameter since that is used. ``what`` names the function.
        """
        with self.reading(fresh=False):
            read_at, begun = moment[0], self.published
            changed = functools.cache(self._changed_since)
            watch = Watch(lambda tensor: storage_address(tensor) in changed(read_at))
            with watch if begun > read_at else nullcontext():
                yield
            if watch.found or (self.published > begun and self._changed_since(begun)):
                raise AutogradError(
                    f"a step, perhaps of another trainer (versions=True), has changed a parameter of {what} "
                    f"since that was computed, and it cannot be computed again with the values that it had"
                )

    def _changed_since(self, number: int) -> set[int]:
        """Return the addresses of the memory that published steps later than ``number`` have changed."""
        with self._lock:
            shared = [reference() for reference in self._shared.valuerefs()]
            return {
                storage_address(p.param)
                for p in shared
                if p is not None and next((n for n in reversed(p.steps) if n <= self.published), 0) > number
            }

    # ---- reading ----------------------------------------------------------------------------------------

    def reading(self, fresh: bool) -> Any:
        """Return a context manager in which published values do not change, except in waits.

        Args:
            fresh: whether its context has not been here before; then it begins with the latest values.
        """
        return Reading(self, fresh) if self._shared and _reading_here() is None else _NOTHING

    def begin_reading(self, reading: Reading, fresh: bool) -> None:
        """Count a reader; if ``fresh``, once the latest values are published, or after ``FAIR_SECONDS``."""
        with self._lock:
            self._publish_if_unread()  # an interrupt may have kept that
            if self._writing or (fresh and self._pending):
                with blocking_section():
                    self._changed.wait_for(lambda: not (self._writing or self._pending), FAIR_SECONDS)
                    self._changed.wait_for(lambda: not self._writing)
            self._readers.add(reading)

    def end_reading(self, reading: Reading) -> None:
        """Count a reader less; the last one publishes. Idempotent."""
        with self._lock:
            self._readers.discard(reading)
            self._paused.discard(reading)
            self._publish_if_unread()

    def suspend(self, reading: Reading) -> None:
        """Count a reader as one that waits: the last one publishes, but no step changes values in place."""
        with self._lock:
            self._paused.add(reading)
            self._readers.discard(reading)
            self._publish_if_unread()

    def resume(self, reading: Reading) -> None:
        """Count a reader that waits as one that reads. Waits for nothing: the thread may hold any locks."""
        with self._lock:
            self._readers.add(reading)
            self._paused.discard(reading)

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Save a tensor for backward. Not itself: it may refer to the node that saves it."""
        return _Saved(tensor.detach(), self._find(tensor))

    def _find(self, tensor: torch.Tensor) -> SharedParameter | None:
        """Return the shared parameter that ``tensor`` is, or is a view of, if any; it may be detached."""
        find = self._shared.get
        found = find(id(tensor)) or find(id(tensor._base))
        if found is not None or tensor.requires_grad:
            return found
        with self._lock:  # a parameter that is shared meanwhile must not be missing in what follows
            if self._by_address is None:
                shared = [reference() for reference in self._shared.valuerefs()]
                self._by_address = {storage_address(p.param): weakref.ref(p) for p in shared if p is not None}
            reference = self._by_address.get(address := storage_address(tensor))
        found = None if reference is None else reference()
        if found is None or not address or found.param._version != tensor._version:
            return None  # what only shares the memory (``p.data``) is counted apart
        return found if storage_address(found.param) == address else None

    def hooks_above(self, pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
        """Return the hooks to use for those of the program, which replace those of a reader."""
        if is_first_checkpoint_hook(pack):
            moment = self.now()

            @functools.wraps(unpack)
            def compute_again(saved: Any) -> Any:
                with self.computing_again(moment, "a torch.utils.checkpoint"):
                    return unpack(saved)

            return pack, compute_again

        @functools.wraps(pack)
        def pack_alias(tensor: torch.Tensor) -> Any:
            return pack(tensor if self._find(tensor) is None else tensor.detach())

        return pack if is_checkpoint_hook(pack) else pack_alias, unpack

    def _publish_if_unread(self) -> None:
        """Publish all pending values, if no thread reads. The caller holds the lock."""
        if self._pending and not self._readers:
            for shared in self._pending:
                shared.end_version()
            for shared in self._pending:
                shared.publish()
            self._pending.clear()
            self._by_address = None
            self.published = self._steps
            self._changed.notify_all()

    # ---- steps ------------------------------------------------------------------------------------------

    def staleness(self, context: Context, params: Sequence[SharedParameter]) -> int:
        """Return how many steps one of ``params`` is ahead of what ``context`` first read here."""
        with self._lock:
            return max([p.steps_since(context.read_at, context.pending_steps) for p in params], default=0)

    @contextmanager
    def stepping(
        self, context: Context, params: Sequence[SharedParameter], may_wait: bool = False
    ) -> Iterator[list[torch.Tensor]]:
        """Yield the memory in which a step with the gradients of ``context`` may change each of ``params``.

        Steps of one process take turns. On exit the values count as the latest ones.

        Args:
            context: in which the step is taken.
            params: what it changes.
            may_wait: whether the step may wait for a call that reads here. It changes nothing in place then,
                for which that call would wait.
        """
        own = _reading_here()
        with nullcontext() if own is None else own.pause(nullcontext()):
            in_place, affected = False, list[SharedParameter]()
            try:
                with self._lock:
                    others = len(self._readers) + len(self._paused) - (own is not None)
                    in_place = not (may_wait or others or self._pending or any(map(self._is_held, params)))
                    self._writing = in_place
                    affected = [] if in_place else self._with_siblings(params)
                    self._pending.difference_update(affected)  # while they change, nobody publishes them
                for p, copy in _copies([p for p in affected if p.pending is None]).items():
                    p.pending = copy
                yield [p.param.data if p.pending is None else p.pending for p in params]
            finally:
                try:
                    with self._lock:
                        self._pending.update(affected)
                        self._steps += 1
                        for p in params:
                            p.steps.append(self._steps)
                            if in_place:
                                increment_version(p.param)
                        if in_place:
                            self.published = self._steps
                        self._writing = False
                        self._publish_if_unread()
                        context.read_at = self.published
                        context.pending_steps = {
                            step for step in (*context.pending_steps, self._steps) if step > self.published
                        }
                finally:
                    self._writing = False
                    with self._lock:
                        self._changed.notify_all()

    def _is_held(self, shared: SharedParameter) -> bool:
        """Whether anything but shared parameters refers to the memory of one, or it has later values."""
        if shared.pending is not None:
            return True
        users = storage_users(shared.param)
        return users > 1 and users > len(self._with_siblings([shared]))

    def _with_siblings(self, params: Sequence[SharedParameter]) -> list[SharedParameter]:
        """Return ``params`` and the shared parameters that lie in the same storages."""
        storages = {_storage_of(p) for p in params}
        # Not values(), from which another thread may just be removing one that is no longer shared.
        shared = [reference() for reference in self._shared.valuerefs()]
        return [p for p in shared if p is not None and _storage_of(p) in storages]


def _storage_of(shared: SharedParameter) -> int:
    return storage_address(shared.latest()) or id(shared)


def _copies(params: Sequence[SharedParameter]) -> dict[SharedParameter, torch.Tensor]:
    """Return copies of parameters; those that lie in one storage lie in one storage again."""
    together: dict[int, list[SharedParameter]] = {}
    for p in params:
        together.setdefault(_storage_of(p), []).append(p)
    copies: dict[SharedParameter, torch.Tensor] = {}
    for members in together.values():
        data = [p.param.data for p in members]
        if len(members) == 1:
            copies[members[0]] = data[0].clone()
            continue
        storage: Any = data[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
        for p, old in zip(members, data, strict=True):
            place = old.storage_offset(), old.size(), old.stride()
            copy = torch.empty(0, dtype=old.dtype, device=old.device).set_(storage, *place)
            copy = copy.conj() if old.is_conj() else copy
            copies[p] = torch._neg_view(copy) if old.is_neg() else copy
    return copies


class Reading:
    """Context manager that makes the calling thread a reader: see :class:`ParameterVersions`.

    Keep it until it is left: one that is dropped is no reader any more.
    """

    def __init__(self, versions: ParameterVersions, fresh: bool) -> None:
        self.versions = versions
        self._fresh = fresh
        self._hooks = saved_tensors_hooks(versions.pack, unpack)
        self._thread = 0  # where it has begun, until it is left there

    def __enter__(self) -> None:
        self.versions.begin_reading(self, self._fresh)
        top = saved_tensor_hooks(True)
        if top is not None and top[0] == self.versions.pack:  # of a reader that Ctrl-C has kept from leaving
            self._hooks.__exit__()
        self._hooks.__enter__()
        self._thread = threading.get_ident()
        thread_state.pause = partial(_pause, weakref.ref(self))

    def __exit__(self, *error: object) -> None:
        try:
            self._leave_thread()
        finally:
            self.versions.end_reading(self)

    @contextmanager
    def pause(self, wait: Any) -> Iterator[None]:
        """Do not read in the calling thread, which is this reader, during ``wait``."""
        pause, thread_state.pause = thread_state.pause, None
        try:
            self.versions.suspend(self)
            with wait:
                yield
        finally:
            try:
                self.versions.resume(self)
            finally:
                thread_state.pause = pause

    def suspend(self) -> None:
        """Leave the calling thread, and wait for :meth:`resume`."""
        self._leave_thread()
        self.versions.suspend(self)

    def resume(self) -> None:
        """Read again, in any thread, which must not wait. Nothing that it saves is an alias."""
        self.versions.resume(self)

    def _leave_thread(self) -> None:
        if threading.get_ident() == self._thread:  # otherwise that thread keeps them, without effect
            self._thread = 0
            thread_state.pause = None
            self._hooks.__exit__()


def _pause(reference: weakref.ref[Reading], wait: Any) -> Any:
    """Return ``wait`` as a context manager in which the thread does not read, if it still does."""
    reading = reference()
    return wait if reading is None else reading.pause(wait)


def _reading_here() -> Reading | None:
    """Return what the calling thread reads by."""
    pause: Any = thread_state.pause
    found: Reading | None = None if pause is None else pause.args[0]()
    return found


def _of_program(pack: Hook, unpack: Hook) -> tuple[Hook, Hook]:
    """Return the hooks of saved tensors to use where the calling thread enters these."""
    reading = _reading_here()
    return (pack, unpack) if reading is None else reading.versions.hooks_above(pack, unpack)


replace_saved_tensor_hooks(_of_program)
