"""Faults planted in the library one at a time, to show that simulated jobs find them.

    python -m tools.mutants                        # each mutant, by the seed that it names
    python -m tools.mutants --seeds 2000 ack-early # one of them, by any of so many seeds

Each is planted in a copy of the library. A change of the library is another schedule, so that the named seed
may find its mutant no more; others do.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

DEFAULT_SEEDS = 2000
SEED_SECONDS = 120
"""After so long a job of one seed, which takes about one second, is taken to go on for ever."""


@dataclass(frozen=True)
class Mutant:
    """A fault: in the file ``path``, the text ``old``, which occurs once, becomes ``new``.

    ``seed``, with what goes wrong besides (``kind``), finds it. Without them, it is rarely found.
    """

    path: str
    old: str
    new: str
    kind: str = ""
    seed: int | None = None

    @property
    def found_by(self) -> str:
        """The options of ``python -m zmqgrad.testing.simulation``, to find it."""
        return f"--kind {self.kind} --seed {self.seed}"


MUTANTS = {
    "order-back": Mutant(  # what is resent goes back: the last message first
        "transport/session.py",
        "        return burst\n",
        "        return [(each[0], other[1]) for each, other in zip(burst, reversed(burst), strict=True)]\n",
        "drops",
        2,
    ),
    "order-repeated": Mutant(  # a message that was resent is delivered again
        "transport/session.py",
        "            return False\n        self.delivered = sequence",
        "            return sequence <= delivered\n        self.delivered = sequence",
        "drops",
        0,
    ),
    "ack-early": Mutant(  # the sender forgets one message more than was acknowledged
        "transport/session.py",
        "kept[0][0] <= sequence:",
        "kept[0][0] <= sequence + 1:",
        "drops",
        10,
    ),
    "ack-resend": Mutant(  # what was in flight is not resent on the next connection
        "transport/session.py",
        "        self._in_flight = 0\n        self.behind = bool(self._kept)",
        "        self.behind = False",
        "deaths",
        1,
    ),
    "fork-children": Mutant(  # a fork is deleted while the owner does not know its child
        "rpc/rref/protocol.py",
        " or fork.children or fork.deleting",
        " or fork.deleting",
        "partitions",
        95,
    ),
    "fork-accepted": Mutant(  # the parent of a fork is never told that the owner knows it
        "rpc/rref/protocol.py",
        "effects.append(SendChildAccept(fork.parent, fork.rref_id, fork_id))",
        "pass",
        "drops",
        2,
    ),
    "loss-noticed": Mutant(  # nobody is told of a loss that was noticed before the collective began
        "rpc/membership/collectives.py",
        "                if peer in worker.lost:\n                    self.on_lost(peer)\n",
        "",
        "kills",
        1,
    ),
    "loss-pass": Mutant(  # a pass does not see that a request announced before is lost
        "autograd/engine/termination.py",
        "            self._lost[worker] = error\n            self._fail_if_lost()\n",
        "            self._lost[worker] = error\n",
        "kills",
        92,
    ),
    "pass-sender": Mutant(  # a pass waits for gradients that were lost with their sender
        "autograd/engine/termination.py",
        "            if request not in self._arrived:\n"
        "                lost = lost or self._lost.get(sender)\n",
        "",
        "members",
        171,
    ),
    "pass-overtaken": Mutant(  # a report that has overtaken another is forgotten
        "autograd/engine/termination.py",
        "                    if outstanding.pop(request, None) is None:\n"
        "                        reported_early.add(request)\n",
        "                    outstanding.pop(request, None)\n",
        "none",
        6,
    ),
    "watch-gap": Mutant(  # a lost notification is not noticed
        "store/watch_cache.py",
        "notification.previous > self.revision or _lacks",
        "_lacks",
        "partitions",
        35,
    ),
    "watch-early": Mutant(  # what was notified while the watch was being registered is forgotten
        "store/watch_cache.py",
        "            self._early.append(notification)\n",
        "",
        "none",
        2,
    ),
    "query-repeated": Mutant(  # a change of the store is applied again when its query is repeated
        "store/service.py",
        "request_id <= last[0] and self._is_stale",
        "request_id < last[0] and self._is_stale",
        "stops",
        240,
    ),
    "end-early": Mutant(  # the end of a link is told before what has arrived
        "transport/endpoint.py",
        "link.end_reason and not link.ended and not link.paths:",
        "link.end_reason and not link.ended:",
        "kills",
        28,
    ),
    "task-first": Mutant(  # futures are completed after a task that may wait for them
        "transport/reader.py",
        "                    if (idle := self.on_idle()) is not None:\n"
        "                        self.tasks.append(idle)\n",
        "",
    ),
    "flush-dies": Mutant(  # a connection that closes while its queue is sent ends the thread that sends
        "transport/links.py",
        '        except OSError as e:\n            logger.debug("%s: the connection to %s has ended',
        '        except BlockingIOError as e:\n            logger.debug("%s: the connection to %s has ended',
        "kills",
        124,
    ),
    "accuse-alone": Mutant(  # a worker that one other has lost is lost for all
        "rpc/membership/suspicion.py",
        "        if self._has_ended(record):\n            self._confirm",
        "        if True:\n            self._confirm",
        "suspicions",
        36,
    ),
    "stop-counted": Mutant(  # the time that a worker was stopped counts as silence of the others
        "transport/heartbeat/failure_detector.py",
        "min(now - self._ticked, self.interval)",
        "now - self._ticked",
        "freezes",
        12,
    ),
    "close-cached": Mutant(  # the process that serves the state of a rendezvous closes by what it last read
        "elastic/handler.py",
        "                self._executor.run(retire, self._clock.now() + LEAVE_SECONDS)\n",
        "                pass\n",
    ),
    "barrier-number": Mutant(  # successive barriers of the same workers are taken for one
        "rpc/membership/collectives.py",
        "number = next(self._numbers[ids])",
        "number = 0",
        "none",
        28,
    ),
}


def main() -> int:
    """Returns 1 if a mutant was not found."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Plant faults.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTANTS)}; default: those with a seed")
    parser.add_argument("--seeds", type=int, help="search in so many seeds, not by the one that is named")
    parser.add_argument("--kind", help="of what goes wrong besides; default: all")
    parser.add_argument("--inside", nargs=2, type=int, metavar=("FROM", "TO"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _search(range(*options.inside), options.kind)
    names = options.names or [name for name, mutant in MUTANTS.items() if mutant.seed is not None]
    missed = [name for name in names if not _find(name, options.seeds, options.kind)]
    if missed:
        print(f"not found: {', '.join(missed)}")
    return bool(missed)


def plant(mutant: Mutant, library: Path) -> None:
    """Plants ``mutant`` in a copy of the library.

    Raises:
        ValueError: if the text is not there exactly once.
    """
    path = library / mutant.path
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.path} has {mutant.old!r} {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def _find(name: str, seeds: int | None, kind: str | None) -> bool:
    """Prints what finds the mutant. Returns whether anything does.

    Args:
        seeds: how many are tried; None: the one that the mutant names, which may take ``SEED_SECONDS``.
        kind: of what goes wrong besides; None: one after the other, or the one that the mutant names.
    """
    mutant, limit = MUTANTS[name], None
    tried = range(seeds or DEFAULT_SEEDS)
    if seeds is None and mutant.seed is not None:
        tried, limit, kind = range(mutant.seed, mutant.seed + 1), SEED_SECONDS, mutant.kind
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("zmqgrad", "tools"):
            shutil.copytree(ROOT / part, Path(scratch, part), ignore=shutil.ignore_patterns("__pycache__"))
        plant(mutant, Path(scratch, "zmqgrad"))
        command = [sys.executable, "-m", "tools.mutants", "--inside", str(tried.start), str(tried.stop)]
        command += [] if kind is None else ["--kind", kind]
        began = time.monotonic()
        try:
            search = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, check=False, timeout=limit
            )
        except subprocess.TimeoutExpired:  # a job that goes on for ever has failed, too
            print(f"{name:16} {mutant.found_by}: no result in {limit} s", flush=True)
            return True
    print(f"{name:16} {search.stdout.strip()} ({time.monotonic() - began:.0f} s)", flush=True)
    if search.returncode not in (0, 1):
        sys.exit(search.stderr)
    return search.returncode == 0


def _search(seeds: range, kind: str | None) -> int:
    """Runs seed after seed, with the library of the working directory. Returns 1 if none fails.

    Args:
        kind: of the faults; None: one after the other.
    """
    from zmqgrad.testing.simulation.drawn_jobs import kind_of, run

    for seed in seeds:
        name = kind or kind_of(seed)
        found = run(seed, name)
        if found.failure is not None:
            lines = found.failure.strip().splitlines()
            errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
            print(f"--kind {name} --seed {seed}: {(errors or lines)[0][:120]}")
            return 0
    print(f"not found by {len(seeds)} seeds")
    return 1


if __name__ == "__main__":
    sys.exit(main())
