"""``elastic://host:port?run_id=..&min_nodes=..&max_nodes=..``: one process per node takes part in a round.

The rendezvous assigns rank and world size. More settings may follow, those of
:func:`~zmqgrad.elastic.create_handler`, and ``backend``. The store of the round is served by its rank 0.
While it is open, the heartbeats of the node are renewed; closing it leaves the round.

:mod:`zmqgrad.rendezvous` imports this module at the first URL of the scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from zmqgrad.elastic.handler import Rendezvous, RendezvousHandler
from zmqgrad.elastic.registry import create_handler
from zmqgrad.errors import RendezvousClosedError, RendezvousError
from zmqgrad.rendezvous import DEFAULT_TIMEOUT, RendezvousResult, register_rendezvous_handler
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import PrefixStore
from zmqgrad.store.arguments import seconds_of

SCHEME = "elastic"

READ_TIMEOUT_SECONDS = 10.0
"""Default of ``read_timeout``: how long leaving may take if the process that served the state has died."""


class ElasticStore(PrefixStore):
    """The store of a round. Closing it leaves the round.

    Args:
        joined: the round.
        handler: of this node; closed with the store.
    """

    def __init__(self, joined: Rendezvous, handler: RendezvousHandler) -> None:
        super().__init__(f"round/{joined.round}", joined.store)
        self._handler = handler

    def close(self) -> None:
        """Leave the round, stop the heartbeats, and close all connections. Idempotent."""
        self._handler.close()


def elastic_rendezvous(
    url: str, timeout: timedelta | float = DEFAULT_TIMEOUT, **settings: Any
) -> Iterator[RendezvousResult]:
    """The rendezvous handler of ``elastic://``; see :func:`zmqgrad.rendezvous.rendezvous`.

    Args:
        url: of the rendezvous.
        timeout: of joining, and of the store.
        settings: as in the URL, which they override.

    Raises:
        RendezvousError: if the URL is invalid, or no round completes within ``timeout``.
        ConfigurationError: if a setting is invalid.
    """
    yield _join(url, seconds_of(timeout), settings)
    raise RendezvousError(
        f"{url!r} does not support re-rendezvous: close the store, and call rendezvous() again"
    )


def _join(url: str, timeout: float, settings: dict[str, Any]) -> RendezvousResult:
    deadline = Deadline.after(timeout)
    while True:
        handler = _handler(url, deadline.left(), settings)
        try:
            joined = handler.next_rendezvous()
        except BaseException as e:
            handler.close()
            if isinstance(e, RendezvousClosedError) and handler.is_retired():
                continue  # its server closes; another one follows, which may be in this process
            raise
        return ElasticStore(joined, handler), joined.rank, joined.world_size


def _handler(url: str, timeout: float, settings: dict[str, Any]) -> RendezvousHandler:
    parts = urlsplit(url)
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as e:
        raise RendezvousError(f"the URL {url!r} cannot be read: {e}") from e
    query |= {name: str(value) for name, value in settings.items()}
    if "rank" in query:
        raise RendezvousError(f"{SCHEME}:// assigns the ranks; pass no rank with {url!r}")
    if not query.get("run_id"):
        raise RendezvousError(f"{url!r} lacks a run_id, which identifies the job; append run_id=..")
    least, most = _num_nodes(url, query)
    query.setdefault("join_timeout", str(timeout))
    if query.setdefault("backend", "zmqgrad") == "zmqgrad":
        query.setdefault("connect_timeout", query["join_timeout"])
        query.setdefault("read_timeout", str(READ_TIMEOUT_SECONDS))
    return create_handler(
        query.pop("backend"), parts.netloc, query.pop("run_id"), least, most, serve_rounds=True, **query
    )


def _num_nodes(url: str, query: dict[str, str]) -> tuple[int, int]:
    """Remove the least and the greatest number of nodes from ``query``. A world size fixes both."""
    given = {name: query.pop(name) for name in ("world_size", "min_nodes", "max_nodes") if name in query}
    if not ({"world_size"} == given.keys() or {"min_nodes", "max_nodes"} == given.keys()):
        raise RendezvousError(f"{url!r} must have either min_nodes and max_nodes, or a world size")
    try:
        numbers = [int(text) for text in given.values()]
    except ValueError:
        raise RendezvousError(f"{' and '.join(given)} must be whole numbers in {url!r}") from None
    return numbers[0], numbers[-1]


register_rendezvous_handler(SCHEME, elastic_rendezvous)
