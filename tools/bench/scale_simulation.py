"""A dynamic group of very many workers in one process, to count what its members and its store send.

The membership, the failure detector and the store's state machine are those of the library. Messages go over
the memory transport, heartbeats over real sockets of this host. Not simulated: torch's memory, the store's
sockets and the renewals of watches; ``python -m tools.bench.scale`` measures those in real processes.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from zmqgrad.errors import StoreTimeoutError
from zmqgrad.rpc.membership.dynamic import DynamicGroup
from zmqgrad.rpc.membership.group import make_worker
from zmqgrad.rpc.membership.registry import allocate_id
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.rpc.options import RpcBackendOptions
from zmqgrad.runtime.clock import Deadline
from zmqgrad.runtime.service_thread import ServiceThread
from zmqgrad.store import HashStore, PrefixStore
from zmqgrad.store.effects import Effect, Notification
from zmqgrad.store.local import Table
from zmqgrad.testing.mailbox import MemoryMailbox
from zmqgrad.testing.network import MemoryNetwork
from zmqgrad.transport.base import Handler, OnEnd, OnIdle, OnSuspected, PeerEnd, Resolver
from zmqgrad.transport.heartbeat import HeartbeatListener, HeartbeatMonitor
from zmqgrad.transport.heartbeat.protocol import SUFFIX
from zmqgrad.transport.local import is_listening
from zmqgrad.wire.codec import encode
from zmqgrad.wire.messages import Message

LIMIT_SECONDS = 600.0
"""How long each step may take."""


class Traffic:
    """Counts messages and bytes: at the store by kind, and the heartbeats of each worker. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.heartbeats: Counter[int] = Counter()
        """By worker: the pings that it sent and that reached it, without the replies."""

    def count(self, kind: str, size: int, times: int = 1) -> None:
        """``times`` messages of ``size`` bytes each."""
        with self._lock:
            self.messages[kind] += times
            self.bytes[kind] += times * size

    def ping(self, source: int, target: int) -> None:
        """A heartbeat."""
        with self._lock:
            self.messages["heartbeats"] += 1
            self.bytes["heartbeats"] += 1
            self.heartbeats[source] += 1
            self.heartbeats[target] += 1

    def take(self) -> tuple[Counter[str], Counter[str], Counter[int]]:
        """What was counted since the last call."""
        with self._lock:
            taken = self.messages, self.bytes, self.heartbeats
            self.messages, self.bytes, self.heartbeats = Counter(), Counter(), Counter()
        return taken


def size_of(message: Message) -> int:
    """Bytes on the wire."""
    return len(encode(message, 0, 0, 0))


class CountingTable(Table):
    """The state of a store, which counts the notifications that it sends to its watchers."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notification):
                self.traffic.count("notifications", size_of(effect.message), len(self.registries))
        super().carry_out(effects)


class CountingStore(HashStore):
    """A client, which counts its queries and their replies."""

    def __init__(self, traffic: Traffic, table: CountingTable) -> None:
        super().__init__(LIMIT_SECONDS, table=table)
        self._traffic = traffic

    def _request(self, query: Message, seconds: float) -> Message:
        self._traffic.count("queries", size_of(query))
        try:
            reply = super()._request(query, seconds)
        except StoreTimeoutError:
            self._traffic.count("replies", 0)
            raise
        self._traffic.count("replies", size_of(reply))
        return reply


class MonitoredMailbox(MemoryMailbox):
    """A mailbox in memory that also has the heartbeats of one over sockets."""

    def __init__(self, network: MemoryNetwork, name: str, worker_id: int, traffic: Traffic) -> None:
        super().__init__(network, name, worker_id)
        address = f"ipc://@zmqgrad-scale-{secrets.token_hex(8)}"
        self._heartbeat_endpoint = address + SUFFIX
        self._listener = HeartbeatListener(address, None)
        self._monitor: HeartbeatMonitor | None = None
        self._traffic = traffic

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (*super().endpoints, self._heartbeat_endpoint)

    def start(
        self,
        handler: Handler,
        resolve: Resolver,
        pool: Any = None,
        on_end: OnEnd | None = None,
        service: ServiceThread | None = None,
        suspected: OnSuspected | None = None,
        on_idle: OnIdle | None = None,
    ) -> None:
        assert on_end is not None
        assert service is not None
        assert suspected is not None
        self._monitor = HeartbeatMonitor(
            self._name,
            self._listener,
            service,
            lambda peer, reason, _: self.end(peer, reason),
            suspected,
            on_heartbeat=lambda: self._on_heartbeat,
        )

        def ended(end: PeerEnd) -> None:
            self.unmonitor(end.peer)
            on_end(end)

        super().start(handler, resolve, pool, ended, service, suspected, on_idle)

    def _on_heartbeat(self, peer: int, outgoing: bool) -> None:
        if outgoing:
            self._traffic.ping(self.worker_id, peer)

    def monitor(self, peer: int) -> None:
        if self._monitor is not None:
            self._monitor.watch(peer, self._resolve(peer).endpoints[-1])

    def unmonitor(self, peer: int) -> None:
        if self._monitor is not None:
            self._monitor.forget(peer)

    def close(self, goodbye: str = "") -> None:
        super().close(goodbye)
        if self._monitor is None:
            self._listener.close()
        else:
            self._monitor.close()

    def join(self, deadline: Deadline) -> list[str]:
        if self._monitor is not None and not self._monitor.join(deadline):
            return [f"{self._name}-liveness"]
        return super().join(deadline)


def _is_alive(record: WorkerRecord) -> bool:
    return is_listening(record.endpoints[-1])


class Simulation:
    """A group of ``size`` workers, of which each step is counted."""

    def __init__(self, size: int, tell: Callable[[str], None]) -> None:
        self._size = size
        self._tell = tell
        self._traffic = Traffic()
        self._table = CountingTable(self._traffic)
        self._network = MemoryNetwork()
        self._options = RpcBackendOptions(rpc_timeout=LIMIT_SECONDS)
        self._groups: dict[str, DynamicGroup] = {}
        self.steps: dict[str, dict[str, float]] = {}

    def run(self, idle_seconds: float) -> dict[str, dict[str, float]]:
        """Let workers join, idle, crash and leave; the counts of each step."""
        log = logging.getLogger("zmqgrad")
        level = log.level
        log.setLevel(logging.ERROR)  # threads of one interpreter are late with their heartbeats
        try:
            with self._step("join"):
                for rank in range(self._size):
                    self._tell(f"worker {rank + 1} of {self._size} joins")
                    self._join(f"worker{rank}")
                everybody = [*self._groups]
                for group in self._groups.values():
                    group.worker.membership.wait_for(everybody, Deadline.after(LIMIT_SECONDS))
            with self._step("one more joins"):
                self._join("late")
                for group in self._groups.values():
                    group.worker.membership.wait_for(["late"], Deadline.after(LIMIT_SECONDS))
            with self._step("idle"):
                threading.Event().wait(idle_seconds)  # what is measured is that nothing happens
            with self._step("one crashes"), self._loss(f"worker{self._size // 2}") as group:
                group.close()
            with self._step("one leaves"), self._loss("worker0") as group:
                group.leave(True, Deadline.after(LIMIT_SECONDS))
        finally:
            self._tell("closing")
            log.setLevel(logging.CRITICAL)  # those that are closed first are evicted by the others
            for group in self._groups.values():
                group.worker.close()
            for group in self._groups.values():
                group.close(LIMIT_SECONDS)
            log.setLevel(level)
        return self.steps

    def _join(self, name: str) -> None:
        store = PrefixStore("scale", CountingStore(self._traffic, self._table), owned=True)
        number = allocate_id(store, name, None)
        mailbox = MonitoredMailbox(self._network, name, number, self._traffic)
        worker = make_worker(name, number, 0, mailbox, self._options)
        self._groups[name] = DynamicGroup(worker, store, is_alive=_is_alive)
        self._groups[name].join(Deadline.after(LIMIT_SECONDS))

    @contextmanager
    def _step(self, name: str) -> Any:
        self._tell(name)
        self._traffic.take()
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        messages, sizes, heartbeats = self._traffic.take()
        self.steps[name] = {
            "seconds": seconds,
            **{f"{kind}": messages[kind] for kind in ("queries", "replies", "notifications", "heartbeats")},
            **{f"{kind} bytes": sizes[kind] for kind in ("queries", "replies", "notifications")},
            "heartbeats of the busiest worker": max(heartbeats.values(), default=0),
        }

    @contextmanager
    def _loss(self, name: str) -> Any:
        """Wait until all others know of the loss of ``name``, which happens within."""
        group = self._groups.pop(name)
        known = threading.Semaphore(0)
        for other in self._groups.values():
            other.worker.hooks.peer_lost.append(lambda peer, error: known.release())
        yield group
        deadline = Deadline.after(LIMIT_SECONDS)
        for n in range(len(self._groups)):
            if not known.acquire(timeout=deadline.timeout()):
                raise TimeoutError(f"{n} of {len(self._groups)} workers know that {name} was lost")
        for other in self._groups.values():
            other.worker.hooks.peer_lost.pop()
