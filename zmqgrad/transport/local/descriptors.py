"""Keeps peers from connecting to a process of this host that has no file descriptor left.

libzmq aborts a process whose ipc listener cannot accept a connection for lack of a descriptor (4.3.5: the
assertion in ``ipc_listener_t::accept`` lacks EMFILE, which that of tcp has). The process itself cannot
prevent that: the connection is accepted in libzmq's own thread. So the endpoint names the process, and a peer
that is about to connect looks first how many descriptors it has.
"""

from __future__ import annotations

import errno
import os
import re
import secrets

RESERVE = 8
"""Descriptors that must be free in a process to which a peer connects: other peers may connect meanwhile."""

_PROCESS = re.compile(r"@zmqgrad-[a-z]+-(\d+)-")
_LIMIT = re.compile(r"^Max open files +(\d+)", re.MULTILINE)


def abstract_endpoint(purpose: str) -> str:
    """Returns a new ipc endpoint without a file, which names this process and cannot be guessed."""
    return f"ipc://@zmqgrad-{purpose}-{os.getpid()}-{secrets.token_hex(16)}"


def check_can_accept(endpoint: str) -> None:
    """Checks that the process which listens at ``endpoint`` has file descriptors for a connection.

    Raises:
        OSError: EMFILE, if it has not. Nothing if that cannot be known: the endpoint has another form, or the
            process is in another process namespace.
    """
    process = named_process(endpoint)
    if process:
        _check(str(process), RESERVE)


def named_process(endpoint: str) -> int:
    """Returns the id of the process that ``endpoint`` names; 0 if it has another form."""
    named = _PROCESS.search(endpoint)
    return 0 if named is None else int(named[1])


def check_can_open(number: int) -> None:
    """Checks that this process can open ``number`` descriptors: libzmq aborts it if a few are missing.

    Raises:
        OSError: EMFILE, if it cannot.
    """
    _check("self", number)


def _check(process: str, needed: int) -> None:
    try:
        with open(f"/proc/{process}/limits") as limits:
            limit = _LIMIT.search(limits.read())
        used = len(os.listdir(f"/proc/{process}/fd"))
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise  # this process has none
        return
    if limit is not None and used + needed > int(limit[1]):
        which = "this process" if process == "self" else f"process {process}, which listens there,"
        raise OSError(
            errno.EMFILE,
            f"{which} has {used} open files of {limit[1]} allowed, and {needed} more must be free: raise the "
            "limit (ulimit -n)",
        )
