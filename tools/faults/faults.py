"""The faults, as context managers: entered when the moment is reached, left when the fault is over."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tools.faults import network as net
from tools.faults.delay import delayed
from tools.faults.judging import Promise
from tools.faults.model import Effect
from tools.faults.network import Network
from tools.faults.roles import Role

FROZEN_SECONDS = 10.0
"""The ``frozen_timeout`` of cells whose victim is stopped for good (the default is two minutes)."""

SMALL_BYTES = 60_000
"""To what size memory files, and others, may grow: less than a tensor of a call has."""

LOST_SECONDS = 20.0
"""A rendezvous whose store does not reply for this long is lost to the agents: they end with an error."""

LOCAL_SECONDS, REMOTE_SECONDS = 3.0, 10.0
"""P2: the liveness timeouts on one host and between hosts."""

REFUSED_SECONDS = 3.5
"""P2: of a process whose host lives and refuses connections."""


class Scene(Protocol):
    """What a fault can get at."""

    network: Network | None
    directory: Path

    @property
    def victim(self) -> int:
        """The process id of the victim."""
        ...

    def order(self, what: str) -> None:
        """Have the victim do something to itself."""
        ...

    def stranger(self, kind: str) -> None:
        """Start a process on the survivors' host that does not belong to the job."""
        ...


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        strike: see the head of the module.
        seconds: how long it lasts; None: for good.
        step_seconds: timeout of each operation.
        effect: what it may do to steps.
        notice_seconds: limit until a survivor notices.
        features: what the machine must support, see :func:`~tools.faults.network.missing`.
        fits: why it cannot strike a role; empty: it can.
    """

    name: str
    strike: Callable[[Scene], AbstractContextManager[None]]
    seconds: float | None
    effect: Effect = Effect.DELAY
    guarantees: str = "P1 P3"
    notice_seconds: float | None = None
    features: tuple[str, ...] = ()
    frozen_timeout: float | None = None
    step_seconds: float = 60.0
    ends_victim: bool = False
    between_hosts: bool = False
    fits: Callable[[Role], str] = lambda role: ""

    def promise(self, role: Role) -> Promise:
        """What holds when it strikes a victim in this role."""
        restarts = role.restarts and self.ends_victim
        effect, notice = self.effect, self.notice_seconds
        if effect is Effect.LOSS and (not role.noticed or role.survives_loss):
            notice = None
        if effect is Effect.LOSS and role.survives_loss and (restarts or self.seconds is not None):
            effect = Effect.DELAY  # clients reconnect within their timeout
        if role.loses_state and (restarts or (self.seconds or 0.0) >= LOST_SECONDS):
            effect = Effect.REFUSAL
        extra = " P9" if role.on_disk else " R1 R2 R3" if "RRef" in role.name or "fork" in role.name else ""
        return Promise(effect, self.guarantees + extra, notice, restarts)


# ---- processes ------------------------------------------------------------------------------------------


@contextmanager
def _kill(scene: Scene) -> Iterator[None]:
    os.kill(scene.victim, signal.SIGKILL)
    yield


@contextmanager
def _stop(scene: Scene) -> Iterator[None]:
    os.kill(scene.victim, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(scene.victim, signal.SIGCONT)
        except ProcessLookupError:
            pass  # stopped for good: it was killed at the end of the cell


@contextmanager
def _limited(scene: Scene, what: int, limit: int) -> Iterator[None]:
    before = resource.prlimit(scene.victim, what)
    resource.prlimit(scene.victim, what, (limit, before[1]))
    try:
        yield
    finally:
        try:
            resource.prlimit(scene.victim, what, before)
        except ProcessLookupError:
            pass  # it did not survive, as the runner notes


def _no_descriptors(scene: Scene) -> AbstractContextManager[None]:
    return _limited(scene, resource.RLIMIT_NOFILE, 3)  # those that are open stay open


def _no_shared_memory(scene: Scene) -> AbstractContextManager[None]:
    return _limited(scene, resource.RLIMIT_FSIZE, SMALL_BYTES)


@contextmanager
def _full_disk(scene: Scene) -> Iterator[None]:
    filler = scene.directory / "disk" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass  # full, which is what was wanted
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def _ordered(scene: Scene, what: str, then: str) -> Iterator[None]:
    scene.order(what)
    yield
    if then:
        scene.order(then)


@contextmanager
def _stranger(scene: Scene, kind: str) -> Iterator[None]:
    scene.stranger(kind)
    yield


# ---- the network ----------------------------------------------------------------------------------------


def _network(scene: Scene) -> Network:
    assert scene.network is not None
    return scene.network


def _filter(*rules: tuple[str, ...]) -> Callable[[Scene], AbstractContextManager[None]]:
    return lambda scene: _network(scene).filtered(*rules)


def _half_open(scene: Scene) -> AbstractContextManager[None]:
    return _network(scene).filtered(*_network(scene).forgotten())


@contextmanager
def _power_failure(scene: Scene) -> Iterator[None]:
    with _network(scene).filtered(net.DROP_IN, net.DROP_OUT):
        os.kill(scene.victim, signal.SIGKILL)
        yield


def _with_disk(role: Role) -> str:
    return "" if role.on_disk else "the role writes no file"


def _with_memory(role: Role) -> str:
    return "" if role.shares_memory else "the role shares no memory"


def _listens(role: Role) -> str:
    names = ("watcher", "joining worker", "agent")
    return "the role listens on no port all the time" if role.name in names else ""


_FIREWALL = ("hosts", "firewall")

FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", lambda scene: nullcontext(), 2.0),
        Fault(
            "SIGKILL", _kill, None, Effect.LOSS, "P1 P2 P3", LOCAL_SECONDS, ends_victim=True
        ),
        Fault("SIGSTOP 2 s", _stop, 2.0),
        Fault("SIGSTOP 30 s", _stop, 30.0),
        Fault(
            "SIGSTOP for good",
            _stop,
            None,
            Effect.LOSS,
            "P1 P3, frozen_timeout",
            FROZEN_SECONDS,
            frozen_timeout=FROZEN_SECONDS,
            step_seconds=15.0,
        ),
        Fault("no descriptors", _no_descriptors, 5.0, Effect.REFUSAL, "P3", step_seconds=15.0),
        Fault("out of shared memory", _no_shared_memory, 5.0, fits=_with_memory),
        Fault(
            "full disk", _full_disk, 3.0, Effect.REFUSAL, "P3", features=("mount",), fits=_with_disk,
            ends_victim=True,
        ),
        Fault("clock jump", lambda scene: _ordered(scene, "clock", ""), 0.0),
        Fault("slow consumer", lambda scene: _ordered(scene, "slow", "fast"), 5.0, guarantees="P1 P3 P10"),
        Fault(
            "garbage", lambda scene: _stranger(scene, "garbage"), 2.0, guarantees="P5", between_hosts=True,
            features=("hosts",), fits=_listens,
        ),
        Fault(
            "wrong secret", lambda scene: _stranger(scene, "wrong secret"), 2.0, guarantees="P4",
            between_hosts=True, features=("hosts",), fits=_listens,
        ),
        Fault(
            "SIGKILL between hosts", _kill, None, Effect.LOSS, "P1 P2 P3", REFUSED_SECONDS, ends_victim=True,
            between_hosts=True, features=("hosts",),
        ),
        Fault(
            "power failure of the host", _power_failure, None, Effect.LOSS, "P1 P2 P3", REMOTE_SECONDS,
            between_hosts=True, features=_FIREWALL,
            fits=lambda role: "the victim cannot be started again there" if role.restarts else "",
        ),
        Fault(
            "reset", _filter(net.RESET_IN, net.RESET_OUT), 1.0, between_hosts=True, features=_FIREWALL
        ),
        Fault("half-open", _half_open, None, between_hosts=True, features=_FIREWALL),
        Fault(
            "partition 2 s", _filter(net.DROP_IN, net.DROP_OUT), 2.0, between_hosts=True, features=_FIREWALL
        ),
        Fault(
            "partition 4 s", _filter(net.DROP_IN, net.DROP_OUT), 4.0, between_hosts=True, features=_FIREWALL
        ),
        Fault(
            "partition 20 s", _filter(net.DROP_IN, net.DROP_OUT), 20.0, Effect.LOSS, "P1 P2 P3",
            REMOTE_SECONDS,
            between_hosts=True, features=_FIREWALL,
        ),
        Fault(
            "one-way partition 20 s", _filter(net.DROP_IN), 20.0, Effect.LOSS, "P1 P2 P3", REMOTE_SECONDS,
            between_hosts=True, features=_FIREWALL,
        ),
        Fault(
            "delay 200 ms", lambda scene: delayed(_network(scene)), 5.0, between_hosts=True,
            features=("hosts", "delay"),
        ),
        Fault("loss 5%", _filter(net.LOSS), 8.0, between_hosts=True, features=("hosts", "loss")),
        Fault(
            "bandwidth 10 Mbit/s", lambda scene: _network(scene).shaped(*net.BANDWIDTH), 8.0,
            between_hosts=True, features=("hosts", "bandwidth"),
        ),
    )
}  # fmt: skip


def infeasible(role: Role, fault: Fault) -> str:
    """Why this pair has no cell on this machine; empty: it has one."""
    return fault.fits(role) or next(filter(None, map(net.missing, fault.features)), "")


def send_garbage(endpoints: tuple[str, ...]) -> int:
    """Send malformed bytes to each tcp endpoint: to ZeroMQ's framing, and inside of it. Returns how many."""
    sent = 0
    for endpoint in endpoints:
        if not endpoint.startswith("tcp://"):
            continue
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", greeting + os.urandom(4096), b"\xff" * 64):
            with socket.create_connection((host, int(port)), 5.0) as connection:
                try:
                    connection.sendall(data)
                except ConnectionError:
                    pass  # refused in the middle: as it should be
                sent += 1
    return sent
