"""Note [Forks and blocks]: which blocks a fork of this process may read, and until when.

Shared memory is not copied by a fork. If the parent released a block, the child's tensors would change under
it. So a fork pins the blocks in use: the parent keeps references to them until the fork, and all forks made
by it, have ended. A pipe shows that: they hold its write end, which the kernel closes with the last of them,
and the service threads watch its read end. Children need not be waited for, and a program that forks
repeatedly (a data loader at each epoch) keeps only the blocks that living children can read.

While a thread is about to fork, another one may open a block, and drop it before the first has returned from
the fork: so what is opened meanwhile is pinned, too.

A signal handler can fork, too, in a thread that holds the lock of a service thread, or is about to fork: so
that takes no lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from functools import partial
from typing import Protocol

from zmqgrad.runtime.polling import READ
from zmqgrad.runtime.service_thread import ServiceThread


class Pinnable(Protocol):
    """Holds blocks that forks can read."""

    def pin(self, fork: Fork) -> bool:
        """Keep all blocks that are in use until ``unpin(fork)``. Returns whether there are any."""

    def unpin(self, fork: Fork) -> None:
        """Drop what was kept for ``fork``, which has ended."""


_watched: weakref.WeakValueDictionary[int, Pinnable] = weakref.WeakValueDictionary()


class Fork:
    """A fork of this process, with the pipe that shows whether it exists."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        with contextlib.suppress(OSError):  # no descriptors left: pinned for good, as nothing shows its end
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)

    def pin(self) -> bool:
        """Pin all blocks in use. Returns whether there are any."""
        watched = [reference() for reference in _watched.valuerefs()]
        return any([each.pin(self) for each in watched if each is not None])

    def unpin(self) -> None:
        """Unpin the blocks, and close the read end."""
        for reference in _watched.valuerefs():
            if (each := reference()) is not None:
                each.unpin(self)
        self.close(0)

    def watch(self, service: ServiceThread) -> None:
        """Let ``service`` call :func:`unpin_ended` at the end of the fork. In its thread."""
        with _lock:
            if self in _living and self._pipe is not None:
                service.watch(self._pipe[0], READ, lambda _: unpin_ended())

    def unwatch(self) -> None:
        """Undo :meth:`watch`, in all service threads."""
        for service in _all_services():
            if self._pipe is not None:
                service.unwatch(self._pipe[0])

    def close(self, end: int) -> None:
        """Close the read end (0) or the write end (1) of the pipe in this process."""
        if self._pipe is not None:
            os.close(self._pipe[end])

    def has_ended(self) -> bool:
        """Return whether all processes that hold the write end have ended."""
        if self._pipe is None:
            return False
        try:
            return os.read(self._pipe[0], 1) == b""
        except BlockingIOError:
            return False


beginning: list[Fork] = []
"""The forks that threads are about to make. What is opened meanwhile must be pinned for them."""


class _Forking(threading.local):
    def __init__(self) -> None:
        self.forks: list[Fork | None] = []
        """Those that the calling thread is about to make, the inner ones last; None: nothing is pinned."""


_forking = _Forking()
_living: list[Fork] = []
_services: weakref.WeakValueDictionary[int, ServiceThread] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # guards removals from _living


def watch(pinnable: Pinnable) -> None:
    """Let forks pin the blocks of ``pinnable`` from now on. Keeps no reference to it."""
    _watched[id(pinnable)] = pinnable


def unwatch(pinnable: Pinnable) -> None:
    """Forks pin no more blocks of ``pinnable``."""
    _watched.pop(id(pinnable), None)


def unpin_in(service: ServiceThread) -> None:
    """Let ``service`` unpin the blocks of each fork as soon as that has ended. Keeps no reference to it."""
    _services[id(service)] = service
    for fork in _living.copy():
        service.call_soon(partial(fork.watch, service))


def _all_services() -> list[ServiceThread]:
    return [service for reference in _services.valuerefs() if (service := reference()) is not None]


def unpin_ended() -> None:
    """Unpin the blocks of forks that have ended. In a service thread."""
    with _lock:
        ended = [fork for fork in _living if fork.has_ended()]
        for fork in ended:
            _living.remove(fork)
    for fork in ended:
        fork.unwatch()
        fork.unpin()


def _before() -> None:
    fork = Fork() if _watched or _services else None
    _forking.forks.append(fork)
    if fork is not None:
        beginning.append(fork)  # before what is open is pinned
        fork.pin()


def _in_parent() -> None:
    fork = _forking.forks.pop()
    if fork is None:
        return
    beginning.remove(fork)
    fork.close(1)
    if fork.pin():  # again, which says whether any block is pinned
        _living.append(fork)
        for service in _all_services():
            service.call_soon(partial(fork.watch, service))
    else:
        fork.unpin()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    _services.clear()  # they are the parent's
    fork = _forking.forks.pop()
    for each in [*_living, *([fork] if fork is not None else [])]:
        each.close(0)  # only the parent reads; the write end of ``fork`` stays open until this process ends
    _living.clear()
    beginning[:] = filter(None, _forking.forks)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
