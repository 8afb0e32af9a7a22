"""``python -m zmqgrad.testing.simulation``: drawn programs with faults, or one seed of them again."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from zmqgrad.testing.simulation import oracles, programs
from zmqgrad.testing.simulation.campaign import Faults, Run, run_seed

HOSTS = ("host0", "host1")

KINDS = {
    "none": (programs.program, Faults(latency=0.002)),
    "drops": (programs.program, Faults(latency=0.002, dropped=3, within=0.1)),
    "kills": (programs.program_with_losses, Faults(latency=0.005, kills=1, within=0.25)),
    "partitions": (programs.program, Faults(latency=0.002, partitions=2, stalls=1, within=0.1, io=0.01)),
}
"""What goes wrong, by name, and in which program."""


def run(kind: str, seed: int, *, inline: bool = False) -> Run:
    """Runs the program that ``seed`` draws."""
    program, faults = KINDS[kind]
    return run_seed(program, 4, seed, HOSTS, faults, oracles.check, inline=inline)


def main() -> int:
    """Runs random seeds for some minutes, or one seed. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m zmqgrad.testing.simulation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long")
    parser.add_argument("--kind", choices=sorted(KINDS), help="with --seed: what goes wrong")
    parser.add_argument("--seed", type=int, help="run this one, and print its messages")
    parser.add_argument("--inline", action="store_true", help="with --seed: without a fork, for a debugger")
    options = parser.parse_args()
    if options.seed is not None:
        one = run(options.kind or "drops", options.seed, inline=options.inline)
        print("\n".join(one.messages))
        print(f"seed {one.seed}: {one.failure or 'ended well'} (digest {one.digest:x})", flush=True)
        return int(one.failure is not None)
    began, runs, failed, simulated = time.monotonic(), 0, 0, 0.0
    while time.monotonic() - began < options.minutes * 60:
        kind, seed = sorted(KINDS)[runs % len(KINDS)], secrets.randbits(32)
        found = run(kind, seed)
        runs += 1
        simulated += found.simulated_seconds
        if found.failure is not None:
            failed += 1
            print(f"--kind {kind} --seed {seed}: {found.failure}", flush=True)
    seconds = time.monotonic() - began
    rate = runs / seconds * 3600
    print(f"{runs} seeds, {failed} failed; {rate:.0f} seeds an hour; {simulated:.0f} s simulated")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
