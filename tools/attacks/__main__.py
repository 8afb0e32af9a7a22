"""Command line of the attacks.

    python -m tools.attacks                         # every attack, by every attacker, on every kind of job
    python -m tools.attacks --quick                 # what CI runs
    python -m tools.attacks --flood 1000000 5000    # that many frames of garbage, and silent connections

Attackers are other users and containers, so it must run as root; other programs of this host are left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tools.attacks import attempts
from tools.attacks.attackers import SECRET, Attacker, attack
from tools.attacks.attempts import Target
from tools.ports import free_port
from zmqgrad.runtime.clock import Deadline
from zmqgrad.transport.user_token import directories

START_SECONDS = 120
MAX_GROWTH = 8 << 20
"""How much memory a process of the job may take more because of a flood of one of its addresses, in bytes."""

MAX_CELL_GROWTH = 2 * MAX_GROWTH
"""The same for an attack on all of its addresses at once. Of the first crowd of silent connections, the
allocator keeps 5 to 8 MiB; of another one, a megabyte."""

WARM_UP_CALLS = 500
"""Until the memory of a job no longer grows by itself: by tcp, 8 MiB come with its 200th to 400th call."""

SETTLE_SECONDS = 20.0
"""Until the descriptors of strangers who have left are closed."""

_VARIABLES = ("ZMQGRAD_SECRET_FILE", "ZMQGRAD_SECRET", "ZMQGRAD_ALLOW_INSECURE", "ZMQGRAD_LOCAL_FAST_PATH")


class Kind(Enum):
    """A kind of job."""

    PLAIN = "job without a secret"
    SECRET = "job with a secret"
    HOSTS = "job with a secret, by tcp as between hosts"


class Cell(NamedTuple):
    """One attack."""

    attacker: Attacker
    attempt: Callable[[Target], str]
    job: Kind

    @property
    def name(self) -> str:
        return f"{self.attacker.value} | {self.attempt.__name__.replace('_', ' ')} | {self.job.value}"


ATTEMPTS: tuple[Callable[[Target], str], ...] = (
    attempts.run_code_by_tcp,
    attempts.run_code_by_unix_socket,
    attempts.read_the_store,
    attempts.subscribe,
    attempts.take_the_token,
    attempts.pass_for_a_peer,
    attempts.send_garbage,
    attempts.stay_silent,
    attempts.fill_queues,
)


def cells(quick: bool) -> list[Cell]:
    """All attacks in order; those of one kind of job together."""
    found = []
    for kind in Kind:
        if quick and kind is Kind.HOSTS:
            continue
        for attacker in Attacker:
            if kind is Kind.PLAIN and attacker in (Attacker.OWN_USER, Attacker.SAME_SECRET):
                continue  # without a secret, his processes trust each other
            if quick and attacker is Attacker.OTHER_USER and kind is Kind.SECRET:
                continue
            if attacker is Attacker.SAME_SECRET:
                found.append(Cell(attacker, attempts.run_code_as_another_job, kind))
                continue
            for attempt in ATTEMPTS:
                if attempt is not attempts.take_the_token or attacker is not Attacker.OWN_USER:
                    found.append(Cell(attacker, attempt, kind))
    return found


def main() -> int:
    """Returns 1 if an attack succeeded, 2 if one could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tools.attacks", description="Attacks on a running job.")
    parser.add_argument("--quick", action="store_true", help="the part that fits a minute")
    parser.add_argument(
        "--flood",
        nargs=2,
        type=int,
        metavar=("FRAMES", "CONNECTIONS"),
        help="at each address in turn: so many frames of garbage, then so many silent connections",
    )
    parser.add_argument(
        "--at", default="", metavar="WORDS", help="only at addresses described by these words"
    )
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("tools.attacks: must run as root, to act as other users", file=sys.stderr)
        return 2
    tried, succeeded = flood(*options.flood, options.at) if options.flood else try_cells(cells(options.quick))
    print(f"{tried} attacks tried, {succeeded} succeeded")
    return 1 if succeeded else 0


def try_cells(chosen: list[Cell]) -> tuple[int, int]:
    """Returns how many attacks were tried, and how many succeeded."""
    succeeded = 0
    for kind in Kind:
        of_kind = [each for each in chosen if each.job is kind]
        if not of_kind:
            continue
        with Job(kind) as job:
            for cell in of_kind:
                before, began = job.measure(), time.monotonic()
                got = attack(cell.attacker, directories(), job.directory, cell.attempt, job.target)
                problems = [got] * bool(got) + job.damage_since(before, MAX_CELL_GROWTH)
                succeeded += bool(problems)
                took = f"{time.monotonic() - began:.1f} s"
                print(f"{cell.name}: {'; '.join(problems) or 'nothing'} ({took})", flush=True)
    return len(chosen), succeeded


def flood(frames: int, connections: int, words: str) -> tuple[int, int]:
    """Floods each address of a job whose description contains ``words``. Returns as :func:`try_cells`.

    Another job makes the same calls meanwhile and is left alone: what that takes is not due to the attack.
    """
    tried = succeeded = 0
    columns = (
        "address",
        "attack",
        "calls made, lost",
        "MiB: at most, after, of the job left alone",
        "descriptors: before, at most, after",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for kind in (Kind.SECRET, Kind.HOSTS):
        with Job(kind) as job, Job(kind) as control:
            for place in attempts.places(job.target):
                if words not in job.describe(place):
                    continue
                for act, count in ((attempts.throw, frames), (attempts.crowd_at, connections)):
                    before, left_alone = job.measure(), control.measure()
                    with job.watched() as peak:
                        attack(
                            Attacker.CONTAINER,
                            directories(),
                            job.directory,
                            act,
                            *(place, count, job.target),
                            seconds=60 + count / 500,
                        )
                    usual = growth(left_alone, control.measure())
                    problems = job.damage_since(before, MAX_GROWTH + usual)
                    after = job.measure()
                    what = "frames of garbage" if act is attempts.throw else "silent connections"
                    print(
                        f"| {kind.value}: {job.describe(place)} | {count} {what} "
                        f"| {after.calls - before.calls}, {after.lost - before.lost} "
                        f"| {growth(before, peak[0]) >> 20}, {growth(before, after) >> 20}, {usual >> 20} "
                        f"| {sum(before.descriptors)}, {sum(peak[0].descriptors)}, {sum(after.descriptors)} "
                        f"| {'; '.join(problems)}",
                        flush=True,
                    )
                    tried += 1
                    succeeded += bool(problems)
    return tried, succeeded


class State(NamedTuple):
    """What the processes of a job use, and what they have done."""

    memory: tuple[int, ...]
    descriptors: tuple[int, ...]
    calls: int
    lost: int


def growth(before: State, after: State) -> int:
    """Returns by how many bytes the process that has grown most has grown."""
    return max(b - a for a, b in zip(before.memory, after.memory, strict=True))


class Job:
    """A job to be attacked."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            self.directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
            os.chmod(self.directory, 0o777)  # the attacker's code may write its marker here
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            for variable in _VARIABLES:
                os.environ.pop(variable, None)  # the attackers have none
            environment = dict(os.environ)
            if self.kind is not Kind.PLAIN:
                environment["ZMQGRAD_SECRET"] = SECRET
            if self.kind is Kind.HOSTS:
                environment["ZMQGRAD_LOCAL_FAST_PATH"] = "0"
            self._meeting_port = free_port()
            command = [sys.executable, "-m", "tools.attacks.victim", str(self._meeting_port), self.directory]
            self._process = stack.enter_context(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(self._process.kill)
            begun = self._read()
            self.pids: list[int] = begun["pids"]
            self._roles: dict[str, str] = begun["roles"]
            self.target = Target(
                _ports(self.pids),
                _names(self.pids),
                f"{directories()[0]}/token",
                f"{self.directory}/marker",
                f"{self.directory}/progress",
            )
            attempts.wait_for_calls(self.target, WARM_UP_CALLS)
            self._stack = stack.pop_all()
        return self

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        read: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        return read

    def __exit__(self, *failure: object) -> None:
        with self._stack:
            if failure[0] is not None:
                return
            Path(self.directory, "stop").touch()
            ended = self._read()
            code = self._process.wait(START_SECONDS)
            if code or ended.get("lost", 1) or not ended.get("calls"):
                raise SystemExit(f"the job was damaged: exit code {code}, {ended}")
            print(f"the job made {ended['calls']} calls meanwhile and lost none", flush=True)

    def measure(self) -> State:
        """What it uses now."""
        calls, lost = attempts.calls_made(self.target)
        return State(
            tuple(map(_memory, self.pids)), tuple(len(_descriptors(pid)) for pid in self.pids), calls, lost
        )

    def damage_since(self, before: State, max_growth: int) -> list[str]:
        """What an attack has done, in words; ``max_growth``: the bytes that each process may take more."""
        found = []
        marker = Path(self.target.marker)
        if marker.exists():
            found.append("ran code")
            marker.unlink()
        if self._process.poll() is not None:
            return [*found, "ended the job"]
        deadline = Deadline.after(SETTLE_SECONDS)
        while sum((now := self.measure()).descriptors) > sum(before.descriptors) and not deadline.passed():
            time.sleep(0.05)  # other processes, which report nothing
        if sum(now.descriptors) > sum(before.descriptors):
            found.append(f"took {sum(now.descriptors) - sum(before.descriptors)} descriptors")
        if now.lost > before.lost:
            found.append(f"{now.lost - before.lost} calls lost")
        if growth(before, now) > max_growth:
            found.append(f"took {growth(before, now) >> 20} MiB of memory")
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[State]]:
        """The most that is used meanwhile, each by itself."""
        peak, ended = [self.measure()], threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                now = self.measure()
                peak[0] = State(
                    tuple(map(max, peak[0].memory, now.memory)),
                    max(peak[0].descriptors, now.descriptors, key=sum),
                    now.calls,
                    now.lost,
                )

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield peak
        finally:
            ended.set()
            watcher.join()

    def describe(self, place: int | str) -> str:
        """What listens there."""
        if place == self._meeting_port:
            return "MASTER_PORT"
        if isinstance(place, int):
            return f"port of {self._roles.get(str(place), 'bulk data')}"
        if "store" in place:
            return "unix socket of a store"
        tail = place.rpartition("-")[2]
        kinds = {"heartbeat": "unix socket of heartbeats", "0": "unix socket of a worker"}
        return kinds.get(tail, "unix socket of a reply channel")


def _descriptors(pid: int) -> list[str]:
    """What the descriptors of a process refer to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return found


def _sockets(pids: list[int]) -> set[str]:
    """The inodes of the sockets of the processes."""
    found = [target for pid in pids for target in _descriptors(pid)]
    return {target[len("socket:[") : -1] for target in found if target.startswith("socket:[")}


def _ports(pids: list[int]) -> tuple[int, ...]:
    """The tcp ports where they listen."""
    inodes, ports = _sockets(pids), set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(ports))


def _names(pids: list[int]) -> tuple[str, ...]:
    """The abstract unix names where they listen, as anybody reads them."""
    inodes, names = _sockets(pids), set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@zmqgrad") and fields[6] in inodes:
            names.add(fields[7])
    return tuple(sorted(names))


def _memory(pid: int) -> int:
    """The bytes that a process has in memory for itself."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10
    return 0


if __name__ == "__main__":
    began = time.monotonic()
    result = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(result)
