"""Runs of a simulated job, one seed after the other, each in a fork: nothing of a run is left to the next."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from zmqgrad.errors import ArgumentTypeError, ConfigurationError, ZmqgradError
from zmqgrad.runtime.arguments import as_list, check_integer
from zmqgrad.testing.simulation.messages import MessageLog
from zmqgrad.testing.simulation.processes import Process, World
from zmqgrad.testing.simulation.scheduler import Failure

REAL_SECONDS = 120
"""A run that takes longer is stuck in a real wait, which is a fault of the simulation, or starved."""

PROGRAMS = f"{__package__}.programs"
"""The module of which all drawn programs use a copy of their own."""

LAST_MESSAGES = 20
"""So many are told of a seed that fails."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong in a run. The seed draws when.

    Attributes:
        kills: how many workers are killed.
        dropped: how often a connection is dropped, or all, with what was in flight.
        partitions: how often nothing passes from a host to another, or between the two; of three hosts, it is
            not the first, where the store is.
        stalls: how often the I/O thread of libzmq does nothing in a process.
        stops: how often a process is stopped, as by SIGSTOP.
        stoppable: the ranks of those that may be; empty: all.
        lasting: the longest time in seconds that a partition, a stall or a stop lasts.
        latency: the longest time in seconds that a packet takes between hosts.
        io: the longest time in seconds that an I/O thread of libzmq takes to act.
        within: the simulated seconds in which faults happen.
    """

    kills: int = 0
    dropped: int = 0
    partitions: int = 0
    stalls: int = 0
    stops: int = 0
    stoppable: tuple[int, ...] = ()
    lasting: float = 2.0
    latency: float = 0.0
    io: float = 0.0
    within: float = 0.01

    @property
    def loses_workers(self) -> bool:
        """Whether a worker may be lost."""
        return self.kills > 0

    @property
    def loses_nothing(self) -> bool:
        """Whether all that is sent arrives soon."""
        return not (self.kills or self.dropped or self.partitions or self.stalls or self.stops)


@dataclass
class Run:
    """What became of one seed.

    Attributes:
        values: what the program returned in each worker that was not killed, by rank.
        losses: what the program raised in workers that survived a killed one, if that is an error of zmqgrad:
            it tells of a loss, and is no failure.
        faults: what went wrong.
        killed: ranks of the workers that were killed before they ended.
        stopped: ranks of those that were stopped.
        digest: of all scheduling points: two runs with the same one took the same way.
    """

    seed: int
    failure: str | None = None
    values: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    faults: Faults = Faults()
    killed: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    digest: int = 0
    points: int = 0
    simulated_seconds: float = 0.0
    real_seconds: float = 0.0
    messages: list[str] = field(default_factory=list)
    log: list[str] | None = None


class SimulationFailed(AssertionError):
    """A seed failed: :attr:`run` says how, and the message ends with what the processes told each other."""

    def __init__(self, run: Run) -> None:
        last = "".join(f"\n{line}" for line in run.messages[-LAST_MESSAGES:])
        super().__init__(f"seed {run.seed}: {run.failure}\nthe last of {len(run.messages)} messages:{last}")
        self.run = run


@functools.cache  # torch keeps what the copies of modules register, so to forget one would not free it
def _world(workers: int, hosts: tuple[str, ...], also: tuple[str, ...]) -> World:
    """Makes the processes, which takes about a second; each run has a fork of them."""
    return World(workers, hosts, also)


def simulate(
    program: Callable[[int], object],
    *,
    workers: int = 2,
    seeds: int | Iterable[int] = 1,
    hosts: Sequence[str] = ("host0",),
    faults: Faults | None = None,
    kill: Literal["any"] | None = None,
    check: Callable[[Run, list[Any]], object] | None = None,
    limit: float = 600.0,
    log: bool = False,
    environment: dict[str, str] | None = None,
    inline: bool = False,
) -> list[Run]:
    """Runs a job once for each seed, and checks that it ends well.

    Args:
        program: called with its rank in each simulated process. A function of a module or of a script,
            which each process has a copy of.
        workers: how many processes.
        seeds: how many, from 0; or which.
        hosts: process i runs on host ``i % len(hosts)``.
        faults: what goes wrong.
        kill: "any": one worker is killed at any moment of the job, whose length a run without faults shows.
        check: called with each run whose program has ended, and the copies of the program's module in each
            process; what it raises is the failure of that seed.
        limit: simulated seconds within which the job has to end.
        log: keep all scheduling points in words.
        environment: variables of all processes.
        inline: with one seed: in this process instead of a fork, for a debugger. It is of no use afterwards.

    Returns:
        The runs.

    Raises:
        SimulationFailed: at the first seed that fails.
        ConfigurationError: the processes cannot import ``program``, ``inline`` is to run several seeds, or
            an argument would leave nothing to run.

    Example:
        >>> def program(rank):  # in a module
        ...     rpc.init_rpc(f"worker{rank}")
        ...     result = rpc.rpc_sync("worker1", pow, args=(2, 3)) if rank == 0 else None
        ...     rpc.shutdown()
        ...     return result
        >>> [run.values for run in simulate(program, workers=2, seeds=2)]  # doctest: +SKIP
        [{0: 8, 1: None}, {0: 8, 1: None}]
    """
    faults = faults or Faults()
    check_integer("workers", workers, 1)
    chosen = range(seeds) if isinstance(seeds, int) else as_list(seeds, "seeds must be a number or a list")
    if not chosen:  # a test of no seed would pass
        raise ConfigurationError(f"seeds is {seeds!r}; at least one must run")
    if not isinstance(faults, Faults):
        raise ArgumentTypeError(f"faults must be Faults(...), not {faults!r}")
    if kill not in (None, "any"):
        raise ConfigurationError(
            f"kill is {kill!r}; it must be 'any' or None. faults=Faults(kills=N) kills N"
        )
    check_integer("kills", faults.kills, 0, workers)
    hosts = as_list(hosts, "hosts must be a list of names")
    if not hosts:
        raise ConfigurationError("hosts is empty; at least one must have the workers")

    def run(seed: int, faults: Faults, inline: bool = False) -> Run:
        found = run_seed(program, workers, seed, tuple(hosts), faults, check, limit, log, environment, inline)
        if found.failure is not None:
            raise SimulationFailed(found)
        return found

    if kill is not None:
        faults = replace(faults, kills=1, within=run(0, Faults()).simulated_seconds)
    if inline and len(chosen) != 1:
        raise ConfigurationError(f"inline runs one seed, not {len(chosen)}: seeds=[SEED]")
    return [run(seed, faults, inline) for seed in chosen]


def run_seed(
    program: Callable[[int], object],
    workers: int,
    seed: int,
    hosts: tuple[str, ...] = ("host0",),
    faults: Faults | None = None,
    check: Callable[[Run, list[Any]], object] | None = None,
    limit: float = 600.0,
    log: bool = False,
    environment: dict[str, str] | None = None,
    inline: bool = False,
) -> Run:
    """Runs one seed, and returns what became of it. See :func:`simulate`.

    Args:
        inline: in this process instead of a fork, for a debugger. It is of no use for anything afterwards.
    """
    torch.set_num_threads(1)
    module = _module_of(program)
    own = module.startswith(__package__ + ".")
    also = () if module.startswith("zmqgrad.") and not own else (*([PROGRAMS] if own else []), module)
    world = _world(workers, hosts, also)
    variables = {
        **DEFAULTS,
        "MASTER_ADDR": hosts[0],
        "WORLD_SIZE": str(workers),
        **(environment or {}),
    }

    def run_here() -> Run:
        began = time.perf_counter()
        run = Run(seed, faults=faults or Faults(), log=[] if log else None)
        world.scheduler.log = run.log
        messages = MessageLog(world.scheduler.now)
        _prepare(world, variables, seed, run.faults, limit, messages)
        for process in world.processes:
            world.scheduler.spawn(_starter(process, module, program.__qualname__), "main", process)
            process.running = True
        try:
            world.scheduler.run()
        except Failure as failure:
            run.failure = str(failure)
        _collect(world, run)
        run.messages = messages.lines()
        if run.failure is None and check is not None:
            try:
                check(run, [process.view[module] for process in world.processes])
            except Exception as e:
                run.failure = "".join(traceback.format_exception(e))
        run.real_seconds = time.perf_counter() - began
        return run

    return run_here() if inline else _in_fork(run_here, seed)


def _module_of(program: Callable[[int], object]) -> str:
    """Returns the name by which each process imports its copy of the program's module."""
    if "<" in program.__qualname__:
        raise ConfigurationError(
            f"{program.__qualname__} is not at the top of a module, of which each process has its own copy"
        )
    if program.__module__ != "__main__":
        return program.__module__
    main: Any = sys.modules["__main__"]
    path: str = getattr(main, "__file__", "")
    name: str = main.__spec__.name if main.__spec__ else Path(path).stem
    found = importlib.util.find_spec(name) if name else None
    if found is None or found.origin is None or not os.path.samefile(found.origin, path):
        raise ConfigurationError(
            f"simulated processes cannot import {program.__qualname__}: move it to a module or a script"
        )
    return name


SEED = "SIMULATION_SEED"
"""The environment variable that tells a program the seed."""

DEFAULTS = {
    "MASTER_PORT": "29500",
    "ZMQGRAD_ALLOW_INSECURE": "1",
    "ZMQGRAD_SPIN_US": "0",
    "ZMQGRAD_JOIN_TIMEOUT": "60",  # less than the job's own limit
    "HOME": "/nonexistent",
}


def _prepare(
    world: World, variables: dict[str, str], seed: int, faults: Faults, limit: float, messages: MessageLog
) -> None:
    gc.disable()
    scheduler, rng = world.scheduler, world.scheduler.rng
    scheduler.seed(seed, limit)
    torch.manual_seed(seed)
    random.seed(seed)
    world.network.faults.latency = faults.latency
    world.network.faults.io_seconds = faults.io
    for process in world.processes:
        process.environment.update(variables, RANK=str(process.rank), LOCAL_RANK=str(process.rank))
        process.environment[SEED] = str(seed)
        process.entropy.seed(f"{seed}/{process.rank}")
        tap: Any = process.view["zmqgrad.transport.tap"]
        tap.activate(messages.recorder(process.name))
    for victim in rng.sample(world.processes, faults.kills):
        scheduler.call_at(_moment(rng, faults), functools.partial(world.kill, victim))
    for _ in range(faults.dropped):
        scheduler.call_at(_moment(rng, faults), functools.partial(_drop, world))
    hosts = sorted({process.network.host for process in world.processes})
    for _ in range(faults.partitions if len(hosts) > 1 else 0):
        one, other = rng.sample(hosts[len(hosts) > 2 :], 2)
        began, both = _moment(rng, faults), rng.random() < 0.5
        scheduler.call_at(began, functools.partial(world.network.partition, [one], [other], both))
        scheduler.call_at(began + rng.random() * faults.lasting, world.network.heal)
    for _ in range(faults.stalls):
        began, stalled = _moment(rng, faults), rng.choice(world.processes).network
        scheduler.call_at(began, stalled.freeze)
        scheduler.call_at(began + rng.random() * faults.lasting, stalled.thaw)
    may_stop = [p for p in world.processes if not faults.stoppable or p.rank in faults.stoppable]
    for _ in range(faults.stops):
        stop = functools.partial(world.stop, rng.choice(may_stop), rng.random() * faults.lasting)
        scheduler.call_at(_moment(rng, faults), stop)
    world.begin()


def _moment(rng: random.Random, faults: Faults) -> float:
    return 1.0 + rng.random() * faults.within


def _drop(world: World) -> None:
    """Drops one connection, or all: then the acknowledgements of what has arrived are lost, too."""
    found = len(world.network.connections())
    world.network.drop_connections(world.scheduler.rng.choice((1, found)))


def _starter(process: Process, module: str, name: str) -> Callable[[], None]:
    def start() -> None:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        process.main(target)

    return start


def _collect(world: World, run: Run) -> None:
    scheduler = world.scheduler
    run.digest, run.points = scheduler.digest, scheduler.points
    run.simulated_seconds = scheduler.now() - 1.0
    run.killed = tuple(process.rank for process in world.processes if process.killed)
    run.stopped = tuple(process.rank for process in world.processes if process.stopped)
    found = [] if run.failure is None else [run.failure]
    for process in world.processes:
        if process.killed:
            continue
        run.values[process.rank] = process.value
        if run.killed and _is_ours(process.error):
            run.losses[process.rank] = repr(process.error)
        elif process.error is not None:
            found.append(f"{process.name}: {''.join(traceback.format_exception(process.error))}")
        if process.threads_left and process.error is None:
            found.append(f"{process.name} has left threads: {', '.join(process.threads_left)}")
    found.sort(key=lambda text: "AssertionError" not in text)  # the others may follow from it
    run.failure = "\n".join(found) or None


def _is_ours(error: BaseException | None) -> bool:
    """Whether it is an error of zmqgrad, of which each process has its own copy."""
    return any(cls.__name__ == ZmqgradError.__name__ for cls in type(error).__mro__)


def _in_fork(run_here: Callable[[], Run], seed: int) -> Run:
    """Calls ``run_here`` in a fork. Returns what it returned."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        faulthandler.enable()
        try:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(_pickled(run_here()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.close(writer)
    # By the parent: a fork cannot start a watchdog of its own if its parent has one.
    why = "the process that ran the simulation ended without a result: see its output"
    if not select.select([reader], [], [], REAL_SECONDS)[0]:
        why = f"a real wait, or a machine that is too busy: no result after {REAL_SECONDS} s, see the stacks"
        os.kill(child, signal.SIGABRT)  # it tells where it is
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        return Run(seed, why)
    found: Run = pickle.loads(data)
    return found


def _pickled(run: Run) -> bytes:
    try:
        return pickle.dumps(run)
    except Exception:  # the program returned something that does not leave its process
        run.values = {rank: repr(value) for rank, value in run.values.items()}
        return pickle.dumps(run)
