"""Faults planted in the library one at a time, to show that simulated jobs find them.

    python -m tools.mutants                        # each mutant, until a seed finds it
    python -m tools.mutants --seeds 2000 ack-early # one of them, with at most so many seeds

Each is planted in a copy of the library.
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


@dataclass(frozen=True)
class Mutant:
    """A fault: in the file ``path``, the text ``old``, which occurs once, becomes ``new``."""

    path: str
    old: str
    new: str


MUTANTS = {
    "order-back": Mutant(  # what is resent goes back: the last message first
        "transport/session.py",
        "        return burst\n",
        "        return [(each[0], other[1]) for each, other in zip(burst, reversed(burst), strict=True)]\n",
    ),
    "order-repeated": Mutant(  # a message that was resent is delivered again
        "transport/session.py",
        "            return False\n        self.delivered = sequence",
        "            return sequence <= delivered\n        self.delivered = sequence",
    ),
    "ack-early": Mutant(  # the sender forgets one message more than was acknowledged
        "transport/session.py", "kept[0][0] <= sequence:", "kept[0][0] <= sequence + 1:"
    ),
    "ack-resend": Mutant(  # what was in flight is not resent on the next connection
        "transport/session.py",
        "        self._in_flight = 0\n        self.behind = bool(self._kept)",
        "        self.behind = False",
    ),
    "fork-children": Mutant(  # a fork is deleted while the owner does not know its child
        "rpc/rref/protocol.py", " or fork.children or fork.deleting", " or fork.deleting"
    ),
    "fork-accepted": Mutant(  # the parent of a fork is never told that the owner knows it
        "rpc/rref/protocol.py",
        "effects.append(SendChildAccept(fork.parent, fork.rref_id, fork_id))",
        "pass",
    ),
    "loss-noticed": Mutant(  # nobody is told of a loss that was noticed before the collective began
        "rpc/membership/collectives.py",
        "                if peer in worker.lost:\n                    self.on_lost(peer)\n",
        "",
    ),
    "loss-pass": Mutant(  # a pass does not see that a request announced before is lost
        "autograd/engine/termination.py",
        "            self._lost[worker] = error\n            self._fail_if_lost()\n",
        "            self._lost[worker] = error\n",
    ),
    "pass-sender": Mutant(  # a pass waits for gradients that were lost with their sender
        "autograd/engine/termination.py",
        "            if receiver != self._root:\n                lost = lost or self._lost.get(sender)\n",
        "",
    ),
    "pass-overtaken": Mutant(  # a report that has overtaken another is forgotten
        "autograd/engine/termination.py",
        "                    if self._outstanding.pop(request, None) is None:\n"
        "                        self._reported_early.add(request)\n",
        "                    self._outstanding.pop(request, None)\n",
    ),
    "watch-gap": Mutant(  # a lost notification is not noticed
        "store/watch_cache.py", "notification.previous > self.revision or _lacks", "_lacks"
    ),
    "watch-early": Mutant(  # what was notified while the watch was being registered is forgotten
        "store/watch_cache.py", "            self._early.append(notification)\n", ""
    ),
    "query-repeated": Mutant(  # a change of the store is applied again when its query is repeated
        "store/service.py",
        "request_id <= last[0] and self._is_stale",
        "request_id < last[0] and self._is_stale",
    ),
    "end-early": Mutant(  # the end of a link is told before what has arrived
        "transport/endpoint.py",
        "link.end_reason and not link.ended and not link.paths:",
        "link.end_reason and not link.ended:",
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
    ),
    "accuse-alone": Mutant(  # a worker that one other has lost is lost for all
        "rpc/membership/suspicion.py",
        "        if self._has_ended(record):\n            self._confirm",
        "        if True:\n            self._confirm",
    ),
    "stop-counted": Mutant(  # the time that a worker was stopped counts as silence of the others
        "transport/heartbeat/failure_detector.py",
        "min(now - self._ticked, self.interval)",
        "now - self._ticked",
    ),
    "close-cached": Mutant(  # the process that serves the state of a rendezvous closes by what it last read
        "elastic/handler.py",
        "                self._executor.run(retire, self._clock.now() + LEAVE_SECONDS)\n",
        "                pass\n",
    ),
    "barrier-number": Mutant(  # successive barriers of the same workers are taken for one
        "rpc/membership/collectives.py", "number = next(self._numbers[ids])", "number = 0"
    ),
}


def main() -> int:
    """Returns 1 if a mutant was not found."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Plant faults.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTANTS)}; default: all")
    parser.add_argument("--seeds", type=int, default=2000, help="at most, for each (default: 2000)")
    parser.add_argument("--kind", help="of what goes wrong besides; default: all")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _search(options.seeds, options.kind)
    missed = [name for name in options.names or MUTANTS if not _find(name, options)]
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


def _find(name: str, options: argparse.Namespace) -> bool:
    """Prints the first seed that finds the mutant. Returns whether one does."""
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("zmqgrad", "tools"):
            shutil.copytree(ROOT / part, Path(scratch, part), ignore=shutil.ignore_patterns("__pycache__"))
        plant(MUTANTS[name], Path(scratch, "zmqgrad"))
        command = [sys.executable, "-m", "tools.mutants", "--inside", "--seeds", str(options.seeds)]
        command += [] if options.kind is None else ["--kind", options.kind]
        began = time.monotonic()
        search = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    print(f"{name:16} {search.stdout.strip()} ({time.monotonic() - began:.0f} s)", flush=True)
    if search.returncode not in (0, 1):
        sys.exit(search.stderr)
    return search.returncode == 0


def _search(seeds: int, kind: str | None) -> int:
    """Runs seed after seed, with the library of the working directory. Returns 1 if none fails.

    Args:
        kind: of the faults; None: one after the other.
    """
    from zmqgrad.testing.simulation.drawn_jobs import kind_of, run

    for seed in range(seeds):
        name = kind or kind_of(seed)
        found = run(seed, name)
        if found.failure is not None:
            lines = found.failure.strip().splitlines()
            errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
            print(f"--kind {name} --seed {seed}: {(errors or lines)[0][:120]}")
            return 0
    print(f"not found by {seeds} seeds")
    return 1


if __name__ == "__main__":
    sys.exit(main())
