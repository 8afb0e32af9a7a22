"""Programs as ``python FILE`` runs them, by forks of the process that has imported torch for all tests.

A fresh interpreter needs seconds of processor time to import torch and what torch's optimizers import, and so
does each process that ``torch.multiprocessing.spawn`` starts. What belongs to the start or the end of an
interpreter is not seen here.
"""

from __future__ import annotations

import functools
import multiprocessing.forkserver
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import run_processes

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def run_script(
    path: Path,
    *args: object,
    workers: int = 0,
    seconds: float = 140.0,
    env: Mapping[str, str] | None = None,
) -> str:
    """What ``python path args`` prints, with a ``MASTER_PORT`` of its own and ``env`` in its environment.

    ``workers``: so many processes run it, with the place that a launcher gives to each; 0: one without.

    Raises:
        ProcessFailure: if it fails, or has not ended within ``seconds``.
    """
    with tempfile.TemporaryDirectory(prefix="zg-script-") as directory:
        stdout = Path(directory, "stdout")
        call = (str(path), list(map(str, args)), workers > 0, str(stdout))
        run_processes(_script, workers or 1, call, timeout=seconds, env=env)
        return stdout.read_text()


def _script(rank: int, path: str, args: list[str], is_launched: bool, stdout: str) -> None:
    import torch.multiprocessing

    for variable in () if is_launched else PLACE:
        del os.environ[variable]
    os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
    # That of the test is this one's, too: the library looks for one of its own, which is a mistake.
    server = multiprocessing.forkserver.connect_to_new_process.__self__  # type: ignore[attr-defined]
    server.ensure_running = lambda: None
    torch.multiprocessing.spawn = _spawn  # type: ignore[assignment]
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def _spawn(fn: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    from torch.multiprocessing import start_processes

    as_child = functools.partial(_spawned, os.getpid(), dict(os.environ), fn)
    start_processes(as_child, args, nprocs, start_method="forkserver")


def _spawned(
    parent: int, environ: dict[str, str], fn: Callable[..., object], index: int, *args: object
) -> None:
    """Call ``fn`` with what a spawned process has of its parent's."""
    os.setpgid(0, os.getpgid(parent))
    for fd in (1, 2):
        os.dup2(os.open(f"/proc/{parent}/fd/{fd}", os.O_WRONLY | os.O_APPEND), fd)
    os.environ.clear()
    os.environ.update(environ)
    fn(index, *args)
