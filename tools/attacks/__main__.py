"""Command line of the attacks.

    python -m tools.attacks            # every attack, by every attacker, on a job with and without a secret
    python -m tools.attacks --quick    # what CI runs

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tools.attacks import attempts
from tools.attacks.attackers import Attacker, attack
from tools.attacks.attempts import Target
from zmqgrad.transport.user_token import directories

SECRET = "the secret of a job, which nobody guesses"
START_SECONDS = 120
MAX_GROWTH = 64 << 20
"""How much memory the workers may take more during an attack, in bytes."""


class Cell(NamedTuple):
    """One attack."""

    attacker: Attacker
    attempt: Callable[[Target], str]
    secret: bool
    """Whether the job has one."""

    @property
    def name(self) -> str:
        job = "with a secret" if self.secret else "without a secret"
        return f"{self.attacker.value} | {self.attempt.__name__.replace('_', ' ')} | job {job}"


ATTEMPTS: tuple[Callable[[Target], str], ...] = (
    attempts.run_code_by_tcp,
    attempts.run_code_by_unix_socket,
    attempts.read_the_store,
    attempts.subscribe,
    attempts.take_the_token,
    attempts.pass_for_a_peer,
    attempts.send_garbage,
    attempts.stay_silent,
)


def cells(quick: bool) -> list[Cell]:
    """All attacks in order; those of one kind of job together."""
    found = []
    for secret in (False, True):
        for attacker in Attacker:
            if attacker is Attacker.OWN_USER and not secret:
                continue  # without a secret, his processes trust each other
            for attempt in ATTEMPTS:
                if attempt is attempts.take_the_token and attacker is Attacker.OWN_USER:
                    continue
                if not (quick and secret and attacker is Attacker.OTHER_USER):
                    found.append(Cell(attacker, attempt, secret))
    return found


def main() -> int:
    """Returns 1 if an attack succeeded, 2 if one could not be tried."""
    parser = argparse.ArgumentParser(prog="python -m tools.attacks", description="Attacks on a running job.")
    parser.add_argument("--quick", action="store_true", help="the part that fits a minute")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("tools.attacks: must run as root, to act as other users", file=sys.stderr)
        return 2
    chosen = cells(options.quick)
    succeeded = tried = 0
    for secret in (False, True):
        with _job(secret) as (target, watch):
            for cell in (each for each in chosen if each.secret == secret):
                scratch = os.path.dirname(target.marker)
                got = attack(cell.attacker, directories(), scratch, cell.attempt, target)
                problems = [got] if got else []
                problems += watch()
                tried += 1
                succeeded += bool(problems)
                print(f"{cell.name}: {'; '.join(problems) or 'nothing'}", flush=True)
    print(f"{tried} of {len(chosen)} attacks tried, {succeeded} succeeded")
    return 1 if succeeded else 0


@contextlib.contextmanager
def _job(secret: bool) -> Iterator[tuple[Target, Callable[[], list[str]]]]:
    """A job to be attacked: what can be seen of it, and what tells of damage since the last time."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)  # the attacker's code may write its marker here
        stop, marker = Path(name) / "stop", Path(name) / "marker"
        environment = {**os.environ, "ATTACKS_STOP": str(stop)}
        for variable in ("ZMQGRAD_SECRET_FILE", "ZMQGRAD_SECRET", "ZMQGRAD_ALLOW_INSECURE"):
            environment.pop(variable, None)
        if secret:
            environment["ZMQGRAD_SECRET"] = SECRET
        for variable in ("ZMQGRAD_SECRET_FILE", "ZMQGRAD_SECRET", "ZMQGRAD_ALLOW_INSECURE"):
            os.environ.pop(variable, None)  # the attackers have none
        command = [sys.executable, "-m", "tools.attacks.victim", str(_free_port())]
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            try:
                begun = json.loads(job.stdout.readline())
                pids: list[int] = begun["pids"]
                target = Target(_ports(pids), _names(pids), f"{directories()[0]}/token", str(marker))
                before = _memory(pids)

                def watch() -> list[str]:
                    found = []
                    if marker.exists():
                        found.append("ran code")
                        marker.unlink()
                    if job.poll() is not None:
                        found.append("ended the job")
                    elif _memory(pids) - before > MAX_GROWTH:
                        found.append(f"{(_memory(pids) - before) >> 20} MiB more memory")
                    return found

                yield target, watch
                stop.touch()
                ended = json.loads(job.stdout.readline() or "{}")
                code = job.wait(START_SECONDS)
                if code or ended.get("lost", 1) or not ended.get("calls"):
                    raise SystemExit(f"the job was damaged: exit code {code}, {ended}")
                print(f"the job made {ended['calls']} calls meanwhile and lost none", flush=True)
            finally:
                job.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sockets(pids: list[int]) -> set[str]:
    """The inodes of the sockets of the processes."""
    found = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


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


def _memory(pids: list[int]) -> int:
    """The bytes that the processes have in memory for themselves."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            total += int(text.split("RssAnon:")[1].split()[0]) << 10
    return total


if __name__ == "__main__":
    began = time.monotonic()
    result = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(result)
