"""Who attacks: processes with what another user, or a container, has. Starting them needs root."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

NOBODY = 65534

SECRET = "the secret of a job, which nobody guesses"

_NEW_MOUNTS, _NEW_PROCESSES = 0x0002_0000, 0x2000_0000
_PRIVATE_RECURSIVELY = 0x4_4000
SECONDS = 60.0
"""How long an attack may take."""


class Attacker(Enum):
    """A kind of attacker on the host of the job."""

    OTHER_USER = "another user of this host"
    CONTAINER = "a container on this host's network, with the user's number but not his files"
    OWN_USER = "another job of the same user, without the secret"
    SAME_SECRET = "another job of the same user, with the same secret"


def attack(
    attacker: Attacker,
    hidden: list[str],
    scratch: str,
    act: Callable[..., object],
    *args: Any,
    seconds: float = SECONDS,
) -> str:
    """Let ``attacker`` call ``act(*args)``.

    Args:
        hidden: directories that a container does not have.
        scratch: the directory of his temporary files.
        seconds: how long it may take.

    Returns:
        What he got, in words; empty for nothing.

    Raises:
        RuntimeError: if the attack itself failed, so that nothing is known.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_run, args=(theirs, attacker, hidden, scratch, act, args)
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise RuntimeError(f"the attack did not end within {seconds:g} s")
        worked, said = ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
    if not worked:
        raise RuntimeError(said)
    return str(said or "")


def _run(
    result: Connection,
    attacker: Attacker,
    hidden: list[str],
    scratch: str,
    act: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    try:
        tempfile.tempdir = scratch
        if attacker is Attacker.OTHER_USER:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.environ["HOME"] = "/nonexistent"
        elif attacker is Attacker.SAME_SECRET:
            os.environ["ZMQGRAD_SECRET"] = SECRET
        elif attacker is Attacker.CONTAINER:
            _enter_container(hidden)
        result.send((True, act(*args)))
    except BaseException:
        result.send((False, traceback.format_exc()))
    os._exit(0)


def _enter_container(hidden: list[str]) -> None:
    """Move to other namespaces of mounts and processes, where nothing is in the directories ``hidden``."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES))
    _check(libc.mount(None, b"/", None, _PRIVATE_RECURSIVELY, None))
    for directory in hidden:
        if os.path.isdir(directory):
            _check(libc.mount(b"none", directory.encode(), b"tmpfs", 0, b"mode=0700"))
    child = os.fork()  # the first process of the new namespace
    if child:
        os.waitpid(child, 0)
        os._exit(0)


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
