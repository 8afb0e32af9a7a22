"""Simulated processes: each has its own copy of the library's modules, and of the modules of the program.

A copy is the module's source executed with another ``__import__``, which finds the simulated modules instead
of ``threading``, ``time``, ``socket`` and so on. So the library itself is not changed, and pays nothing.
``sys.modules`` shows the copies of the process whose turn it is, for pickle and for late imports.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import pkgutil
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from zmqgrad.testing.simulation.network import Network
from zmqgrad.testing.simulation.scheduler import Scheduler
from zmqgrad.testing.simulation.threads import (
    builtins_with,
    forwarding,
    standard_copy,
    thread_module,
    threading_module,
    time_module,
)

COPIED = ["autograd", "nn", "optim", "rendezvous", "rpc", "runtime", "store", "transport", "wire"]
"""Packages that are loaded before the first run; others are copied when a process imports them."""

NOT_COPIED = "zmqgrad.testing.simulation"

PROCESSORS = frozenset({0, 1})
"""What a process sees, whatever the machine has: how long threads spin depends on it, and a seed must not."""

SPIN_SECONDS = 1e-3
"""How long a thread that yields the processor lets the others run."""


class Process:
    """A process: its modules, its environment, and what became of it."""

    def __init__(self, world: World, rank: int, host: str, pid: int) -> None:
        self.world = world
        self.name = f"worker{rank}"
        self.rank = rank
        self.pid = pid
        self.environment: dict[str, str] = {}
        self.entropy = random.Random(pid)
        self.network = world.network.process(host, pid)
        self.exit_functions: list[Callable[[], object]] = []
        self.instead: dict[str, ModuleType] = {}
        self.view: dict[str, ModuleType] = {}
        """The copies, by name."""
        self.running = False
        self.killed = self.stopped = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.threads_left: list[str] = []
        self._make_modules()

    def _make_modules(self) -> None:
        scheduler = self.world.scheduler
        instead = self.instead
        instead["_thread"] = thread_module(scheduler, self)
        instead["time"] = time_module(scheduler)
        instead["os"] = self._os_module()
        instead["random"] = self._random_module()
        instead["signal"] = _signal_module()
        instead["atexit"] = self._atexit_module()
        instead["threading"] = threading_module(instead)
        for name in ("queue", "secrets"):
            instead[name] = standard_copy(name, instead)
        instead.update(self.network.modules)
        instead["ctypes"] = self._ctypes_module(instead["ctypes"])

    def _os_module(self) -> ModuleType:
        module = forwarding(os)
        vars(module).update(self.network.os_functions)
        vars(module).update(
            environ=self.environment,
            getenv=self.environment.get,
            getpid=lambda: self.pid,
            urandom=self.entropy.randbytes,
            register_at_fork=lambda **hooks: None,
            cpu_count=lambda: len(PROCESSORS),
            sched_getaffinity=lambda pid: PROCESSORS,
            kill=self.world.kill_pid,
            _exit=lambda status: self.end(),
        )
        return module

    def _random_module(self) -> ModuleType:
        entropy = self.entropy

        class Random(random.Random):
            def __init__(self, seed: Any = None) -> None:
                super().__init__(entropy.getrandbits(64) if seed is None else seed)

        class SystemRandom(Random):
            def random(self) -> float:
                return entropy.random()

            def getrandbits(self, k: int) -> int:
                return entropy.getrandbits(k)

        module = forwarding(random)
        vars(module).update(Random=Random, SystemRandom=SystemRandom)
        for name in (
            "random",
            "uniform",
            "randrange",
            "randint",
            "choice",
            "shuffle",
            "sample",
            "getrandbits",
        ):
            setattr(module, name, getattr(entropy, name))
        return module

    def _atexit_module(self) -> ModuleType:
        module = forwarding(atexit)
        functions = self.exit_functions

        def register(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[..., object]:
            functions.append(lambda: function(*args, **kwargs))
            return function

        vars(module).update(register=register)
        return module

    def _ctypes_module(self, inner: Any) -> Any:
        scheduler = self.world.scheduler

        class Library:
            def sched_yield(self) -> int:
                scheduler.park(scheduler.now() + SPIN_SECONDS)
                return 0

            def __getattr__(self, name: str) -> Any:
                return getattr(library, name)

        library = ctypes.CDLL(None)

        class Ctypes:
            def CDLL(self, name: str | None, **other: Any) -> Any:
                return Library() if name is None else ctypes.CDLL(name, **other)

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        return Ctypes()

    # ---- life -------------------------------------------------------------------------------------------

    def main(self, program: Callable[[int], object]) -> None:
        """Runs ``program(rank)``, in the main thread of the process, and ends as an interpreter does."""
        threading: Any = self.instead["threading"]
        main = threading.main_thread()
        main._ident = threading.get_ident()
        threading._active = {main._ident: main}
        try:
            self.value = program(self.rank)
        except SystemExit:
            pass
        except BaseException as e:
            self.error = e
        self.threads_left = [thread.name for thread in threading.enumerate() if thread is not main]
        threading._shutdown()
        for function in reversed(self.exit_functions):
            function()
        self.end()

    def end(self) -> None:
        """Ends the process at once, as the kernel ends it: no other code of it runs."""
        if not self.running:
            return
        self.running = False
        self.network.kill()
        if not any(process.running for process in self.world.processes):
            self.world.scheduler.finish()
        self.world.scheduler.remove(lambda task: task.process is self)


class World(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hosts, their processes, and the copies of modules of each.

    Args:
        workers: how many processes.
        hosts: of process i: the one at ``i % len(hosts)``.
        also: modules besides the library's that each process has a copy of: those of the program.
    """

    def __init__(self, workers: int, hosts: Sequence[str], also: Iterable[str] = ()) -> None:
        self.scheduler = Scheduler(self._show)
        self.network = Network(self.scheduler)
        self.also = frozenset(also)
        self._shown: Process | None = None
        self._late: set[str] = set()  # modules that perhaps not all processes have a copy of
        self.processes = [Process(self, i, hosts[i % len(hosts)], 100 + i) for i in range(workers)]
        for process in self.processes:
            self._load(process)

    def _copies(self, name: str) -> bool:
        if name in self.also:
            return True
        return name.partition(".")[0] == "zmqgrad" and not (name + ".").startswith(NOT_COPIED + ".")

    def _load(self, process: Process) -> None:
        """Loads the copies of a process."""
        before = {name: module for name, module in sys.modules.items() if self._copies(name)}
        for name in before:
            del sys.modules[name]
        sys.meta_path.insert(0, self)
        self._shown = process
        try:
            for package in COPIED:
                loaded = importlib.import_module(f"zmqgrad.{package}")
                for found in pkgutil.walk_packages(loaded.__path__, f"zmqgrad.{package}."):
                    importlib.import_module(found.name)
            for name in self.also:
                importlib.import_module(name)
        finally:
            sys.meta_path.remove(self)
            self._shown = None
            for name in [name for name in sys.modules if self._copies(name)]:
                del sys.modules[name]
            sys.modules.update(before)

    def begin(self) -> None:
        """Shows the processes' modules from now on. In a fork only: what was loaded is not shown any more."""
        sys.meta_path.insert(0, self)
        for name in [name for name in sys.modules if self._copies(name)]:
            del sys.modules[name]
        self._late.clear()

    def _show(self, process: Process) -> None:
        for name in self._late - process.view.keys():
            sys.modules.pop(name, None)
        sys.modules.update(process.view)
        self._shown = process

    # ---- the loader -------------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the modules to copy."""
        if not self._copies(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader_state, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leaves that to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Executes the source with the simulated modules of the process that imports it."""
        process, spec = self._shown, module.__spec__
        assert process is not None
        assert spec is not None
        inner: Any = spec.loader_state
        spec.loader = module.__loader__ = inner
        module.__dict__["__builtins__"] = builtins_with(process.instead)
        process.view[module.__name__] = module
        self._late.add(module.__name__)
        exec(inner.get_code(module.__name__), module.__dict__)

    # ---- faults -----------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """Kills a process: none of its code runs any more, and its sockets are closed."""
        if process.running:
            process.killed = True
            process.end()

    def stop(self, process: Process, seconds: float) -> None:
        """Stops a process for a while: none of its code runs, and what others send it waits."""
        process.stopped = True
        self.scheduler.stop(process)
        process.network.freeze()
        self.scheduler.call_at(self.scheduler.now() + seconds, functools.partial(self._resume, process))

    def _resume(self, process: Process) -> None:
        self.scheduler.resume(process)
        process.network.thaw()

    def kill_pid(self, pid: int, number: int) -> None:
        """As ``os.kill``, for signals that end a process."""
        for process in self.processes:
            if process.pid == pid and process.running:
                if number:
                    self.kill(process)
                return
        raise ProcessLookupError(f"no process {pid}")


def _signal_module() -> ModuleType:
    """Returns a ``signal`` whose handlers are never called: no signal reaches a simulated process."""
    module = forwarding(signal)
    handlers: dict[int, Any] = {}

    def set_handler(number: int, handler: Any) -> Any:
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before

    vars(module).update(
        signal=set_handler,
        getsignal=lambda number: handlers.get(number, signal.SIG_DFL),
        set_wakeup_fd=lambda fd, **other: -1,
        pthread_sigmask=lambda how, mask: set(),
        siginterrupt=lambda number, flag: None,
    )
    return module
