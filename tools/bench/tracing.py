"""What tracing costs: the same calls with a recorder and without, in turn, in two workers of zmqgrad.

    python -m tools.bench.tracing

prints, for each program, the median over the turns of time and of processor time (of both workers) with
tracing over that without; and what one event costs: processor time of its thread, of the writer, and bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from tools.bench.plan import PATIENCE, meet_at_a_free_port
from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.sides import OURS, take
from tools.bench.workloads import OTHER, WORKLOADS
from zmqgrad import rpc, trace
from zmqgrad.transport.tap import WORKER, Identity
from zmqgrad.wire.messages import NONE_PAYLOAD, Call, Result

PROGRAMS = {"call": 500, "flood": 2, "autograd_chain": 8}
"""Workloads, and how often each runs in a turn."""

GOALS = {"call": 1.10, "flood": 1.25}

EVENT_MICROSECONDS, EVENT_BYTES = 2.0, 100
"""Goals of one event."""

ROUNDS, CALLS_OF_A_ROUND = 100, 500

_recording = ExitStack()


def switch(directory: str) -> float:
    """Records this process into ``directory``, or no more if that is empty. Returns its processor time."""
    _recording.close()
    if directory:
        _recording.enter_context(trace.record(directory))
    return time.process_time()


def _switch_both(directory: str) -> float:
    there: float = rpc.rpc_sync(OTHER, switch, args=(directory,))
    return switch(directory) + there


def measure(place: Place, seconds: float, directory: str) -> dict[str, float]:
    """In both workers; worker 0 returns the ratios, by name."""
    torch.set_num_threads(1)
    side = take(OURS)
    rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    found: dict[str, float] = {}
    if place.rank == 0:
        works = {w.name: w for w in WORKLOADS}
        for name, repeats in PROGRAMS.items():
            place.say(name)
            work = works[name].prepare(side)
            ratios: list[float] = []
            used_ratios: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(ratios) < 5:
                turn = {}
                for where in ("", directory) if len(ratios) % 2 else (directory, ""):
                    _switch_both(where)
                    work()  # to warm up
                    used, began = _switch_both(where), time.perf_counter()
                    for _ in range(repeats):
                        work()
                    turn[where] = (time.perf_counter() - began, _switch_both("") - used)
                ratios.append(turn[directory][0] / turn[""][0])
                used_ratios.append(turn[directory][1] / turn[""][1])
            found[name], found[f"{name} cpu"] = statistics.median(ratios), statistics.median(used_ratios)
    rpc.shutdown()
    return found


def event_cost(directory: str) -> tuple[float, float, float]:
    """What an event of a call costs its thread (the least of many rounds) and the writer, in us; its bytes.

    The caller and the callee of each call are one actor, and the recorder is not active, so that nothing but
    recording is measured.
    """
    recorder = trace.recorder.Recorder(directory)
    tracer = recorder.attach(Identity(WORKER, "worker0", incarnation=1))
    call, result = Call("bench:nop", NONE_PAYLOAD), Result()
    recording: list[float] = []
    writing: list[float] = []
    for first in range(0, ROUNDS * CALLS_OF_A_ROUND, CALLS_OF_A_ROUND):
        began = time.thread_time()
        for number in range(first, first + CALLS_OF_A_ROUND):
            for message in (call, result):
                for outgoing in (True, False):
                    tracer.tap(outgoing, 0, (message.TYPE, 0, 1, number), message, 100, time.monotonic_ns())
            tracer.request_started(0, number)
            tracer.request_finished(0, number, False)
            tracer.wait_begun(0, number)
            tracer.wait_ended(0, number, False)
        between = time.thread_time()
        recorder.flush()
        recording.append(between - began)
        writing.append(time.thread_time() - between)
    tracer.close()
    recorder.close()
    (process,) = trace.Job(directory).processes
    assert recorder.path is not None
    recorded = 5 * CALLS_OF_A_ROUND  # four messages and the request, which is read as two events
    size = recorder.path.stat().st_size / (ROUNDS * recorded)
    assert process.events > ROUNDS * recorded, "events were dropped"
    return min(recording) / recorded * 1e6, statistics.median(writing) / recorded * 1e6, size


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if that failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tracing", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="for each program (default: 5)"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        recording, writing, size = event_cost(directory)
    print(
        f"event: {recording:.2f} us in its thread, {writing:.2f} us in the writer, {size:.0f} bytes", end="  "
    )
    print(f"goal <= {EVENT_MICROSECONDS:g} us, {EVENT_BYTES} bytes")
    meet_at_a_free_port()
    try:
        with tempfile.TemporaryDirectory() as directory:
            found = run_together(measure, 2, PATIENCE, lambda _: None, options.seconds, directory)[0]
            written = sum(log.stat().st_size for log in Path(directory).iterdir())
    except PieceFailed as e:
        print(f"{OURS} could not be measured: {e}", file=sys.stderr)
        return 1
    print(f"the logs took {written >> 10} KB")
    for name in PROGRAMS:
        goal = f"goal <= {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:14} {found[name]:6.3f}  {goal:13} processor time {found[f'{name} cpu']:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
