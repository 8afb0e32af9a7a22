"""What a test has left behind: threads, processes, sockets, files, memory, registrations, open outcomes."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.garbage import GarbageCollectorThread
from zmq.utils.garbage import gc as pyzmq_gc

from zmqgrad.runtime.future import Promise

PATIENCE = 15.0
"""Seconds that something which is ending may take."""

PREFIX = "zmqgrad-"

_contexts: weakref.WeakSet[Any] = weakref.WeakSet()
_sockets: weakref.WeakSet[Any] = weakref.WeakSet()


def _note(cls: type, into: weakref.WeakSet[Any]) -> None:
    """Keep every ``cls`` made from now on in ``into``."""
    born: Callable[..., None] = cls.__init__  # type: ignore[misc]

    def init(self: object, *args: Any, **kwargs: Any) -> None:
        born(self, *args, **kwargs)
        into.add(self)

    cls.__init__ = init  # type: ignore[misc]


_note(zmq.Context, _contexts)
_note(zmq.Socket, _sockets)


class Watcher:
    """Remembers what is there, and tells what has come to it since and stays."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = _children()
        self._files = _files()
        self._descriptors = len(_descriptors())
        self._zmq = {id(z) for z in _open_zmq()}
        self._shared = _shared_memory()
        self._registered = _registered()

    def what_is_left(self) -> list[str]:
        """What has not gone within ``PATIENCE`` seconds, in words."""
        if len(_descriptors()) > self._descriptors:
            gc.collect()  # what a cycle keeps open warns here, and not in a later test
        return _wait_until_empty(self._look)

    def _look(self) -> list[str]:
        threads = [
            f"thread {t.name}"
            for t in threading.enumerate()
            if t not in self._threads and not _not_ours(t) and t.is_alive()
        ]
        children = [f"process {pid}" for pid in sorted(_children() - self._children)]
        files = [f"file {f}" for f in sorted(_files() - self._files)]
        open_zmq = [f"zmq {z!r}" for z in _open_zmq() if id(z) not in self._zmq]
        shared = [f"shared memory {m}" for m in sorted(_shared_memory() - self._shared)]
        if shared:
            gc.collect()  # what keeps it may be part of a cycle
        names = [f"registered {name}" for name in sorted(_registered() - self._registered)]
        return threads + children + files + open_zmq + shared + names


def _not_ours(thread: threading.Thread) -> bool:
    # A dummy stands for a thread that Python did not start (torch's); the timeout plugin has one a test;
    # pyzmq has one a process, which frees what was sent without a copy.
    kinds = (threading._DummyThread, GarbageCollectorThread)
    return isinstance(thread, kinds) or thread.name.startswith("pytest_timeout")


def _open_zmq() -> list[Any]:
    """Contexts and sockets that are open, less pyzmq's own."""
    own = pyzmq_gc._context
    sockets = [s for s in _sockets if not s.closed and s.context is not own]
    return [c for c in _contexts if not c.closed and c is not own] + sockets


def _shared_memory() -> set[str]:
    """Shared memory of ours that this process has open or mapped: it holds a descriptor either way."""
    found = set()
    for descriptor in _descriptors():
        try:
            path = f"/proc/self/fd/{descriptor}"
            if os.readlink(path).startswith("/memfd:zmqgrad"):
                found.add(f"{descriptor} (inode {os.stat(path).st_ino})")
        except FileNotFoundError:  # the one that lists them
            continue
    return found


def _descriptors() -> list[str]:
    return os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []


REGISTRIES = (
    ("zmqgrad.rendezvous", "_handlers"),
    ("zmqgrad.rpc.backend_registry", "_backends"),
    ("zmqgrad.elastic.registry", "_backends"),
)
"""Dictionaries of a whole process, to which programs add with functions of the API."""

OUR_OWN = {"elastic", "env", "etcd", "file", "tcp", "zmq", "TENSORPIPE", "ZMQ", "zmqgrad"}
"""What zmqgrad itself adds to them, partly when it is first asked for."""


def _registered() -> set[str]:
    return {
        f"{name!r} in {module}"
        for module, registry in REGISTRIES
        if module in sys.modules
        for name in getattr(sys.modules[module], registry)
        if name not in OUR_OWN
    }


def _children() -> set[int]:
    """Living child processes, less Python's own helpers; zombies count, as they were not waited for."""
    multiprocessing.active_children()  # waits for those of multiprocessing that have ended
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none: told ten times as fast as below
        return set()
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except OSError:  # the thread ended while we looked
            continue
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    forker = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)
    return found - {tracker, forker}


def _files() -> set[str]:
    try:
        return {e.name for e in os.scandir(tempfile.gettempdir()) if e.name.startswith(PREFIX)}
    except FileNotFoundError:
        return set()


def _wait_until_empty(look: Callable[[], list[str]]) -> list[str]:
    limit = time.monotonic() + PATIENCE
    found = look()
    while found and time.monotonic() < limit:
        time.sleep(0.005)  # nothing tells when a process, a file or a thread goes
        found = look()
    return found


class Bomb:
    """Inside its ``with``, notes each ``Promise`` that is made, and where, until it is set."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}
        self._abandoned: list[str] = []

    def __enter__(self) -> Bomb:
        born, settle = Promise.__init__, Promise.set_result
        self._originals = born, settle
        made, abandoned = self._open, self._abandoned

        def init(self: Promise[Any]) -> None:
            born(self)
            caller = sys._getframe(1)
            if id(self) in made:  # its namesake died without ever being set
                abandoned.append(made[id(self)])
            made[id(self)] = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"

        def settled(self: Promise[Any], value: Any, error: BaseException | None = None) -> bool:
            made.pop(id(self), None)
            return settle(self, value, error)

        Promise.__init__ = init  # type: ignore[method-assign]
        Promise.set_result = settled  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        Promise.__init__, Promise.set_result = self._originals  # type: ignore[method-assign]

    def open_outcomes(self) -> list[str]:
        """Where those were made that have not been set within ``PATIENCE`` seconds."""
        places = _wait_until_empty(lambda: [*self._abandoned, *list(self._open.values())])
        return [f"{place} ({n} times)" for place, n in Counter(places).items()]
