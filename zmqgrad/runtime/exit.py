"""Exit functions: what runs when a process ends, after the functions that the program has registered.

Note [Exit of children]: how a process of multiprocessing ends depends on how it was started. A spawned child
runs multiprocessing's finalizers, and later, as every interpreter, the functions of ``atexit``. A forked one
ends by ``os._exit``: before Python 3.13 it runs only the finalizers; since then also the functions of
``atexit`` that were registered in the child, as it forgets its parent's. So a finalizer is right only where
no function of ``atexit`` follows it: a program that calls, say, ``rpc.shutdown`` there would find everything
closed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable

_CHILDREN_RUN_ATEXIT = sys.version_info >= (3, 13)


def run_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Run ``function`` at exit, after the functions that are registered later. Usable as a decorator.

    It must be idempotent. Forks inherit it: it must do nothing in a process that it does not concern.

    Args:
        function: without arguments.

    Returns:
        ``function``.
    """
    registered_in = os.getpid()

    def in_child(_: object) -> None:
        """Called when a child of multiprocessing begins, before it runs anything of the program."""
        if not _CHILDREN_RUN_ATEXIT:
            _finalize_in_fork(function)
        elif os.getpid() != registered_in:  # a fork
            atexit.register(function)

    atexit.register(function)
    if not _CHILDREN_RUN_ATEXIT:
        _finalize_in_fork(function)
    multiprocessing.util.register_after_fork(function, in_child)
    return function


def _finalize_in_fork(function: Callable[[], None]) -> None:
    """Make ``function`` a finalizer of multiprocessing if this is a forked child of it."""
    forked = multiprocessing.get_start_method(allow_none=True) in ("fork", "forkserver")
    if forked and multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=0)
