"""Note [Forks and blocks]: what a fork of this process looks at, and until when.

A fork sees the blocks that were in use, for shared memory is not copied by a fork. Were the parent to release
them, the child's tensors would change under it. So what is in use at a fork is *pinned*: it is not released
before the fork has ended, nor the forks that it made. A pipe tells: all of them hold its other end, which the
kernel closes with the last one. Nobody has to wait for children, and programs that fork again and again (a
data loader at each epoch) keep no more than what their living children see.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol


class Pinnable(Protocol):
    """What has blocks that forks can see. Known here as long as somebody else knows it."""

    def pin(self) -> list[int]:
        """Release none of the blocks that are in use now, until each was unpinned as often; gives them."""
        ...

    def unpin(self, blocks: Iterable[int]) -> None:
        """A fork that saw ``blocks`` has ended."""
        ...


_known: weakref.WeakValueDictionary[int, Pinnable] = weakref.WeakValueDictionary()


class _Fork:
    """A fork of this process, and what it may look at."""

    def __init__(self) -> None:
        self._pinned: list[tuple[weakref.ref[Pinnable], list[int]]] = []
        self._ends: list[int] = []  # of the pipe: where this process reads, and what the fork holds
        # Without a pipe nobody can tell that the fork has ended: pinned for good.
        with contextlib.suppress(OSError):
            self._ends += os.pipe()
            os.set_blocking(self._ends[0], False)

    def pin(self) -> None:
        """It may look at all that is in use now."""
        for reference in _known.valuerefs():
            found = reference()
            if found is not None and (blocks := found.pin()):
                self._pinned.append((weakref.ref(found), blocks))

    def keep(self, end: int) -> None:
        """This process needs but this end: 0, the parent; 1, the fork."""
        if self._ends:
            os.close(self._ends[1 - end])

    def keep_nothing(self) -> None:
        """This process is another fork."""
        if self._ends:
            os.close(self._ends[0])

    def has_ended(self) -> bool:
        """Does nobody hold the other end?"""
        if not self._ends:
            return False
        try:
            return os.read(self._ends[0], 1) == b""
        except BlockingIOError:
            return False

    def forget(self) -> None:
        """It has ended: what it alone has pinned is free."""
        for reference, blocks in self._pinned:
            found = reference()
            if found is not None:
                found.unpin(blocks)
        self.keep_nothing()

    def sees_nothing(self) -> bool:
        """Was nothing in use?"""
        return not self._pinned


class _Forking(threading.local):
    fork: _Fork | None = None
    """What the calling thread is about to make."""


_forking = _Forking()
_living: list[_Fork] = []
_lock = threading.RLock()  # guards _living, and how often each block is pinned


def watch(pinnable: Pinnable) -> None:
    """From now on forks pin what ``pinnable`` has in use."""
    _known[id(pinnable)] = pinnable


def release_ended() -> None:
    """Unpin what forks saw that have ended. Not for finalizers."""
    if not _living:
        return
    with _lock:
        for fork in [fork for fork in _living if fork.has_ended()]:
            _living.remove(fork)
            fork.forget()


def _before() -> None:
    release_ended()
    if _known:
        _forking.fork = fork = _Fork()
        with _lock:
            fork.pin()


def _in_parent() -> None:
    fork, _forking.fork = _forking.fork, None
    if fork is None:
        return
    fork.keep(0)
    with _lock:
        fork.pin()  # once more: another thread may have opened a block in between
        if fork.sees_nothing():
            fork.forget()
        else:
            _living.append(fork)


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it
    fork, _forking.fork = _forking.fork, None
    if fork is not None:
        fork.keep(1)  # until the very end
    for other in _living:
        other.keep_nothing()  # they are the parent's to watch
    _living.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
