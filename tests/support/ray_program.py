"""Scenarios for tests/test_ray.py: runs each with RayLauncher, and prints all results as a line of JSON."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group_table

from zmqgrad.errors import WorkerFailedError, ZmqgradError
from zmqgrad.ray import RayLauncher

LONG_SECONDS = 60.0


def join() -> int:
    from zmqgrad import rpc

    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    return rank


def call(number: int) -> dict[str, Any]:
    """Calls the other worker, and looks at what it was started with."""
    from zmqgrad import rpc

    secret = os.environ["ZMQGRAD_SECRET"]
    rank = join()
    found = {
        "result": (rank, rpc.rpc_sync(f"worker{1 - rank}", max, args=(rank, number))),
        "secret": len(secret) >= 16,
        "told": any(secret in path.read_text() for path in Path("/proc").glob("[0-9]*/cmdline")),
        "devices": (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]),
    }
    rpc.shutdown()
    return found


def wait_for_the_other(rank: int) -> None:
    """Rank 0 calls rank 1 and waits for a long time."""
    from zmqgrad import rpc

    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(LONG_SECONDS,), timeout=LONG_SECONDS)


def die(path: str) -> None:
    """Rank 1 is killed in the first round, and raises in the second: whether its process is a new one."""
    rank, count = join(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    mine = Path(path) / str(rank)
    if count == "0":
        mine.write_text(str(os.getpid()))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1:
        raise KeyError(f"restart {count}, new: {mine.read_text() != str(os.getpid())}")
    wait_for_the_other(rank)


def wait_in_rank_1() -> None:
    """Rank 0 ends at once, with an exit code that is no failure."""
    if os.environ["RANK"] == "0":
        sys.exit()
    time.sleep(LONG_SECONDS)


def interrupt_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except WorkerFailedError as e:
        return type(e).__name__, str(e), e.rank, e.restarts
    except (ZmqgradError, KeyboardInterrupt) as e:
        return type(e).__name__, str(e)


def main(directory: str) -> None:
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    found: dict[str, Any] = {"warnings": []}
    warnings = logging.Handler()
    warnings.emit = lambda record: found["warnings"].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zmqgrad.ray").addHandler(warnings)
    gpus = RayLauncher(2, cpus_per_worker=0, gpus_per_worker=1, strategy="STRICT_PACK")
    found["calls"] = outcome(lambda: gpus.run(call, 7))
    with RayLauncher(2, max_restarts=1) as launcher:
        found["dies"] = outcome(lambda: launcher.run(die, directory))
        found["argument"] = outcome(lambda: launcher.run(call, threading.Lock()))
    once = RayLauncher(2)
    found["timeout"] = outcome(lambda: once.run(wait_in_rank_1, timeout=15))
    found["exit 3"] = outcome(lambda: once.run(sys.exit, 3))
    found["result"] = outcome(lambda: once.run(threading.Lock))
    found["too much"] = outcome(lambda: RayLauncher(3, start_timeout=1).run(call, 7))
    interrupt_after(4)
    found["interrupt"] = outcome(lambda: once.run(time.sleep, LONG_SECONDS))
    states = sorted({group["state"] for group in placement_group_table().values()})
    found["left"] = states, is_free(2)
    ray.shutdown()
    print(json.dumps(found))


def is_free(cpus: int) -> bool:
    """Whether Ray can place a task that needs all CPUs, which it cannot while an actor lives."""
    task = ray.remote(num_cpus=cpus)(lambda: True).remote()
    return bool(ray.get(task, timeout=LONG_SECONDS))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
