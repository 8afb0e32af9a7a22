"""Our elastic rendezvous for torchrun: ``torchrun --rdzv-backend=zmqgrad --rdzv-endpoint=host:port ...``.

torchelastic finds :func:`rendezvous_backend` by the entry point ``zmqgrad`` in ``torchrun.handlers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import rendezvous as torchelastic

from zmqgrad import errors
from zmqgrad.elastic import (
    RendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    StoreBackend,
)
from zmqgrad.elastic.endpoint import open_endpoint
from zmqgrad.elastic.state import NodeDescGenerator
from zmqgrad.interop.stores import as_torch_store
from zmqgrad.store import Store

STORE_TIMEOUT_SECONDS = 60.0
"""Timeout of the store that holds the state; ``--rdzv-conf read_timeout=..`` changes it."""

_ERRORS: dict[type[Exception], type[Exception]] = {
    errors.RendezvousClosedError: torchelastic.RendezvousClosedError,
    errors.RendezvousTimeoutError: torchelastic.RendezvousTimeoutError,
    errors.RendezvousStateError: torchelastic.RendezvousStateError,
    errors.RendezvousConnectionError: torchelastic.RendezvousConnectionError,
}
"""What torchelastic's agent expects for each of our errors."""

_nodes = NodeDescGenerator()


@contextmanager
def _torchelastic_errors() -> Iterator[None]:
    try:
        yield
    except errors.RendezvousError as e:
        raise _ERRORS.get(type(e), torchelastic.RendezvousError)(str(e)) from e


class TorchrunHandler(torchelastic.RendezvousHandler):
    """Adapts our handler to torchelastic's interface.

    Args:
        handler: takes part in the rendezvous.
        backend: its backend; closed on shutdown.
        store: beneath the backend; closed on shutdown.
        local_addr: the address of this node for its workers; None: its host name.
    """

    def __init__(
        self, handler: RendezvousHandler, backend: StoreBackend, store: Store, local_addr: str | None
    ) -> None:
        self._handler = handler
        self._backend = backend
        self._store = store
        self._local_addr = local_addr

    def get_backend(self) -> str:
        """Name of the backend."""
        return self._handler.get_backend()

    def next_rendezvous(self) -> Any:
        """As :meth:`zmqgrad.elastic.RendezvousHandler.next_rendezvous`, with a store that torch can use."""
        with _torchelastic_errors():
            formed = self._handler.next_rendezvous()
        store = as_torch_store(formed.store)
        info = torchelastic.RendezvousStoreInfo.build(formed.rank, store, self._local_addr)
        return torchelastic.RendezvousInfo(store, formed.rank, formed.world_size, info)

    def is_closed(self) -> bool:
        """Whether no further round begins."""
        return self._handler.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous for all nodes."""
        with _torchelastic_errors():
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round."""
        return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Identifies the job."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes. Returns whether that worked."""
        return self._handler.shutdown()


def create_handler(parameters: Any) -> TorchrunHandler:
    """Create a handler from torchelastic's ``RendezvousParameters``.

    ``--rdzv-conf`` accepts ``join_timeout``, ``last_call_timeout``, ``close_timeout``, ``heartbeat_timeout``,
    ``keep_alive_interval``, ``read_timeout`` (seconds), ``keep_alive_max_attempt`` and ``is_host``.

    Raises:
        ConfigurationError: if a parameter is invalid.
        torchelastic.RendezvousConnectionError: if the endpoint cannot be used.
    """

    def seconds(name: str, default: float) -> float:
        try:
            return float(parameters.get(name, default))
        except ValueError as e:
            raise errors.ConfigurationError(f"--rdzv-conf {name} must be a number of seconds: {e}") from e

    default = RendezvousTimeout()
    settings = RendezvousSettings(
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        RendezvousTimeout(
            seconds("join_timeout", default.join),
            seconds("last_call_timeout", default.last_call),
            seconds("close_timeout", default.close),
            seconds("heartbeat_timeout", default.heartbeat),
        ),
        seconds("keep_alive_interval", 5.0),
        int(parameters.get_as_int("keep_alive_max_attempt", 3) or 0),
    )
    with _torchelastic_errors():
        store = open_endpoint(
            parameters.endpoint,
            seconds("read_timeout", STORE_TIMEOUT_SECONDS),
            parameters.get_as_bool("is_host"),
        )
        backend = StoreBackend(store, settings.run_id)
    handler = RendezvousHandler(settings, backend, store, _nodes.generate(parameters.local_addr))
    return TorchrunHandler(handler, backend, store, parameters.local_addr)


def rendezvous_backend() -> Callable[[Any], TorchrunHandler]:
    """The entry point: returns the function that creates handlers."""
    return create_handler
