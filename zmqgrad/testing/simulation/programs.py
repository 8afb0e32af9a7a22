"""Programs drawn by a seed: what each worker of a simulated job does.

A job has rounds. In each, a worker takes a few steps of its own: calls that call on, asynchronous functions,
references that are passed on, backward passes, work on a store, watches. At the end of a round, workers meet.
Each job draws which kinds of steps it has, since some faults show only where one kind is frequent. What a
worker did is noted in its own copy of this module, for :mod:`~zmqgrad.testing.simulation.oracles`.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from zmqgrad import autograd, rpc
from zmqgrad.errors import RpcTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.store import TCPStore
from zmqgrad.testing.simulation.linearizability import Operation

SEED = "SIMULATION_SEED"
"""The environment variable that says which program."""

HOSTS = "SIMULATION_HOSTS"
"""The one that says how many hosts there are."""

ROUNDS, STEPS = 3, 3
"""Most rounds of a job, and most steps of a worker in each."""

STORE_PORT = 29600
STORE_SECONDS = 8.0
"""How long the store waits for a key that may never come."""

PATIENCE = 60.0
"""How long something is waited for that must come."""

KEYS = ("work/number", "work/text0", "work/text1")
WATCHED = "work/"
BURST = 1100
"""Keys that are set at once: more than libzmq queues for a subscriber."""

executed: list[str] = []
"""Tokens of the calls that ran in this process."""

outcomes: dict[str, str] = {}
"""What the caller learned of each call and each step: ``ok``, or the exception."""

kept: dict[str, Any] = {}
"""References that others left here, by token."""

promised: dict[str, torch.futures.Future[int]] = {}
"""Results of asynchronous functions that other workers will set, by token."""

_parting: list[threading.Thread] = []  # they end this process

parted: list[str] = []
"""Tokens of the calls that this process replied to before it killed itself."""

operations: list[list[Any]] = []
"""What this process did to the keys of the store, and saw of them: key and operation."""

lags: list[float] = []
"""Seconds until a watch showed the last state, once nothing changed any more."""

entered: dict[int, float] = {}
left: dict[int, tuple[float, dict[str, str]]] = {}
"""Of each meeting: when this worker came, and when it went on with which values."""


def program(rank: int) -> dict[str, str]:
    """Runs the steps of worker ``rank`` in a job that loses nobody."""
    job = Job(rank)
    rpc.init_rpc(job.name, rank=rank, world_size=job.size, rpc_backend_options=job.options)
    job.open_store()
    job.run()
    job.settle()
    rpc.shutdown()
    job.close_store()
    return outcomes


def program_with_losses(rank: int) -> dict[str, str]:
    """Runs the steps of worker ``rank`` in a job of which workers are killed: any step may fail."""
    job = Job(rank)
    with noting(f"join:{rank}"):
        rpc.init_rpc(job.name, rank=rank, world_size=job.size, rpc_backend_options=job.options)
    if outcomes[f"join:{rank}"] != "ok":
        return outcomes
    with noting(f"store:{rank}"):
        job.open_store()
    job.run()
    if job.plan.random() < 0.4:
        with noting(f"parting:{rank}"):
            part_with(job, job.plan.randrange(job.size))
    with noting(f"shutdown:{rank}"):
        rpc.shutdown()  # whoever leaves without waiting for the others is lost to them
    job.close_store()
    for thread in _parting:
        thread.join()
    return outcomes


@contextmanager
def noting(token: str) -> Iterator[None]:
    """Notes what becomes of ``token``."""
    try:
        yield
    except RuntimeError as e:
        outcomes[token] = repr(e)
    else:
        outcomes[token] = "ok"


class Job:
    """What the seed draws, and what a worker has to do it with."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"worker{rank}"
        self.size = int(os.environ["WORLD_SIZE"])
        self.options = rpc.RpcBackendOptions(join_timeout=PATIENCE)
        self.rng = random.Random(f"{os.environ[SEED]}/{rank}")
        self.plan = random.Random(os.environ[SEED])  # draws the same on all workers
        kinds = [calls, deferred, references, bursts, backward, passes, work_on_store, watch]
        self.kinds = self.plan.sample(kinds, self.plan.randrange(1, len(kinds) + 1))
        self.has_bursts = self.plan.random() < 0.1
        self.meetings = 0
        self.watches: list[_View] = []
        self.store: TCPStore | None = None

    def run(self) -> None:
        """Runs all rounds."""
        for number in range(self.plan.randrange(1, ROUNDS + 1)):
            alone = self.plan.random() < 0.4  # no message of another step wakes who should have been woken
            rests = alone and self.plan.randrange(self.size) != self.rank
            for i in range(0 if rests else self.rng.randrange(STEPS + 1)):
                token = f"{self.rank}.{number}{i}"
                with noting(token):
                    self.rng.choice(self.kinds)(token, self)
            names = [f"worker{rank}" for rank in range(self.size)]
            some = sorted(self.plan.sample(names, self.plan.randrange(2, self.size + 1)))
            for _ in range(self.plan.randrange(4)):
                timeout = self.plan.choice((None, None, 0.001, 0.01))
                self.meetings += 1
                if self.name in some:
                    with noting(f"meeting:{self.meetings}:{self.rank}"):
                        meet(self.meetings, some, self.name, timeout)

    def choose(self) -> str:
        """Returns a worker."""
        return f"worker{self.rng.randrange(self.size)}"

    # ---- the store --------------------------------------------------------------------------------------

    def open_store(self) -> None:
        """Begins to serve or to use the store, if this job does."""
        if work_on_store in self.kinds or watch in self.kinds:
            self.store = TCPStore("host0", STORE_PORT, is_master=self.rank == 0, timeout=STORE_SECONDS)

    def opened(self) -> TCPStore:
        """Returns the store.

        Raises:
            StoreError: if it could not be opened.
        """
        if self.store is None:
            raise StoreError("the store was lost before it was opened")
        return self.store

    def settle(self) -> None:
        """Waits until watches show the last state, and nobody holds a reference any more."""
        if self.store is not None:
            rpc.barrier()
            if self.rng.random() < 0.5:  # the last write may come while one of these watches begins
                for i in range(1, len(WATCHED)):
                    time.sleep(0.002 * self.rng.random())
                    self.watches.append(_View(self.store, WATCHED[:-i]))
            else:
                for _ in range(self.rng.randrange(1, 4)):
                    time.sleep(0.004 * self.rng.random())
                    operate(f"{self.rank}.last", self, KEYS[1], ("set", f"last{self.rank}"))
            rpc.barrier()
            keys = self.store.list_keys(WATCHED)
            last = dict(zip(keys, self.store.multi_get(keys), strict=True))
            for view in self.watches:
                began = time.monotonic()
                view.follow(lambda view=view: view.values == last)  # type: ignore[misc]
                lags.append(time.monotonic() - began)
        rpc.barrier()
        self.wait_until_nothing_is_referenced()

    def wait_until_nothing_is_referenced(self) -> None:
        """Waits until nobody holds a reference any more."""
        until = time.monotonic() + PATIENCE
        while any(counts := rpc.get_debug_info()["references"].values()) and time.monotonic() < until:
            time.sleep(0.1)  # no event tells that a reference is gone
        if any(counts):
            raise AssertionError(f"references are left: {rpc.get_debug_info()['references']}")

    def close_store(self) -> None:
        """Undoes :meth:`open_store`."""
        for view in self.watches:
            view.events.close()
        if self.store is not None:
            self.store.close()


def at_once(*functions: Callable[[], object]) -> None:
    """Calls each in a thread. Raises what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


# ---- meetings -------------------------------------------------------------------------------------------


def meet(number: int, names: Sequence[str], own: str, timeout: float | None) -> None:
    """Gathers a value of each of ``names``. With a ``timeout``, that may be too late."""
    entered[number] = time.monotonic()
    try:
        found = rpc.all_gather(f"{number}.{own}", names, *([] if timeout is None else [timeout]))
    except RpcTimeoutError:
        if timeout is None:
            raise
    else:
        left[number] = time.monotonic(), found


# ---- calls ----------------------------------------------------------------------------------------------


def calls(token: str, job: Job) -> None:
    """Several calls at once, each of which may call on."""
    plans = [_plan(f"{token}.{i}", job, depth=3) for i in range(job.rng.randrange(1, 4))]
    futures = [rpc.rpc_async(to, work, args=(plan,)) for to, plan in plans]
    for (_, plan), future in zip(plans, futures, strict=True):
        try:
            expected = _count(plan)
            if future.wait() != expected:
                raise AssertionError(f"call {plan[0]} returned {future.value()}, not {expected}")
        except RuntimeError as e:
            outcomes[plan[0]] = repr(e)
            raise
        outcomes[plan[0]] = "ok"


Plan = tuple[str, list[Any]]
"""The token of a call, and the calls that it makes: who is called, and the plan."""


def _plan(token: str, job: Job, depth: int) -> tuple[str, Plan]:
    count = job.rng.randrange(3) if depth > 1 else 0
    inner = [_plan(f"{token}.{i}", job, depth - 1) for i in range(count)]
    return job.choose(), (token, inner)


def _count(plan: Plan) -> int:
    return 1 + sum(_count(inner) for _, inner in plan[1])


def work(plan: Plan) -> int:
    """Runs at the callee. Returns how many calls it took, itself included."""
    token, inner = plan
    executed.append(token)
    futures = [rpc.rpc_async(to, work, args=(nested,)) for to, nested in inner]
    return 1 + sum(int(future.wait()) for future in futures)


# ---- asynchronous functions -----------------------------------------------------------------------------


Hop = tuple[str, str]
"""Which worker an asynchronous function calls, and what it makes of the future of that call."""


@rpc.functions.async_execution
def later(token: str, value: int, hops: list[Hop]) -> torch.futures.Future[int]:
    """Passes ``value`` on along ``hops``, without waiting. Each ``then`` adds 1."""
    executed.append(token)
    (to, way), *on_to = hops
    if way == "promise":
        return _promise(token, to, value)
    call, arguments = (later, (value, on_to)) if on_to else (make, (value,))
    future: torch.futures.Future[int] = rpc.rpc_async(to, call, args=(f"{token}+", *arguments))
    return future.then(lambda passed: passed.wait() + 1) if way == "then" else future


def _promise(token: str, to: str, value: int) -> torch.futures.Future[int]:
    """A future that ``to`` makes this worker set."""
    future: torch.futures.Future[int] = torch.futures.Future()
    promised[token] = future

    def fail_if_lost(call: torch.futures.Future[None]) -> None:
        try:
            call.wait()
        except RuntimeError as e:
            if promised.pop(token, None) is not None:
                future.set_exception(e)  # type: ignore[arg-type]  # torch's stub asks for a value

    own = rpc.get_worker_info().name
    rpc.rpc_async(to, fulfil, args=(f"{token}+", own, token, value)).add_done_callback(fail_if_lost)
    return future


def fulfil(token: str, back: str, promise: str, value: int) -> None:
    """Makes ``back`` set what it has promised."""
    executed.append(token)
    rpc.rpc_sync(back, keep_promise, args=(promise, value))


def keep_promise(token: str, value: int) -> None:
    """Sets what this worker has promised."""
    promised.pop(token).set_result(value)


class Relay:
    """A value whose methods are asynchronous functions."""

    @staticmethod
    @rpc.functions.async_execution
    def later(token: str, value: int, hops: list[Hop]) -> torch.futures.Future[int]:
        """As the function."""
        future: torch.futures.Future[int] = later(token, value, hops)
        return future


def deferred(token: str, job: Job) -> None:
    """Calls of asynchronous functions, at once or one after the other: then no other message helps one on."""
    owner, longest = job.choose(), job.rng.choice((0.0, 0.0003, 0.001, 0.004))
    readings: list[Callable[[], None]] = []
    for i in range(job.rng.randrange(1, 5)):
        if readings and job.rng.random() < 0.7:
            at_once(*readings)
            readings = []
        to, value = job.rng.choice((owner, job.choose())), job.rng.randrange(1000)
        hops = [(job.choose(), job.rng.choice(("then", "as it is", "as it is", "as it is", "promise")))]
        while hops[-1][1] != "promise" and job.rng.random() < 0.3:
            hops.append((job.choose(), job.rng.choice(("then", "as it is", "promise"))))
        expected = value + [way for _, way in hops].count("then")
        for read_it in _call_later(to, job.rng.randrange(6), (f"{token}.{i}", value, hops), job):
            readings.append(partial(_expect, expected, read_it, longest * job.rng.random()))
    at_once(*readings)


def _expect(expected: int, read_it: Callable[[], int], seconds: float) -> None:
    """Reads a value after ``seconds``, when what makes it may just arrive. Checks it."""
    time.sleep(seconds)
    if (found := read_it()) != expected:
        raise AssertionError(f"an asynchronous function returned {found}, not {expected}")


def _call_later(to: str, way: int, args: tuple[Any, ...], job: Job) -> list[Callable[[], int]]:
    """Calls :func:`later` in one of six ways. Returns what waits for the result: others may read it, too."""
    if way == 0:
        return [partial(rpc.rpc_sync, to, later, args)]
    if way == 1:
        return [rpc.rpc_async(to, later, args).wait]
    if way < 4:
        ref = rpc.remote(to, later, args)
    else:
        relay: Any = rpc.remote(to, Relay)
        if way == 4:
            return [relay.rpc_async().later(*args).wait]
        ref = relay.remote().later(*args)
    readers = [job.choose() for _ in range(job.rng.choice((0, 0, 1, 2)))]
    return [ref.to_here] + [
        partial(rpc.rpc_sync, reader, read, (f"{args[0]}.read{i}", ref, []))
        for i, reader in enumerate(readers)
    ]


# ---- a worker that replies and dies ---------------------------------------------------------------------

PARTING_SECONDS = 0.05
"""Longer than it takes to return from a function."""


def part_with(job: Job, victim: int) -> None:
    """Calls a worker on this host that dies once it has replied: its reply is in a socket, and counts."""
    if victim == job.rank or rpc.rpc_sync(f"worker{victim}", host) != host():
        return
    tokens = [f"{job.rank}.parting.{i}" for i in range(4)]
    seconds = job.rng.choice((0.0, 1e-5, 1e-4))

    def call(i: int, token: str) -> None:
        with noting(token):
            if i % 2:
                rpc.rpc_sync(f"worker{victim}", part, args=(token, seconds))
            else:
                rpc.rpc_async(f"worker{victim}", part, args=(token, seconds)).wait()

    at_once(*[partial(call, i, token) for i, token in enumerate(tokens)])


def host() -> str:
    """The name of the host of this process."""
    return socket.gethostname()


@rpc.functions.async_execution
def part(token: str, seconds: float) -> torch.futures.Future[None]:
    """Replies, and ends the process ``seconds`` later."""
    executed.append(token)
    future: torch.futures.Future[None] = torch.futures.Future()

    def leave() -> None:
        time.sleep(PARTING_SECONDS)
        future.set_result(None)  # sends the reply, in this thread
        with suppress(RuntimeError):
            rpc.get_worker_info()  # this worker was not closed before, so the reply has left
            parted.append(token)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    _parting.append(threading.Thread(target=leave, daemon=True))
    _parting[-1].start()
    return future


# ---- references -----------------------------------------------------------------------------------------


def make(token: str, value: int) -> int:
    """Makes the value of a reference."""
    executed.append(token)
    return value


def read(token: str, ref: Any, on_to: list[str]) -> int:
    """Reads a reference, after it was passed on to others."""
    executed.append(token)
    if on_to:
        value: int = rpc.rpc_sync(on_to[0], read, args=(f"{token}.0", ref, on_to[1:]))
        return value
    value = ref.to_here()
    return value


def references(token: str, job: Job) -> None:
    """A reference to a value elsewhere, passed on along a chain of workers."""
    value = job.rng.randrange(1000)
    ref = rpc.remote(job.choose(), make, args=(f"{token}.make", value))
    chain = [job.choose() for _ in range(job.rng.randrange(1, 4))]
    found = rpc.rpc_sync(chain[0], read, args=(f"{token}.read", ref, chain[1:]))
    if found != value:
        raise AssertionError(f"reference {token} is {found}, not {value}")


def keep(token: str, ref: Any, on_to: list[str]) -> None:
    """Keeps a reference until :func:`use`, or passes it on and does not."""
    executed.append(token)
    if on_to:
        rpc.rpc_async(on_to[0], keep, args=(token + "+", ref, on_to[1:])).wait()
    else:
        kept[token] = ref


def use(token: str) -> int:
    """Reads a reference that was kept, and releases it."""
    value: int = kept.pop(token).to_here()
    return value


def bursts(token: str, job: Job) -> None:
    """References that are passed on to several workers while they are released here."""
    value, futures, keepers = job.rng.randrange(1000), [], []
    ref = rpc.remote(job.choose(), make, args=(f"{token}.make", value))
    if job.rng.random() < 0.5:
        rpc.remote(job.choose(), make, args=(f"{token}.unused", value))
    for i in range(job.rng.randrange(4)):
        chain = [job.choose() for _ in range(job.rng.randrange(1, 3))]
        futures.append(rpc.rpc_async(chain[0], keep, args=(f"{token}.keep{i}", ref, chain[1:])))
        keepers.append((chain[-1], f"{token}.keep{i}" + "+" * (len(chain) - 1)))
    del ref
    for future in futures:
        future.wait()
    job.rng.shuffle(keepers)
    for keeper, kept_as in keepers:
        found = rpc.rpc_sync(keeper, use, args=(kept_as,))
        if found != value:
            raise AssertionError(f"reference {kept_as} is {found}, not {value}")


# ---- autograd -------------------------------------------------------------------------------------------


def product(x: torch.Tensor, factors: list[float], on_to: list[str]) -> torch.Tensor:
    """Multiplies ``x`` by the first factor, and by the others elsewhere."""
    y = x * factors[0]
    if on_to:
        y = rpc.rpc_sync(on_to[0], product, args=(y, factors[1:], on_to[1:]))
    return y


def backward(token: str, job: Job) -> None:
    """A backward pass through several workers. Its gradients are compared with those of one process."""
    _backward(token, _chains(job))


def passes(token: str, job: Job) -> None:
    """Several backward passes at once."""
    drawn = [_chains(job) for _ in range(job.rng.randrange(2, 4))]
    at_once(*[lambda chains=chains: _backward(token, chains) for chains in drawn])


Chains = list[tuple[list[float], list[str]]]
"""Factors, and the worker of each."""


def _chains(job: Job) -> Chains:
    lengths = [job.rng.randrange(1, 5) for _ in range(job.rng.randrange(1, 4))]
    return [
        ([float(job.rng.randrange(1, 9)) for _ in range(n)], [job.choose() for _ in range(n)])
        for n in lengths
    ]


def _backward(token: str, chains: Chains) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        futures = [rpc.rpc_async(to[0], product, args=(x, factors, to[1:])) for factors, to in chains]
        autograd.backward(context, [torch.stack([future.wait() for future in futures]).sum()])
        found = autograd.get_gradients(context)[x]
    expected = float(sum(math.prod(factors) for factors, _ in chains))
    if not torch.equal(found, torch.full((3,), expected)):
        raise AssertionError(f"gradient {token} is {found}, not {expected}")


# ---- the store ------------------------------------------------------------------------------------------


def work_on_store(token: str, job: Job) -> None:
    """Operations on few keys, by two threads."""
    at_once(*[_operations(f"{token}.{i}", job) for i in range(2)])


def _operations(client: str, job: Job) -> Callable[[], None]:
    """Returns what does a few operations."""
    rng = random.Random(job.rng.getrandbits(32))

    def run() -> None:
        last = ""
        for i in range(rng.randrange(1, 5)):
            key, value = rng.choice(KEYS), f"{client}.{i}"
            call: tuple[Any, ...] = ("add", rng.randrange(1, 10))
            if key != KEYS[0]:
                draws = ("set", value), ("append", f"+{value}"), ("compare_set", last, value)
                call = rng.choice(draws)
            if rng.random() < 0.4:
                call = rng.choice((("get",), ("get",), ("delete",), ("check",)))
            last = operate(client, job, key, call) or last

    return run


def operate(client: str, job: Job, key: str, call: tuple[Any, ...]) -> str:
    """Does one operation, and notes it. Returns the value that it found."""
    store, began = job.opened(), time.monotonic()
    note = [key, Operation(client, call, None, began, math.inf, unknown=True)]
    operations.append(note)  # now, since this process may be killed
    result = _perform(store, key, *call)
    note[1] = Operation(client, call, result, began, time.monotonic())
    return result if isinstance(result, str) else ""


def _perform(store: TCPStore, key: str, name: str, *arguments: Any) -> Any:
    if name == "check":
        return store.check([key])
    if name == "delete":
        return store.delete_key(key)
    try:
        result = getattr(store, name)(key, *arguments)
    except StoreTimeoutError as e:
        if "wait timeout" not in str(e):  # the store has not replied
            raise
        return None
    return result.decode() if isinstance(result, bytes) else result


class _View:
    """What a watch shows of the keys."""

    def __init__(self, store: TCPStore, prefix: str = WATCHED) -> None:
        self.store = store
        self.events = store.watch(prefix=prefix, present=True)
        self.values: dict[str, bytes] = {}
        self._revisions: dict[str, int] = {}

    def follow(self, ready: Callable[[], bool]) -> None:
        """Follows the events until ``ready()``."""
        until = time.monotonic() + PATIENCE
        while not ready():
            try:
                event = self.events.next(max(0.0, until - time.monotonic()))
            except StoreTimeoutError:
                self.store.num_keys()  # fails if its server was lost with what was missed
                last = max(self._revisions.values(), default=-1)
                raise AssertionError(f"a watch shows nothing after revision {last}") from None
            before = self._revisions.get(event.key, -1)
            if event.revision <= before or event.old != self.values.get(event.key):
                raise AssertionError(f"{event} follows {self.values.get(event.key)!r} of revision {before}")
            self._revisions[event.key] = event.revision
            if event.new is None:
                self.values.pop(event.key, None)
            else:
                self.values[event.key] = event.new


def watch(token: str, job: Job) -> None:
    """A watch, while others and this worker write. What it shows at a mark is as good as read."""
    store = job.opened()
    view = _View(store)
    job.watches.append(view)
    client, mark = f"{token}.view", f"{WATCHED}~{token}"
    _operations(f"{token}.0", job)()
    if job.has_bursts:
        store.multi_set([f"{WATCHED}{i}" for i in range(BURST)], [token] * BURST)
    began = time.monotonic()
    store.set(mark, "")
    view.follow(lambda: mark in view.values)
    for key in KEYS:
        shown = view.values[key].decode() if key in view.values else None
        operations.append([key, Operation(client, ("get",), shown, began, time.monotonic())])
