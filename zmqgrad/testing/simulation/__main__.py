"""``python -m zmqgrad.testing.simulation``: drawn programs with faults, or one seed of them again."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator

from zmqgrad.testing.simulation.drawn_jobs import KINDS, kind_of, run, run_many

COMMAND = "python -m zmqgrad.testing.simulation"

PROGRESS = 20
"""After so many seeds, it is told how many failed."""


def main() -> int:
    """Runs random seeds for some minutes, or fixed ones, or one. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="run random seeds for so long (default: 10)"
    )
    parser.add_argument("--seeds", type=int, help="run so many instead, from 0: the same each time")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="at once (default: one per core)"
    )
    parser.add_argument("--seed", type=int, help="run this one, and print its messages")
    parser.add_argument("--kind", choices=sorted(KINDS), help="with --seed: what goes wrong")
    parser.add_argument("--inline", action="store_true", help="with --seed: without a fork, for a debugger")
    options = parser.parse_args()
    if options.seed is not None:
        one = run(options.seed, options.kind, inline=options.inline)
        print("\n".join(one.messages))
        print(f"seed {one.seed}: {one.failure or 'ended well'} (digest {one.digest:x})", flush=True)
        return int(one.failure is not None)
    return _run_many(
        _random_seeds(options.minutes) if options.seeds is None else range(options.seeds), options.jobs
    )


def _random_seeds(minutes: float) -> Iterator[int]:
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        yield secrets.randbits(32)


def _run_many(seeds: Iterable[int], jobs: int) -> int:
    """Prints how far it is, and which seeds fail. Returns the exit status."""
    began, runs, failed, simulated = time.monotonic(), 0, [], 0.0
    for found in run_many(seeds, jobs):
        runs += 1
        simulated += found.simulated_seconds
        if found.failure is not None:
            failed.append(f"{COMMAND} --kind {kind_of(found.seed)} --seed {found.seed}")
            print(f"{failed[-1]}\n{found.failure}", flush=True)
        if runs % PROGRESS == 0:
            print(f"{runs} seeds, {len(failed)} failed", flush=True)
    seconds = time.monotonic() - began
    rate = runs / seconds * 3600
    print(f"{runs} seeds, {len(failed)} failed; {rate:.0f} seeds an hour; {simulated:.0f} s simulated")
    print("".join(f"again: {command}\n" for command in failed), end="", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
