"""Workers on two hosts (network namespaces), with a secret, while the network between them fails."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import zmqgrad.autograd as dist_autograd
from tests.support.namespaces import Hosts, enter, hosts
from tests.support.processes import run_processes
from tools.faults.network import Network as FaultyNetwork
from tools.faults.network import missing
from tools.ports import free_port
from zmqgrad import rpc
from zmqgrad.errors import PeerLostError
from zmqgrad.store import TCPStore

pytestmark = [pytest.mark.processes, pytest.mark.slow]

__all__ = ["hosts"]

CALLS = int(os.environ.get("ZMQGRAD_TEST_OUTAGE_CALLS", "2000"))
"""How many calls are made while the network fails."""

MAX_OUTAGE_SECONDS = 1.5

ran: Counter[int] = Counter()


def run_once(i: int) -> int:
    ran[i] += 1
    return i


def times_run() -> tuple[int, int]:
    """How many different calls ran here, and how many runs there were."""
    return len(ran), ran.total()


class Network(threading.Thread):
    """Breaks the network between ``hosts`` in one way after another until it is told to stop.

    It begins once a worker has connected to the unix socket at ``meeting``: the workers first meet at a store
    of torch, which does not survive a reset.
    """

    def __init__(self, hosts: Hosts, meeting: Path) -> None:
        super().__init__(name="network")
        self._hosts = hosts
        self._meeting = socket.create_server(str(meeting), family=socket.AF_UNIX)
        self._meeting.settimeout(60)
        self._ending = threading.Event()
        self._ways: list[Callable[[float], None]] = [self._kill, self._down]
        if hosts.can_reject():
            self._ways += [self._reject, self._reject]
        self.outages: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        drawn = random.Random(7)
        try:
            with self._meeting:
                self._meeting.accept()[0].close()
            while not self._ending.wait(drawn.uniform(0.1, 1.0)):
                way = drawn.choice(self._ways)
                way(drawn.uniform(0.1, MAX_OUTAGE_SECONDS))
                self.outages[way.__name__] += 1
        except BaseException as e:
            self.failure = e

    def _kill(self, seconds: float) -> None:
        self._hosts.kill_connections()

    def _down(self, seconds: float) -> None:
        with self._hosts.link_down():
            self._ending.wait(seconds)

    def _reject(self, seconds: float) -> None:
        with self._hosts.rejecting(random.randrange(2)):
            self._ending.wait(seconds)

    def stop(self) -> None:
        self._ending.set()
        self.join()
        if self.failure is not None:
            raise self.failure


# ---- a network that fails all the time, for a while ------------------------------------------------------


def through_outages(rank: int, calls: int, port: int, meeting: Path) -> Any:
    enter(rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options())
    result = None
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as met:
            met.connect(str(meeting))
        with ThreadPoolExecutor(8) as pool:
            tasks = [
                pool.submit(call_often, calls // 2, 0),
                pool.submit(call_many_at_once, calls // 2, calls // 2),
                pool.submit(send_large, max(2, calls // 1000)),
                pool.submit(refer, max(20, calls // 100)),
                pool.submit(train, max(20, calls // 100)),
                pool.submit(use_store, port, max(100, calls // 20)),
            ]
            for task in tasks:
                task.result()
        result = rpc.rpc_sync("w1", times_run), rpc.get_stats()["sessions"]["reconnects"]
    rpc.shutdown()
    return result


def options() -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(rpc_timeout=100)


def call_often(count: int, first: int) -> None:
    for i in range(first, first + count):
        assert rpc.rpc_sync("w1", run_once, args=(i,)) == i


def call_many_at_once(count: int, first: int) -> None:
    for begin in range(first, first + count, 200):
        numbers = range(begin, min(begin + 200, first + count))
        futures = [rpc.rpc_async("w1", run_once, args=(i,)) for i in numbers]
        assert [future.wait() for future in futures] == list(numbers)


def send_large(count: int) -> None:
    for k in range(count):
        sent = torch.arange(k, k + (16 << 20), dtype=torch.float32)  # 64 MB
        assert rpc.rpc_sync("w1", torch.neg, args=(sent,)).equal(-sent)


def refer(count: int) -> None:
    for k in range(count):
        reference = rpc.remote("w1", torch.full, args=((4,), float(k)))
        assert reference.to_here().tolist() == [float(k)] * 4


def train(count: int) -> None:
    for k in range(1, count + 1):
        weight = torch.full((5,), float(k), requires_grad=True)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", torch.mul, args=(weight, weight)).sum()
            dist_autograd.backward(context, [loss])
            assert dist_autograd.get_gradients(context)[weight].tolist() == [2.0 * k] * 5


def use_store(port: int, count: int) -> None:
    """A store on the other host: counted once, each item popped once, the last value seen."""
    with TCPStore("10.213.7.2", port, timeout=100) as store:
        seen: list[bytes | None] = []
        last = threading.Event()

        def watch(old: bytes | None, new: bytes | None) -> None:
            seen.append(new)
            if new == b"%d" % count:
                last.set()

        store.watch_key("watched", watch)
        for i in range(1, count + 1):
            assert store.add("counter", 1) == i
            store.queue_push("queue", f"{i}")
            store.set("watched", f"{i}")
            assert store.queue_pop("queue") == b"%d" % i
        assert store.queue_len("queue") == 0
        assert last.wait(60), seen[-3:]


def serve_store(rank: int, calls: int, port: int, meeting: Path) -> Any:
    """As :func:`through_outages`; the worker on the second host serves a store as well."""
    if rank == 0:
        return through_outages(rank, calls, port, meeting)
    enter(rank)
    with TCPStore("10.213.7.2", port, is_master=True, timeout=100):
        return through_outages(rank, calls, port, meeting)


@pytest.mark.timeout(max(170, CALLS // 50))
def test_nothing_is_lost_or_done_twice_while_the_network_fails(hosts: Hosts, tmp_path: Path) -> None:
    network = Network(hosts, tmp_path / "meeting")
    network.start()
    try:
        arguments = CALLS, free_port(), tmp_path / "meeting"
        (counts, reconnects), _ = run_processes(
            serve_store, 2, arguments, timeout=max(140, CALLS // 60), env=hosts.environment()
        )
    finally:
        network.stop()
    assert counts == (CALLS, CALLS), "(different calls that ran, runs)"
    assert reconnects > 0
    print(f"{CALLS} calls, {reconnects} reconnects, outages: {dict(network.outages)}")


# ---- ends ------------------------------------------------------------------------------------------------


def survive_a_kill(rank: int) -> Any:
    enter(rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options())
    if rank == 1:
        threading.Event().wait(60)
    seconds = 0.0
    if rank == 0:
        assert rpc.rpc_sync("w1", run_once, args=(1,)) == 1
        waiting = rpc.rpc_async("w1", time.sleep, args=(60,))
        rpc.rpc_async("w1", os.kill, args=(rpc.rpc_sync("w1", os.getpid), signal.SIGKILL))
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"10\.213\.7\.2:\d+ has refused connections for 3\.\d s"):
            waiting.wait()
        seconds = time.monotonic() - began
        assert rpc.rpc_sync("w2", run_once, args=(2,)) == 2
    rpc.shutdown()
    return seconds


@pytest.mark.timeout(120)
def test_a_process_that_was_killed_is_lost_after_its_host_has_refused_for_3_seconds(hosts: Hosts) -> None:
    seconds, _, _ = run_processes(survive_a_kill, 3, timeout=90, env=hosts.environment(), may_die=[1])
    assert 2.5 < seconds < 10


def call_for_a_while(rank: int, joined: Path, seconds: float) -> int:
    enter(rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options())
    calls = 0
    if rank == 0:
        assert rpc.rpc_sync("w1", run_once, args=(0,)) == 0
        joined.write_bytes(b".")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            calls += 1
            assert rpc.rpc_sync("w1", run_once, args=(calls,)) == calls
        joined.write_bytes(b".")
    rpc.shutdown()
    return calls


@pytest.mark.timeout(120)
def test_a_link_that_is_up_for_moments_loses_nobody(hosts: Hosts, tmp_path: Path) -> None:
    """Calls get through in each of them. As often as they come, a sixth of the 10 s, a connection for
    heartbeats was tried, always when there was none.
    """
    joined = tmp_path / "joined"
    os.mkfifo(joined)
    told = os.open(joined, os.O_RDWR)
    ending = threading.Event()

    def flap() -> None:
        if not select.select([told], [], [], 60)[0]:
            return
        os.read(told, 1)
        while not ending.is_set() and not select.select([told], [], [], 0.45)[0]:
            with hosts.link_down():
                hosts.kill_connections()
                ending.wait(1.15)

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        calls, _ = run_processes(call_for_a_while, 2, (joined, 20.0), timeout=90, env=hosts.environment())
    finally:
        ending.set()
        flapping.join()
        os.close(told)
    assert calls > 0


def send_slowly(rank: int, begun: Path) -> float:
    enter(rank)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options())
    seconds = 0.0
    if rank == 0:
        sent = torch.ones(48 << 20)  # 192 MB: 4 s
        assert rpc.rpc_sync("w1", torch.sum, args=(sent[: 1 << 20],)) == 1 << 20
        begun.write_bytes(b".")
        began = time.monotonic()
        assert rpc.rpc_sync("w1", torch.sum, args=(sent,)) == len(sent)
        seconds = time.monotonic() - began
    rpc.shutdown()
    return seconds


@pytest.mark.timeout(150)
def test_a_firewall_that_forgets_the_connection_of_a_large_tensor(tmp_path: Path) -> None:
    """Nothing tells either end but that no packet is acknowledged any more; new connections work.

    The connection of small messages to the receiver carries nothing but acknowledgements meanwhile.
    """
    for feature in ("firewall", "bandwidth"):
        if why := missing(feature):
            pytest.skip(f"no {feature} here: {why}")
    begun, network = tmp_path / "begun", FaultyNetwork()
    os.mkfifo(begun)
    told = os.open(begun, os.O_RDWR)
    try:
        network.open()
        with (
            network.shaped("tbf", "rate", "400mbit", "burst", "256kb", "latency", "50ms"),
            ThreadPoolExecutor(1) as pool,
        ):
            workers = pool.submit(
                run_processes, send_slowly, 2, (begun,), timeout=120, env=network.environment()
            )
            assert select.select([told], [], [], 60)[0]
            time.sleep(1)  # it is under way
            with network.filtered(*network.forgotten()):
                seconds, _ = workers.result()
    finally:
        os.close(told)
        network.close()
    assert 5 < seconds < 25
