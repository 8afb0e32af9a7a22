"""Simulated ``_thread``, ``threading``, ``queue`` and ``time``.

Only ``_thread`` is written anew: the other modules are the standard library's source, executed on top of it.
A lock that is used while no job runs (at import) is an ordinary flag: nobody else can hold it.
"""

from __future__ import annotations

import _thread
import builtins
import importlib.util
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from zmqgrad.testing.simulation.scheduler import Scheduler, Task

WALL_SECONDS = 1_700_000_000
"""Unix time at the beginning of each run."""


def lock_type(scheduler: Scheduler) -> type:
    """Returns the class that stands for ``_thread.LockType``."""

    class Lock:
        """A lock whose waiting threads compete anew when it is released, as those of the kernel do."""

        __slots__ = ("__weakref__", "_held", "_waiters")

        def __init__(self) -> None:
            self._held = False
            self._waiters: list[Task] = []

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            """As of ``_thread.lock``."""
            if not blocking and timeout != -1:
                raise ValueError("can't specify a timeout for a non-blocking call")
            if timeout < 0 and timeout != -1:
                raise ValueError("timeout value must be a non-negative number")
            if timeout > _thread.TIMEOUT_MAX:
                raise OverflowError("timeout value is too large")
            scheduler.point("acquire")
            deadline = None if timeout == -1 else scheduler.now() + timeout
            while self._held:
                me = scheduler.current
                if not blocking or (deadline is not None and scheduler.now() >= deadline):
                    return False
                assert me is not None, "a lock that is held at import can never be released"
                self._waiters.append(me)
                scheduler.park(deadline)
                if me in self._waiters:
                    self._waiters.remove(me)
            self._held = True
            return True

        def release(self) -> None:
            """As of ``_thread.lock``."""
            if not self._held:
                raise RuntimeError("release unlocked lock")
            self._held = False
            waiters, self._waiters = self._waiters, []
            for task in waiters:
                scheduler.wake(task)
            scheduler.point("release")

        def locked(self) -> bool:
            """As of ``_thread.lock``."""
            return self._held

        def _at_fork_reinit(self) -> None:
            self._held = False

        acquire_lock, release_lock, locked_lock = acquire, release, locked
        __enter__ = acquire

        def __exit__(self, *exc: object) -> None:
            self.release()

    return Lock


def thread_module(scheduler: Scheduler, process: Any) -> ModuleType:
    """Returns the stand-in for ``_thread`` in ``process``."""
    lock = lock_type(scheduler)

    class ThreadHandle:
        """What a thread of Python 3.13 or later is joined by; before, a sentinel does that."""

        def __init__(self, ident: int = 0) -> None:
            self.ident = ident
            self.alive = lock()
            if ident:
                self.alive.acquire()

        def join(self, timeout: float | None = None) -> None:
            """As of ``_thread._ThreadHandle``."""
            if self.alive.acquire(timeout=-1 if timeout is None else timeout):
                self.alive.release()

        def is_done(self) -> bool:
            """As of ``_thread._ThreadHandle``."""
            return bool(self.ident) and not self.alive.locked()

        def _set_done(self) -> None:
            self.alive.release()

    def start_joinable_thread(
        function: Callable[[], object], handle: ThreadHandle | None = None, daemon: bool = True
    ) -> ThreadHandle:
        handle = handle or ThreadHandle()
        handle.alive.acquire()
        start_new_thread(function, (), handle=handle)
        return handle

    def start_new_thread(
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        handle: ThreadHandle | None = None,
    ) -> int:
        def run() -> None:
            try:
                function(*args, **(kwargs or {}))
            except SystemExit:
                return
            finally:
                for sentinel in sentinels.pop(scheduler.current, ()):
                    sentinel.release()

        task = scheduler.spawn(run, f"thread{next(numbers)}", process)
        bound = getattr(function, "__self__", None)
        if bound is not None and hasattr(bound, "name"):
            task.name = bound.name
        if handle is not None:
            handle.ident = task.number
            sentinels[task] = [handle.alive]
        scheduler.point("start")
        return task.number

    def get_ident() -> int:
        current = scheduler.current
        return _thread.get_ident() if current is None else current.number

    def set_sentinel() -> Any:
        sentinel = lock()
        sentinels.setdefault(scheduler.current, []).append(sentinel)
        return sentinel

    sentinels: dict[Task | None, list[Any]] = {}
    numbers = iter(range(1, sys.maxsize))
    module = ModuleType("_thread")
    for name in FORWARDED:
        if hasattr(_thread, name):
            setattr(module, name, getattr(_thread, name))
    vars(module).update(
        LockType=lock,
        allocate_lock=lock,
        allocate=lock,
        start_new_thread=start_new_thread,
        start_new=start_new_thread,
        get_ident=get_ident,
        get_native_id=get_ident,
        _set_sentinel=set_sentinel,
        start_joinable_thread=start_joinable_thread,
        _ThreadHandle=ThreadHandle,
        _make_thread_handle=ThreadHandle,
        _get_main_thread_ident=get_ident,
        interrupt_main=_thread.interrupt_main,
    )
    return module


def threading_module(instead: Mapping[str, ModuleType]) -> ModuleType:
    """Returns a copy of ``threading`` on top of the modules ``instead``."""
    module: Any = standard_copy("threading", instead)
    numbers = itertools.count()

    def number_of(thread: Any) -> int:
        """Returns a hash that does not depend on an address: sets of threads have an order then."""
        number: int = vars(thread).setdefault("_number", -1)
        if number < 0:
            number = thread._number = next(numbers)
        return number

    module.Thread.__hash__ = number_of
    found: ModuleType = module
    return found


def time_module(scheduler: Scheduler) -> ModuleType:
    """Returns the stand-in for ``time``."""

    def now() -> float:
        scheduler.point("clock")
        return scheduler.now()

    def now_ns() -> int:
        return int(now() * 1e9)

    def sleep(seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        scheduler.point("sleep")
        scheduler.park(scheduler.now() + max(seconds, 1e-6))

    module = forwarding(time)
    vars(module).update(
        time=lambda: WALL_SECONDS + now(),
        time_ns=lambda: int(WALL_SECONDS * 1e9) + now_ns(),
        monotonic=now,
        monotonic_ns=now_ns,
        perf_counter=now,
        perf_counter_ns=now_ns,
        thread_time=now,
        thread_time_ns=now_ns,
        process_time=now,
        sleep=sleep,
    )
    return module


def forwarding(module: ModuleType) -> ModuleType:
    """Returns a module with the names of ``module``, to be changed."""
    copy = ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module))
    return copy


def import_function(instead: Mapping[str, ModuleType]) -> Callable[..., Any]:
    """Returns an ``__import__`` that finds the modules ``instead``."""

    def simulated_import(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            found = instead.get(name)
            if found is not None:
                return found
            if name in ABSENT:
                raise ImportError(f"{name} is not simulated")
        return builtins.__import__(name, globals, locals, fromlist, level)

    return simulated_import


FORWARDED = (
    "error",
    "TIMEOUT_MAX",
    "_local",
    "_excepthook",
    "_ExceptHookArgs",
    "ExceptHookArgs",
    "daemon_threads_allowed",
    "_is_main_interpreter",
    "_shutdown",
    "stack_size",
)
"""Names of ``_thread`` that stay as they are: a ``threading.local`` belongs to a real thread."""

ABSENT = {"_queue"}
"""Modules in C for which the standard library has a substitute in Python, on top of ``threading``."""


def builtins_with(instead: Mapping[str, ModuleType]) -> dict[str, Any]:
    """Returns the ``__builtins__`` of modules that import the modules ``instead``."""
    return {**vars(builtins), "__import__": import_function(instead)}


def standard_copy(name: str, instead: Mapping[str, ModuleType]) -> ModuleType:
    """Returns a new copy of a module of the standard library that imports the modules ``instead``."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    loader: Any = spec.loader
    module = ModuleType(name)
    module.__file__ = spec.origin
    module.__dict__["__builtins__"] = builtins_with(instead)
    exec(loader.get_code(name), module.__dict__)
    return module
