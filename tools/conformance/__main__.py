"""``python -m tools.conformance``: progress, a table of the suites, and what failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from pathlib import Path

from tools.conformance.exceptions import EXCEPTIONS
from tools.conformance.running import Result, RunningTest, Verdict, ready


def main() -> int:
    """Run the tests; return the exit code."""
    arguments = _parse()
    from tools.conformance.suites import suites  # replaces torch's RPC in this process

    selected = {
        suite: [test for test in tests if arguments.k in f"{suite} {test[0].__name__}.{test[1]}"]
        for suite, tests in suites().items()
    }
    results: dict[str, dict[str, Result]] = {suite: {} for suite in selected}
    waiting = deque((suite, case, method) for suite, tests in selected.items() for case, method in tests)
    total = len(waiting)
    running: dict[RunningTest, tuple[str, float]] = {}
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            suite, case, method = waiting.popleft()
            running[RunningTest(case, method, arguments.timeout)] = (
                suite,
                time.monotonic() + arguments.timeout,
            )
        next_deadline = min(deadline for _, deadline in running.values())
        ended = ready(list(running), next_deadline - time.monotonic())
        late = [] if ended else [test for test, (_, deadline) in running.items() if deadline == next_deadline]
        for test in ended or late:
            suite, _ = running.pop(test)
            results[suite][test.method] = result = test.finish(timed_out=not ended)
            done = sum(map(len, results.values()))
            print(
                f"[{done}/{total}] {suite} {test.method}: {_show(f'{suite} {test.method}', result)}",
                flush=True,
            )
            if arguments.log_dir and result.verdict is Verdict.FAILED:
                arguments.log_dir.mkdir(parents=True, exist_ok=True)
                (arguments.log_dir / f"{suite}.{test.method}.log").write_text(result.output)
    return report(results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="run the tests whose suite or name contains TEXT"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, metavar="N", help="tests at a time (default: 2)")
    parser.add_argument(
        "--timeout", type=float, default=100.0, metavar="SECONDS", help="limit of a test (default: 100)"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="write the output of failed tests to DIR")
    return parser.parse_args()


def _show(test: str, result: Result) -> str:
    text = f"{result.verdict.value}: {result.reason}" if result.reason else result.verdict.value
    return f"{text} (known exception)" if result.verdict is Verdict.FAILED and test in EXCEPTIONS else text


def report(results: dict[str, dict[str, Result]]) -> int:
    """Print the table and the failures; return the exit code."""
    unexpected = 0
    print(f"\n{'suite':15} {'passed':>8} {'of':>5} {'exceptions':>11} {'failed':>7} {'skipped':>8}")
    for suite, by_name in results.items():
        counts = Counter(result.verdict for result in by_name.values())
        failed = [name for name, result in by_name.items() if result.verdict is Verdict.FAILED]
        known = sum(f"{suite} {name}" in EXCEPTIONS for name in failed)
        unexpected += len(failed) - known
        ran = len(by_name) - counts[Verdict.SKIPPED]
        print(
            f"{suite:15} {counts[Verdict.PASSED]:8} {ran:5} {known:11} {len(failed) - known:7}"
            f" {counts[Verdict.SKIPPED]:8}"
        )
    by_test = {
        f"{suite} {name}": result for suite, by_name in results.items() for name, result in by_name.items()
    }
    for heading, exceptions in (("failed", False), ("known exceptions", True)):
        lines = [
            f"  {test}: {EXCEPTIONS.get(test, result.reason)}"
            for test, result in by_test.items()
            if result.verdict is Verdict.FAILED and (test in EXCEPTIONS) is exceptions
        ]
        if lines:
            print(f"\n{heading}:", *lines, sep="\n")
    passed_anyway = [
        test for test, result in by_test.items() if result.verdict is Verdict.PASSED and test in EXCEPTIONS
    ]
    if passed_anyway:
        print("\nexceptions that pass, to be removed from the table:", *passed_anyway, sep="\n  ")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
