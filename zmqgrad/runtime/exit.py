"""Exit functions: what runs when a process ends, after the functions that the program has registered.

Note [Exit of children]: a process of multiprocessing runs multiprocessing's finalizers, and functions of
``atexit``. A program may have registered, say, ``rpc.shutdown`` among either, which would find everything
closed if ours came first. So ours belongs to those that run last:

- A spawned child of Python before 3.13 runs the finalizers when its target has returned, and the functions of
  ``atexit`` later, as every interpreter. A forked one ends by ``os._exit``, and runs the finalizers only.
- Since 3.13 each child runs the finalizers in a function of ``atexit`` that was registered before all others.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import sys
from collections.abc import Callable

_FINALIZERS_RUN_LAST = sys.version_info >= (3, 13)


def run_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Run ``function`` at exit, after the functions that are registered later. Usable as a decorator.

    It must be idempotent. Forks inherit it: it must do nothing in a process that it does not concern.

    Args:
        function: without arguments.

    Returns:
        ``function``.
    """
    atexit.register(function)

    def in_child(_: object = None) -> None:
        """Called when a child of multiprocessing begins, before it runs anything of the program."""
        forked = multiprocessing.get_start_method(allow_none=True) in ("fork", "forkserver")
        if _is_child() and (forked or _FINALIZERS_RUN_LAST):
            atexit.unregister(function)
            multiprocessing.util.Finalize(None, function, exitpriority=0)

    in_child()
    multiprocessing.util.register_after_fork(function, in_child)
    return function


def _is_child() -> bool:
    """Whether multiprocessing has started this process."""
    if multiprocessing.parent_process() is not None:
        return True
    # A spawned one imports the modules of its target before it knows its parent.
    return _FINALIZERS_RUN_LAST and getattr(multiprocessing.current_process(), "_inheriting", False)
