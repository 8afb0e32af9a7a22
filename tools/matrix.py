"""Tests on each supported Python, with the lowest, the pinned and the newest torch; docs/support.md.

    python -m tools.matrix                        # every cell: gigabytes of downloads, and hours on two cores
    python -m tools.matrix --python 3.12 --torch newest
    python -m tools.matrix --tests tests          # the whole fast suite, instead of what depends on torch
    python -m tools.matrix --table                # docs/support.md from the results, nothing is run

Each cell is an environment that uv makes in runs/matrix: ``lowest`` has the oldest releases that
pyproject.toml permits and that have a wheel for this Python. The results of all cells, from this run and from
earlier ones, are in docs/support.json.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
TORCHES = ("lowest", "pinned", "newest")
OUT = Path("runs/matrix")
RESULTS, PAGE = Path("docs/support.json"), Path("docs/support.md")
PROJECT, PINS = Path("pyproject.toml"), Path("constraints.txt")

TESTS = (
    "tests/wire/test_tensors.py",
    "tests/wire/test_torch_internals.py",
    "tests/rpc/test_torch_internals.py",
    "tests/rpc/test_calls.py",
    "tests/autograd/test_torch_internals.py",
    "tests/autograd/test_stages.py",
    "tests/test_optim.py",
    "tests/test_optim_torch_internals.py",
    "tests/test_interop.py",
    "tests/test_torch_reexports.py",
    "tests/cli/test_run_options.py",
    "tests/simulation/test_scheduler.py",
    "tests/simulation/test_simulate.py",
    "tests/rpc/test_interrupts.py",
)
"""The tests that depend most on torch and on the interpreter, in a few minutes."""

FREE_THREADED = (
    "## Free-threaded Python",
    "",
    "3.14t is a row of the table, and not supported before its cells have passed: no interpreter could be",
    "had so far. 3.13t cannot be, as msgspec refuses to be built for it. On 2026-11-28 it was tried",
    "nevertheless: Python 3.13.15t with torch 2.9.1, pyzmq 27.1.0, and msgspec 0.22.0 without that check,",
    "on two cores of a virtual Intel Xeon machine. No module of this library turns the interpreter lock on,",
    "nor do torch, pyzmq, msgspec and NumPy; triton 3.5.1 does, which comes with CUDA builds of torch and",
    "is loaded by `torch.func`. What had relied on the lock was found by reading, and by a program in",
    "which many threads of two workers make all kinds of calls and backward passes at once. It was",
    "mended; the changelog names it. The whole test suite was not run.",
    "",
    "It is for functions in pure Python that several callers call at once. Calls per second of one that",
    "takes 6 ms, with eight in flight, medians of three rounds on a busy machine: 128 with one thread",
    "that runs calls and 115 with two (`num_worker_threads`) on Python with the lock; 71 and 102 without",
    "it. Two processes that only run this function do so 1.2 times as often as one there, so two cores of",
    "their own may give more. It is not for calls that do little: one or two threads that call in turn",
    "got 0.3 to 0.5 of the calls per second that they get with the lock. Functions of torch release the",
    "lock anyway, and processes need no free-threaded Python.",
    "",
    "Without the lock a finalizer (`__del__`) may also run at any line of the thread that has made the",
    "object, when another thread drops the last reference, and this library may hold a lock of its own",
    "there. It notices that only of what the garbage collector calls: make no calls in finalizers.",
)
"""What was tried by hand, for the page."""

CELL_SECONDS = 3600

Result = dict[str, str]


def main() -> int:
    """Returns 1 if the tests of a cell failed."""
    options = _parser().parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = False
    for python, torch in () if options.table else itertools.product(options.python, options.torch):
        print(f"{python} {torch}: output in {OUT}/{python}-{torch}.log", flush=True)
        result = try_cell(python, torch, options.tests)
        print(f"{python} {torch}: {result}", flush=True)
        failed |= result["state"] == "failed"
        save(results, f"{python} {torch}", result)
    PAGE.write_text(page(results))
    return int(failed)


def save(results: dict[str, Result], cell: str, result: Result) -> None:
    """Add a result, unless the cell was not tried now (perhaps without a network) but was earlier."""
    if result["state"] == "not tried" and results.get(cell, result)["state"] != "not tried":
        return
    results[cell] = result
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


def try_cell(python: str, torch: str, tests: list[str]) -> Result:
    """What came of one cell: its state (passed, failed, not tried), versions and counts."""
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "tests": " ".join(tests),
    }
    root = OUT / f"{python}-{torch}"
    try:
        install(root, python, torch)
    except subprocess.CalledProcessError as error:
        return {**result, "state": "not tried", "why": reason(error.stderr)}
    log = OUT / f"{root.name}.log"
    status = run_tests(root, tests, log)
    result |= {
        "state": "failed" if status else "passed",
        "versions": versions(root),
        "counts": counts(log.read_text(errors="replace")) or f"no summary, exit status {status}",
    }
    if not status:
        shutil.rmtree(root)  # gigabytes, unless uv could link them from its cache
    return result


def run_tests(root: Path, tests: list[str], log: Path) -> int:
    """The exit status of pytest in the environment of a cell, -9 if it ran for longer than CELL_SECONDS."""
    options = ("-q", "-m", "not processes and not slow", "-p", "no:cacheprovider")
    command: list[str | Path] = [root / "bin/python", "-m", "pytest", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with log.open("w") as file:
        try:
            return subprocess.run(
                command, env=environment, stdout=file, stderr=file, timeout=CELL_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL


def counts(output: str) -> str:
    """What pytest counted, empty if it did not get that far; a library may print after it."""
    found = re.findall(r"(?m)^(?:=+ )?(\d+ .*) in [\d.]+s", output)
    return found[-1] if found else ""


def install(root: Path, python: str, torch: str) -> None:
    """Make the environment of a cell.

    Raises:
        CalledProcessError: if there is no such Python, or torch has no wheel for it.
    """
    uv("venv", "--clear", "--quiet", "--python", python, root)
    target = ("pip", "install", "--quiet", "--only-binary", ":all:", "--python", root / "bin/python")
    if torch == "pinned":
        uv(*target, "--constraint", PINS, "--requirements", PROJECT)
    else:
        uv(
            *target,
            "--resolution",
            "lowest-direct" if torch == "lowest" else "highest",
            "--requirements",
            PROJECT,
        )
    installed = uv("pip", "freeze", "--python", root / "bin/python").splitlines()
    constraints = OUT / "constraints.txt"
    # The tests' own packages are those of the pins, but for them nothing that is installed may change: the
    # lowest torch needs another sympy than the pinned one.
    constraints.write_text("\n".join(installed + pins_without(installed)))
    uv(*target, "--constraint", constraints, "--requirements", PROJECT, "--group", f"{PROJECT}:dev")


def pins_without(installed: Sequence[str]) -> list[str]:
    """The pins of other packages than those installed."""

    def name(line: str) -> str:
        return line.partition("==")[0].lower().replace("_", "-")

    names = set(map(name, installed))
    return [line for line in PINS.read_text().splitlines() if name(line) not in names]


def uv(*arguments: str | Path) -> str:
    """Run uv, with what it reports on failure in the exception, and return what it prints."""
    found = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    return subprocess.run(
        [found, *arguments], check=True, capture_output=True, text=True, timeout=CELL_SECONDS
    ).stdout


def reason(stderr: str) -> str:
    """Why uv failed, in one line: the first error and its innermost cause."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line for line in lines if line.startswith("error")][:1]
    causes = [line for line in lines if re.match("cause|Caused by", line)][-1:]
    return " ".join((errors + causes) or lines[:1])


def versions(root: Path) -> str:
    """The exact versions in the environment of a cell."""
    code = """import platform, importlib.metadata as m
names = ("torch", "pyzmq", "msgspec", "cloudpickle")
print(", ".join([f"Python {platform.python_version()}", *(f"{name} {m.version(name)}" for name in names)]))"""
    return subprocess.run(
        [root / "bin/python", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


# ---- the page ---------------------------------------------------------------------------------------------


def page(results: Mapping[str, Result]) -> str:
    """docs/support.md: a table of the cells, and what each had."""
    return "\n".join(_page(results)) + "\n"


def _page(results: Mapping[str, Result]) -> Iterator[str]:
    yield from ("# Supported versions", "", "<!-- from docs/support.json: `make matrix` writes both -->", "")
    yield "Tests on Linux (x86-64, CPU) with each Python and three releases of torch: the *lowest* one that"
    yield "`pyproject.toml` permits and that has a wheel for this Python (with the lowest pyzmq, msgspec and"
    yield "cloudpickle), the *pinned* one of `constraints.txt`, and the *newest*."
    yield from ("", "| Python | lowest | pinned | newest |", "|---|---|---|---|")
    for python in PYTHONS:
        yield f"| {python} | {' | '.join(_word(results.get(f'{python} {torch}', {})) for torch in TORCHES)} |"
    yield from ("", "## What was run", "", "| cell | date | versions | result |", "|---|---|---|---|")
    for cell, result in sorted(results.items()):
        said = result.get("counts") or result.get("why", "")
        yield f"| {cell} | {result['date']} | {result.get('versions', '')} | {said.replace('|', '/')} |"
    tests = sorted({test for result in results.values() for test in result["tests"].split()})
    yield from (
        "",
        f"The tests, without those that start processes or are slow: {', '.join(f'`{t}`' for t in tests)}.",
        "",
    )
    yield "`tools/test` runs all tests on one Python with the pinned torch. Not tried: macOS, Windows, other"
    yield "processors than x86-64, GPUs ([GPUs](gpus.md)), nightly builds of torch."
    yield from ("", *FREE_THREADED)


def _word(result: Mapping[str, Any]) -> str:
    found = re.search(r"torch (\S+?)(,|$)", result.get("versions", ""))
    return f"{result.get('state', 'not tried')}{f' ({found[1]})' if found else ''}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description="Test each supported version."
    )
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, metavar="VERSION")
    parser.add_argument("--torch", nargs="+", choices=TORCHES, default=TORCHES, metavar="RELEASE")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH")
    parser.add_argument("--table", action="store_true", help="write the page only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
