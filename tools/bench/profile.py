"""Where the time of one row goes: which code both workers run, by the kernel's own count.

    python -m tools.bench.profile train_step
    python -m tools.bench.profile train_step --side torch

has two workers do the work of that row again and again, and asks ``perf`` (of linux-tools) five thousand
times a second what each of them is doing. It prints how much time of the processor one unit of the row takes
on each: in arithmetic, the interpreter, torch's own code, copies, and the kernel, by what was asked of it.
Waiting takes none: the rest of the time is the other worker's, or goes by while threads wake up.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from tools.bench.plan import PATIENCE, meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.report import duration
from tools.bench.sides import OURS, TORCH, take
from tools.bench.timing import Budget
from tools.bench.workloads import WORKLOADS

HERTZ = 5000
PARTS = (
    ("arithmetic", re.compile(r"mkl|gemm|onednn|dnnl")),
    ("copies", re.compile(r"mem(move|cpy|set)")),
)
"""By the name of the function; the first that fits counts."""

OBJECTS = (
    ("interpreter", re.compile(r"libpython|/python[\d.]*$|_ctypes|_struct|_socket|select|array\.")),
    ("torch", re.compile(r"libtorch|libc10|_C\.")),
    ("messages", re.compile(r"libzmq|_zmq|_core\.")),
    ("C library", re.compile(r"libc[.-]|libpthread|ld-linux|vdso|libstdc|libffi")),
)
"""By the file that the function lies in."""

_FRAME = re.compile(r"\s+[0-9a-f]+ (\S+).* \((.*)\)$")
_CALL = re.compile(r"__x64_sys_(\w+)|__arm64_sys_(\w+)")

Sample = list[tuple[str, str]]
"""A function and its file, and who called it."""


def part_of(sample: Sample) -> str:
    """What the code of ``sample`` is for."""
    function, file = sample[0]
    if "kernel" in file or file.startswith("["):
        calls = [match for name, _ in sample if (match := _CALL.search(name))]
        if calls:
            return f"kernel: {calls[0].group(1) or calls[0].group(2)}"
        return "kernel: page faults" if any("page_fault" in name for name, _ in sample) else "kernel"
    for part, pattern in PARTS:
        if pattern.search(function):
            return part
    for part, pattern in OBJECTS:
        if pattern.search(file):
            return part
    return "other"


def read_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """The samples in what ``perf script`` prints: a line that begins one, then its functions."""
    sample: Sample = []
    for line in lines:
        frame = _FRAME.match(line)
        if frame:
            sample.append((frame.group(1), frame.group(2)))
        elif sample:
            yield sample
            sample = []
    if sample:
        yield sample


class Sampling:
    """Samples the calling process for ``seconds``, from now on, while it goes on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory()
        self._data = str(Path(self._folder.name, "perf.data"))
        asked = ["perf", "record", "-q", "-o", self._data, "-e", "cpu-clock", "-F", str(HERTZ), "-g"]
        watched = ["-p", str(os.getpid()), "--", "sleep", str(seconds)]
        self._perf = subprocess.Popen([*asked, *watched], stderr=subprocess.PIPE, text=True)

    def goes_on(self) -> bool:
        """Has it not ended yet?"""
        return self._perf.poll() is None

    def parts(self) -> dict[str, float]:
        """The share of the time in which this process ran code of each part; waits for the end.

        Raises:
            RuntimeError: with what perf said, if it could not.
        """
        _, said = self._perf.communicate(timeout=self._seconds + PATIENCE)
        with self._folder:
            if self._perf.returncode:
                raise RuntimeError(f"perf cannot sample this process: {said.strip()}")
            shown = ["perf", "script", "-i", self._data, "-F", "comm,tid,time,ip,sym,dso"]
            text = subprocess.run(shown, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
        counted = Counter(map(part_of, read_samples(text.splitlines())))
        return {part: n / HERTZ / self._seconds for part, n in counted.most_common()}


def work(place: Place, side_name: str, name: str, seconds: float) -> tuple[float, dict[str, float]]:
    """In both workers: do the work of row ``name`` for ``seconds`` and sample it.

    Gives the seconds of one unit (on worker 0), and the share of the time that each part takes.
    """
    torch.set_num_threads(1)
    side = take(side_name)
    side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    taken = 0.0
    if place.rank == 0:
        workload = next(w for w in WORKLOADS if w.name == name)
        go = workload.prepare(side)
        Budget(seconds / 10).median(go)
        place.together()
        sampling = Sampling(seconds)
        goes, begin = 0, time.perf_counter()
        while sampling.goes_on():
            go()
            goes += 1
        taken = (time.perf_counter() - begin) / goes / workload.per
    else:
        place.together()
        sampling = Sampling(seconds)
    parts = sampling.parts()
    side.rpc.shutdown()
    return taken, parts


def print_parts(name: str, side: str, found: list[tuple[float, dict[str, float]]]) -> None:
    """A table of the parts, in the time that one unit takes."""
    taken = found[0][0]
    print(f"{name}, {side}: {duration(taken)} each, of which ran")
    print(f"{'':24}{'on worker 0':>14}{'on worker 1':>14}")
    parts = sorted({part for _, shares in found for part in shares}, key=lambda p: -_whole(found, p))
    for part in parts:
        print(f"{part:24}" + "".join(f"{duration(taken * shares.get(part, 0.0)):>14}" for _, shares in found))
    print(f"{'all':24}" + "".join(f"{duration(taken * sum(shares.values())):>14}" for _, shares in found))


def _whole(found: list[tuple[float, dict[str, float]]], part: str) -> float:
    return sum(shares.get(part, 0.0) for _, shares in found)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if that failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.profile", description=__doc__.split("\n")[0])
    parser.add_argument("row", choices=[w.name for w in WORKLOADS], metavar="ROW", help="as in tools.bench")
    parser.add_argument("--side", choices=(OURS, TORCH), default=OURS)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="to sample (default: 5)")
    options = parser.parse_args(arguments)
    if shutil.which("perf") is None:
        print("there is no perf here: install linux-tools (linux-perf on Debian)", file=sys.stderr)
        return 1
    meet_at_a_free_port()
    try:
        found = run_together(work, 2, PATIENCE, lambda _: None, options.side, options.row, options.seconds)
    except PieceFailed as e:
        print(f"{options.row} could not be measured: {e}", file=sys.stderr)
        return 1
    print_parts(options.row, options.side, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
