"""Many workers, each calling every other from several threads, with calls back: does it complete, and when?

    python -m tools.bench.all_to_all                  # 24 workers, 100 calls, 4 threads; both sides
    python -m tools.bench.all_to_all --workers 8 --sides zmqgrad
    python -m tools.bench.all_to_all --flat           # no calls back, which torch completes with 24, too

Every worker makes ``--calls`` calls to each other worker, spread over ``--threads`` threads; each call calls
back. With the default number of threads a library that lets waiting calls hold its threads cannot finish
this (pytorch#26362); whoever does not finish within ``--limit`` seconds is said so. Printed besides: the
processor time that all workers used for the calls, and how long joining and leaving took.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import torch

from tools.bench.processes import PieceFailed, Place, run_together
from tools.bench.sides import OURS, TORCH, here, take
from tools.ports import free_port


def main() -> int:
    """Run; 1 if zmqgrad did not finish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=24)
    parser.add_argument("--calls", type=int, default=100, help="from each worker to each other")
    parser.add_argument("--threads", type=int, default=4, help="of each worker, that call")
    parser.add_argument("--flat", action="store_true", help="do not call back")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each side")
    parser.add_argument("--sides", nargs="+", choices=(OURS, TORCH), default=[OURS, TORCH])
    options = parser.parse_args()
    n, failed = options.workers, False
    calls = (1 if options.flat else 2) * n * (n - 1) * options.calls
    print(f"{n} workers on {os.cpu_count()} cores, {calls} calls")
    for side in options.sides:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        try:
            found = run_together(
                everybody_calls_everybody, n, options.limit, lambda text: None,
                side, options.calls, options.threads, options.flat,
            )  # fmt: skip
        except PieceFailed as e:
            failed |= side == OURS
            print(f"{side:8}  did not complete within {options.limit:g} s: {str(e).splitlines()[-1]}")
            continue
        init, took, leave, _ = (max(times) for times in zip(*found, strict=True))
        used, each = sum(times[3] for times in found), took / calls * 1e6
        print(
            f"{side:8}  {took:7.1f} s, {each:6.0f} us a call; {used:.1f} s of processors; "
            f"joined in {init:.2f} s, left in {leave:.2f} s"
        )
    return int(failed)


def everybody_calls_everybody(
    place: Place, side_name: str, calls: int, threads: int, flat: bool
) -> tuple[float, float, float, float]:
    """In each worker: seconds that joining, calling and leaving took, and of processor time for calling."""
    torch.set_num_threads(1)
    side = take(side_name)
    began = place.together()
    side.rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=place.count)
    joined = time.perf_counter() - began
    errors: list[BaseException] = []
    others = [rank for rank in range(place.count) if rank != place.rank]

    def call(number: int) -> None:
        try:
            for n in range(number, calls, threads):
                for rank in others:
                    function, args = (add_one, (n,)) if flat else (call_back, (place.rank, n))
                    assert side.rpc.rpc_sync(f"worker{rank}", function, args=args) == n + 1
        except BaseException as e:
            errors.append(e)

    began, used = place.together(), time.process_time()
    calling = [threading.Thread(target=call, args=(number,)) for number in range(threads)]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join()
    if errors:
        raise errors[0]
    place.together()
    took, used = time.perf_counter() - began, time.process_time() - used
    began = place.together()
    side.rpc.shutdown()
    return joined, took, time.perf_counter() - began, used


def call_back(rank: int, number: int) -> int:
    """Runs on the callee, and calls its caller."""
    result: int = here().rpc.rpc_sync(f"worker{rank}", add_one, args=(number,))
    return result


def add_one(number: int) -> int:
    """Runs on the caller again."""
    return number + 1


if __name__ == "__main__":
    raise SystemExit(main())
