"""What the three processes of a cell do, for each role of the victim.

w1 is the victim. w0 and w2 are the survivors: where a role does not say otherwise, w0 calls w2 all the time,
which no fault of w1 may disturb. Every step checks its result.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zmqgrad.autograd as dist_autograd
from tests.support.namespaces import enter
from tools.faults import agents
from tools.faults.model import AFTER_SENDING, BEFORE_SENDING, ENTERING, ON_RECEIPT, Moment
from tools.faults.participant import Participant
from zmqgrad import rpc
from zmqgrad.optim import DistributedOptimizer
from zmqgrad.rpc import RRef
from zmqgrad.rpc.current import current_worker
from zmqgrad.store import TCPStore

SHUTDOWN_SECONDS = 60.0
"""More than the checks at the end may take."""

FLOATS = 16 << 10
"""Of the tensors in calls: enough for shared memory and for a frame of its own."""

IN_FLIGHT = 100
"""Calls at a time, under load."""

Work = Callable[[Participant], None]

_participant: list[Participant] = []
"""The participant of this process, for functions that are called remotely."""


def open_group(p: Participant, rank: int | None, world_size: int | None = 3) -> None:
    """Join the group of the cell."""
    place = p.place
    options = rpc.RpcBackendOptions(
        rpc_timeout=place.step_seconds,
        join_timeout=place.step_seconds,
        init_method=f"tcp://{place.address}:{place.port}",
    )
    if place.frozen_timeout is not None:
        options.frozen_timeout = place.frozen_timeout
    if world_size is None:
        os.environ.pop("WORLD_SIZE", None)
    rpc.init_rpc(place.name, rank=rank, world_size=world_size, rpc_backend_options=options)
    rpc.on_loss(lambda info, why: on_loss(p, info.name, why))


def on_loss(p: Participant, name: str, why: str) -> None:
    """Report the loss of worker ``name``."""
    p.has_lost.add(name)
    p.report("lost", name, why)


def move_in(p: Participant) -> None:
    """Enter the victim's host or that of the others, where there are two."""
    _participant.append(p)
    if "ZG_TEST_HOSTS" in os.environ:
        enter(p.place.rank)


def on_host(work: Work) -> Work:
    """Do ``work`` on the victim's host or that of the others."""

    def moved(p: Participant) -> None:
        move_in(p)
        work(p)

    return moved


def in_group(loop: Work, check: Work = lambda p: None) -> Work:
    """Join, do ``loop``, wait until all are idle, ``check`` what is left, and leave."""

    def work(p: Participant) -> None:
        move_in(p)
        open_group(p, p.place.rank)
        p.report("endpoints", current_worker().mailbox.endpoints)
        p.ready()
        loop(p)
        p.idle()
        check(p)
        is_out = p.place.is_victim and p.has_lost  # after a partition: w0 has the store of the group
        rpc.shutdown(graceful=not is_out, timeout=SHUTDOWN_SECONDS)

    return work


# ---- what is called -------------------------------------------------------------------------------------


def double(number: int, tensor: torch.Tensor) -> torch.Tensor:
    """A numbered call."""
    _participant[0].ran(number)
    return tensor * 2


def call(to: str, number: int) -> None:
    """A numbered call, checked."""
    result = rpc.rpc_sync(to, double, args=(number, torch.full((FLOATS,), float(number % 1000))))
    assert result.sum().item() == 2.0 * (number % 1000) * FLOATS, "P1: a wrong result"


def calls(number: int) -> None:
    """Many numbered calls of w1 at a time, checked: none is lost."""
    numbers = [number << 16 | i for i in range(IN_FLIGHT)]
    futures = [rpc.rpc_async("w1", double, args=(n, torch.full((FLOATS,), float(n % 1000)))) for n in numbers]
    for n, future in zip(numbers, futures, strict=True):
        assert future.wait()[-1].item() == 2.0 * (n % 1000), f"P1: a wrong result of call {n}"


def make(number: int) -> list[int]:
    """A value to refer to."""
    return [number]


def first(rref: RRef[list[int]]) -> int:
    """Use a reference of another worker's value."""
    return rref.to_here()[0]


def stage(x: torch.Tensor) -> torch.Tensor:
    """The middle of a pipeline."""
    return rpc.rpc_sync("w2", torch.mul, args=(x * 3, 2.0))


# ---- loops ----------------------------------------------------------------------------------------------


def calls_w2(p: Participant) -> None:
    """What survivors do all the time."""
    p.steps(lambda n: call("w2", n), needs_victim=False)


def waits(p: Participant) -> None:
    """Only serves."""
    p.moments.arm()
    p.finish.wait()


def beside(step: Callable[[int], None]) -> Work:
    """Do ``step``, which needs the victim, and meanwhile call w2 in another thread."""

    def loop(p: Participant) -> None:
        other = threading.Thread(target=calls_w2, args=(p,), name="beside")
        other.start()
        p.steps(step)
        other.join()

    return loop


def alone(step: Callable[[int], None]) -> Work:
    """Do ``step``, which needs the victim."""
    return lambda p: p.steps(step)


# ---- steps ----------------------------------------------------------------------------------------------


def refer(owner: str) -> Callable[[int], None]:
    """Create a reference, use it, drop it."""

    def step(number: int) -> None:
        rref = rpc.remote(owner, make, args=(number,))
        assert rref.to_here() == [number], "a wrong value"
        assert rref.rpc_sync().index(number) == 0, "a wrong value"

    return step


def fork(number: int) -> None:
    """w0 lends a reference of w2's value to the victim; the value lives on while w0 uses it (R1)."""
    rref = rpc.remote("w2", make, args=(number,))
    try:
        assert rpc.rpc_sync("w1", first, args=(rref,)) == number, "a wrong value"
    finally:
        assert rref.to_here() == [number], "R1: a wrong value"


def backward(function: Callable[..., Any], to: str, factor: float) -> Callable[[int], None]:
    """One backward pass through ``to``."""

    def step(number: int) -> None:
        x = torch.full((4,), float(number % 100), requires_grad=True)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync(to, function, args=(x,)).sum()
            dist_autograd.backward(context, [loss])
            gradient = dist_autograd.get_gradients(context)[x]
        assert gradient.tolist() == [factor] * 4, f"P7: a wrong gradient {gradient.tolist()}"

    return step


def triple(x: torch.Tensor) -> torch.Tensor:
    """Something differentiable."""
    return x * 3


def parameter() -> torch.Tensor:
    """A parameter of an owner."""
    return torch.zeros(4, requires_grad=True)


def value_of(rref: RRef[torch.Tensor]) -> list[float]:
    """The parameter, on its owner."""
    values: list[float] = rref.local_value().tolist()
    return values


def optimize(p: Participant) -> None:
    """Steps of an optimizer with parameters on the victim and on w2: each is applied once."""
    parameters: list[RRef[torch.Tensor]] = []
    optimizer: DistributedOptimizer | None = None
    taken = 0

    def step(number: int) -> None:
        nonlocal optimizer, taken
        if optimizer is None:  # in a step, which may be struck
            parameters[:] = [rpc.remote(owner, parameter) for owner in ("w1", "w2")]
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
        with dist_autograd.context() as context:
            loss = parameters[0].to_here().sum() + parameters[1].to_here().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        taken += 1
        for rref in parameters:
            values = rpc.rpc_sync(rref.owner(), value_of, args=(rref,))
            assert values == [-float(taken)] * 4, f"P1: {values} after {taken} steps"

    beside(step)(p)


# ---- checks at the end ----------------------------------------------------------------------------------


def no_values(p: Participant) -> None:
    """R2 at an owner."""
    p.eventually(
        f"R2: values are kept: {rpc.get_debug_info()['references']}",
        lambda: rpc.get_debug_info()["references"]["owner_rrefs"] == 0,
    )


def no_contexts(p: Participant) -> None:
    """Contexts of a root that died are released."""
    p.eventually(
        "an autograd context of a finished or lost root is kept",
        lambda: rpc.get_debug_info().get("autograd", {}).get("num_autograd_contexts", 0) == 0,
    )


# ---- roles outside a group of three ---------------------------------------------------------------------


def serve_store(p: Participant) -> None:
    """The victim serves a store with a journal."""
    move_in(p)
    place = p.place
    journal = Path(place.directory) / "disk" / "journal"
    with TCPStore(place.victims_address, place.port, is_master=True, wait_for_workers=False, journal=journal):
        p.report("endpoints", (f"tcp://{place.victims_address}:{place.port}",))
        p.ready()
        waits(p)
        p.idle()


def use_store(p: Participant) -> None:
    """Adds, queues and a watch: each is applied once and kept (P9), and the last value is seen (P8)."""
    move_in(p)
    place = p.place
    least = most = 0  # an addition that raised an error may have been applied, once
    with TCPStore(place.victims_address, place.port, timeout=p.place.step_seconds) as store:
        name, seen = place.name, Seen(p.place.step_seconds)
        store.watch_key(f"watched {name}", seen)

        def step(number: int) -> None:
            nonlocal least, most
            most += 1
            total = store.add(f"count {name}", 1)
            assert least < total <= most, f"P9: {least + 1} to {most} additions made {total}"
            least = most = total
            store.queue_push(f"queue {name} {number}", b"%d" % number)
            assert store.queue_pop(f"queue {name} {number}") == b"%d" % number, "P9: a wrong item"
            store.set(f"watched {name}", b"%d" % number)
            seen.wait(b"%d" % number)

        p.ready()
        p.steps(step)
        p.idle()


class Seen:
    """A callback of a watch whose last value can be waited for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._value: bytes | None = None
        self._changed = threading.Condition()

    def __call__(self, old: bytes | None, new: bytes | None) -> None:
        with self._changed:
            self._value = new
            self._changed.notify_all()

    def wait(self, value: bytes) -> None:
        """Until the last value is ``value``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._value == value, self._seconds):
                raise AssertionError(f"P8: the watch shows {self._value!r}, not the last value {value!r}")


def host_watched_store(p: Participant) -> None:
    """w0 serves a store and sets keys that the victim watches."""
    move_in(p)
    place = p.place
    with TCPStore(place.address, place.port, is_master=True, wait_for_workers=False) as store:
        p.ready()
        p.steps(lambda n: store.set("others", b"%d" % n), needs_victim=False)
        p.idle()


def watch(p: Participant) -> None:
    """Sets a key and sees it."""
    move_in(p)
    with TCPStore(p.place.address, p.place.port, timeout=p.place.step_seconds) as store:
        seen = Seen(p.place.step_seconds)
        store.watch_key("mine", seen)
        p.ready()

        def step(number: int) -> None:
            store.set("mine", b"%d" % number)
            seen.wait(b"%d" % number)

        p.steps(step)
        p.idle()


def hub(p: Participant) -> None:
    """w0 and w2 are in a dynamic group, which the victim joins and leaves."""
    move_in(p)
    open_group(p, 0 if p.place.rank == 0 else None, None)
    if p.place.rank == 0:
        rpc.wait_for_workers(["w2"])
    p.ready()
    (calls_w2 if p.place.rank == 0 else waits)(p)
    p.idle()
    rpc.shutdown(timeout=SHUTDOWN_SECONDS)


def join_and_leave(p: Participant) -> None:
    """Join, call, leave; over and over."""
    move_in(p)
    p.ready()

    def step(number: int) -> None:
        open_group(p, None, None)
        try:
            call("w0", number)
        finally:
            rpc.shutdown(timeout=SHUTDOWN_SECONDS)

    p.steps(step)
    p.idle()


@dataclass(frozen=True)
class Role:
    """What the processes do while the victim has this role.

    Args:
        works: of w0, w1 (the victim) and w2; None: there is no such process.
        moment: at which faults other than SIGKILL strike, unless all moments are tried.
        restarts: the victim is started again after its death, and is then expected to work.
        noticed: whether the survivors notice the death of the victim.
        on_disk: whether the victim writes to a disk.
        shares_memory: whether tensors go through shared memory.
        counts_runs: whether the numbered functions are counted.
    """

    name: str
    works: tuple[Work | None, Work, Work | None]
    moment: Moment
    restarts: bool = False
    noticed: bool = True
    on_disk: bool = False
    shares_memory: bool = False
    survives_loss: bool = False
    """Whether a step may succeed without the victim, after a restart: clients of a store reconnect."""
    serves_store: bool = False
    loses_state: bool = False
    """Whether the state that the others need ends with the victim: their steps raise, and can be repeated."""


_idle = in_group(waits)

ROLES = {
    role.name: role
    for role in (
        Role(
            "caller",
            (in_group(calls_w2), in_group(alone(lambda n: call("w0", n))), _idle),
            Moment(BEFORE_SENDING, "CALL"),
            shares_memory=True,
        ),
        Role(
            "callee",
            (in_group(beside(lambda n: call("w1", n))), _idle, _idle),
            Moment(ON_RECEIPT, "CALL"),
            shares_memory=True,
        ),
        Role(
            "callee under load",
            (in_group(beside(calls)), _idle, _idle),
            Moment(ON_RECEIPT, "CALL"),
            shares_memory=True,
        ),
        Role(
            "RRef owner",
            (in_group(beside(refer("w1"))), in_group(waits, no_values), _idle),
            Moment(ON_RECEIPT, "RREF_FETCH"),
        ),
        Role(
            "RRef user",
            (in_group(calls_w2, no_values), in_group(alone(refer("w0"))), _idle),
            Moment(BEFORE_SENDING, "RREF_FETCH"),
        ),
        Role(
            "child of a fork",
            (in_group(beside(fork)), _idle, in_group(waits, no_values)),
            Moment(AFTER_SENDING, "RREF_FORK_REQUEST"),
        ),
        Role(
            "root of a backward pass",
            (in_group(calls_w2, no_contexts), in_group(alone(backward(triple, "w0", 3.0))), _idle),
            Moment(AFTER_SENDING, "BACKWARD_AUTOGRAD_REQ"),
        ),
        Role(
            "stage",
            (
                in_group(beside(backward(stage, "w1", 6.0)), no_contexts),
                in_group(waits, no_contexts),
                in_group(waits, no_contexts),
            ),
            Moment(ON_RECEIPT, "BACKWARD_AUTOGRAD_REQ"),
        ),
        Role("optimizer owner", (in_group(optimize), _idle, _idle), Moment(ON_RECEIPT, "CALL")),
        Role(
            "store host",
            (use_store, serve_store, use_store),
            Moment(BEFORE_SENDING, "STORE_NUMBER"),
            restarts=True,
            noticed=False,
            on_disk=True,
            survives_loss=True,
            serves_store=True,
        ),
        Role(
            "watcher",
            (host_watched_store, watch, None),
            Moment(ON_RECEIPT, "KEY_UPDATED"),
            noticed=False,
            survives_loss=True,
        ),
        Role(
            "joining worker",
            (hub, join_and_leave, hub),
            Moment(ON_RECEIPT, "STORE_VALUE"),
            restarts=True,
            noticed=False,
        ),
        Role(
            "agent",
            (
                on_host(agents.agent(leads=True)),
                on_host(agents.agent(leads=False)),
                on_host(agents.serve_rendezvous),
            ),
            Moment(ENTERING, "RUNNING"),
            restarts=True,
            noticed=False,
            survives_loss=True,
        ),
        Role(
            "agent with the store",
            (
                on_host(agents.agent(leads=False, at_victim=True)),
                on_host(agents.agent(leads=True, serves=True, at_victim=True)),
                None,
            ),
            Moment(ENTERING, "RUNNING"),
            restarts=True,
            noticed=False,
            survives_loss=True,
            serves_store=True,
            loses_state=True,
        ),
    )
}


def act(role: str, p: Participant) -> None:
    """Do what the process of ``p`` does in cells of ``role``."""
    work = ROLES[role].works[p.place.rank]
    assert work is not None
    work(p)
