"""The limit on open files, raised as far as a group needs: libzmq aborts a process that reaches it."""

from __future__ import annotations

import functools
import logging
import resource

logger = logging.getLogger(__name__)

DESCRIPTORS_PER_PEER = 8
"""At most, if both call each other on one host: the DEALER's connection and eventfd, the one to the ROUTER,
and two each of the fast path, of heartbeats, and (now and then) of a reply channel."""

OTHER_DESCRIPTORS = 256
"""For the worker itself and the user's program."""

STRANGERS = 3072
"""That connections of strangers may take, until each socket closes the oldest: see
:data:`~zmqgrad.transport.tcp_listener.MAX_SILENT` and its like."""


def reserve_descriptors(workers: int) -> None:
    """Raise this process's limit on open files if a group of ``workers`` and strangers could exceed it.

    Nothing is lowered, and child processes inherit the limit. Warns once if the system allows no more.
    """
    needed = OTHER_DESCRIPTORS + DESCRIPTORS_PER_PEER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + STRANGERS
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else max(soft, min(wanted, hard))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError) as e:  # macOS has a limit below the one that it reports
        logger.debug("cannot raise the limit on open files to %d: %s", allowed, e)
        allowed = soft
    if allowed < needed:
        _warn(allowed)


@functools.cache
def _warn(allowed: int) -> None:
    logger.warning(
        "this process may open %d files, enough to talk to about %d workers; libzmq aborts a process that "
        "reaches the limit: raise the hard limit (ulimit -Hn)",
        allowed,
        max(0, allowed - OTHER_DESCRIPTORS) // DESCRIPTORS_PER_PEER,
    )
