"""The command: chooses what to measure, measures the sides in turn, shows and saves what was found."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.bench import machine, picture, report
from tools.bench.plan import Piece, limits, pieces
from tools.bench.processes import PieceFailed
from tools.bench.results import LIMIT, Results
from tools.bench.sides import OURS, TORCH
from tools.bench.timing import Budget

EPILOG = """\
Sides alternate round by round, each in fresh processes. A figure is the median over the rounds of each
round's median; a ratio below 1 means that zmqgrad takes less time. docs/benchmarks.md says more.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code for the shell: 1 if something could not be measured, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.seconds = options.seconds or (0.1 if options.quick else 1.0)
    options.workers = options.workers or ([2, 4] if options.quick else [2, 8, 24])
    budget = Budget(options.seconds, 3 if options.quick else 5)
    chosen = _choice(options.select)
    todo = pieces(chosen, options.workers, budget)
    rows = [row for piece in todo for row in piece.rows]
    if not rows:
        names = ", ".join(
            row.name for piece in pieces(lambda name: True, options.workers, budget) for row in piece.rows
        )
        print(f"-k {options.select} chooses nothing of: {names}", file=sys.stderr)
        return 2
    settings = {
        "rounds": str(options.rounds),
        "seconds for each figure": f"{options.seconds:g}",
        "sides": OURS if options.no_torch else f"{OURS}, {TORCH}",
        "torch threads of a worker": "1",
        "load at the beginning": machine.load(),
    }
    facts = {"machine": machine.describe(), "settings": settings}
    results = Results(rows)
    exit_code = measure(options, todo, limits(rows, budget), results)
    settings["load at the end"] = machine.load()
    _show(results, facts, options.out)
    return exit_code


def measure(options: argparse.Namespace, todo: list[Piece], bounds: Piece | None, results: Results) -> int:
    sides = [OURS] if options.no_torch else [OURS, TORCH]
    steps = [(piece, side) for piece in todo for side in sides] + ([(bounds, LIMIT)] if bounds else [])
    progress = Progress(options.rounds)
    try:
        for number in range(options.rounds):
            # Every other round the other way about: whoever comes first may find a cooler processor.
            for piece, side in steps if number % 2 == 0 else reversed(steps):
                progress.begin(number, piece, side)
                try:
                    results.add(side, piece.run(side, progress.say))
                except PieceFailed as e:
                    results.failures.append(f"{piece.title}, {side}, round {number + 1}: {e}")
    except KeyboardInterrupt:
        progress.end()
        print("interrupted: what follows is what had been measured", file=sys.stderr)
        return 130
    progress.end()
    return 1 if results.failures else 0


def _show(results: Results, facts: dict[str, dict[str, str]], out: Path) -> None:
    for group in facts.values():
        report.print_facts(group)
        print()
    report.print_table(results)
    report.save_json(results, facts, out / "results.json")
    saved = [out / "results.json"]
    about = facts["machine"]
    try:
        subtitle = (
            f"{about['processor']}, {about['cores']} cores; torch {about['torch']}, pyzmq {about['pyzmq']}"
        )
        picture.save_picture(results, subtitle, out / "benchmarks.png")
        saved.append(out / "benchmarks.png")
    except ImportError:
        print("\nno picture: matplotlib is not installed (extra 'examples')", file=sys.stderr)
    print("\nsaved", " and ".join(map(str, saved)))
    for failure in results.failures:
        print(f"\nfailed: {failure}", file=sys.stderr)


class Progress:
    """One line on a terminal that says what is measured now; elsewhere a line for each piece."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._began = time.monotonic()
        self._where = ""
        self._drawn = sys.stderr.isatty()

    def begin(self, number: int, piece: Piece, side: str) -> None:
        """A piece begins."""
        name = piece.title if side == LIMIT else f"{piece.title}, {side}"
        self._where = f"round {number + 1} of {self._rounds}: {name}"
        if self._drawn:
            self.say("")
        else:
            print(f"{time.monotonic() - self._began:6.0f} s  {self._where}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Something within it begins."""
        if self._drawn:
            seconds = time.monotonic() - self._began
            print(f"\r\x1b[2K{seconds:6.0f} s  {self._where}  {text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Make room for what follows."""
        if self._drawn:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _choice(patterns: str) -> Callable[[str], bool]:
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    return lambda name: not wanted or any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="The same work through zmqgrad and through torch, side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-k",
        dest="select",
        default="",
        metavar="NAMES",
        help="rows: names or patterns, as in call,send_*,init_8",
    )
    parser.add_argument(
        "-r", "--rounds", type=_at_least_one, metavar="N", help="how many rounds (default: 5)"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="for each figure of a round (default: 1)")
    parser.add_argument(
        "--workers", type=_sizes, metavar="N,N", help="sizes of the groups that are started (default: 2,8,24)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round, 0.1 s for each figure, groups of 2 and 4"
    )
    parser.add_argument("--no-torch", action="store_true", help="zmqgrad alone, and the limits")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/bench"),
        metavar="DIR",
        help="for results.json and benchmarks.png",
    )
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _sizes(text: str) -> list[int]:
    return [_at_least_one(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
