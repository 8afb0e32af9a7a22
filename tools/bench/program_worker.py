"""One worker of an example program. tools/bench/programs.py starts it, and measures the process.

    python tools/bench/program_worker.py EXAMPLE BACKEND RANK WORLD_SIZE

imports the example, prints how many seconds of wall and CPU time this process had taken by then, and runs its
``run_worker``. It imports nothing else that takes time.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Run one worker of an example to its end."""
    example, backend, rank, world_size = sys.argv[1:]
    started = float(os.environ["PROGRAM_STARTED"])
    path = Path(example)
    sys.argv = [path.name, "--backend", backend, "--workers", world_size]
    sys.path[0] = str(path.parent)
    module = importlib.import_module(path.stem)
    imported = {"wall": time.monotonic() - started, "cpu": time.process_time()}
    print(json.dumps(imported), file=sys.stderr, flush=True)
    module.run_worker(int(rank), int(world_size))


if __name__ == "__main__":
    main()
