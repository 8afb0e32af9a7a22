"""Our elastic rendezvous for torchrun: ``torchrun --rdzv-backend=zmqgrad --rdzv-endpoint=host:port ...``.

torchelastic finds it through :mod:`zmqgrad.interop.torchrun_backends`. ``--rdzv-conf`` accepts what
:func:`zmqgrad.elastic.create_handler` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic import rendezvous as torchelastic

from zmqgrad import errors
from zmqgrad.elastic import RendezvousHandler, create_handler
from zmqgrad.interop.stores import as_torch_store
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import PrefixStore, Store
from zmqgrad.store.arguments import Timeout, seconds_of

_OF_TORCHRUN = ("timeout",)
"""Settings that torchrun adds, for other backends."""

LOOK_SECONDS = 1.0
"""How long one wait for other agents takes at most: a node that died changes nothing in the store."""

_ERRORS: dict[type[Exception], type[Exception]] = {
    errors.RendezvousGracefulExitError: torchelastic.RendezvousGracefulExitError,
    errors.RendezvousClosedError: torchelastic.RendezvousClosedError,
    errors.RendezvousTimeoutError: torchelastic.RendezvousTimeoutError,
    errors.RendezvousStateError: torchelastic.RendezvousStateError,
    errors.RendezvousConnectionError: torchelastic.RendezvousConnectionError,
}
"""What torchelastic's agent expects for each of our errors."""


@contextmanager
def _torchelastic_errors() -> Iterator[None]:
    try:
        yield
    except errors.RendezvousError as e:
        raise _ERRORS.get(type(e), torchelastic.RendezvousError)(str(e)) from e


class RoundStore(PrefixStore):
    """The store of a round, for the agents. Waiting ends with an error once a node of the round is lost.

    That node may have been the one to set the key: torch's exit barrier would wait for it for 300 s.

    Args:
        store: of the round.
        handler: knows the nodes of the round.
    """

    def __init__(self, store: Store, handler: RendezvousHandler) -> None:
        super().__init__("torchrun", store)
        self._handler = handler

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """As :meth:`zmqgrad.store.Store.wait`.

        Raises:
            StoreError: if a key is missing, and a node of the round has left or was lost.
            StoreTimeoutError: if not all keys exist within ``timeout``.
        """
        deadline = Deadline.after(self._timeout if timeout is None else seconds_of(timeout))
        while True:
            lost = self._handler.lost_nodes()
            if lost:  # what they have set before is there by now
                if self.check(keys):
                    return
                names = ", ".join(map(str, lost))
                raise errors.StoreError(f"{', '.join(keys)} may never be set: {names} left or was lost")
            try:
                return super().wait(keys, min(LOOK_SECONDS, deadline.left()))
            except errors.StoreTimeoutError:
                if deadline.passed():
                    raise


class TorchrunHandler(torchelastic.RendezvousHandler):
    """Adapts our handler to torchelastic's interface.

    Args:
        handler: takes part in the rendezvous; closed on shutdown.
        backend: as requested by ``--rdzv-backend``.
        local_addr: the address of this node for its workers; None: its host name.
    """

    def __init__(self, handler: RendezvousHandler, backend: str, local_addr: str | None) -> None:
        self._handler = handler
        self._backend = backend
        self._local_addr = local_addr
        self._has_joined = False

    def get_backend(self) -> str:
        """The name by which torchrun knows the backend."""
        return self._backend

    def next_rendezvous(self) -> Any:
        """As :meth:`zmqgrad.elastic.RendezvousHandler.next_rendezvous`, with a store that torch can use."""
        with _torchelastic_errors():
            formed = self._handler.next_rendezvous()
        self._has_joined = True
        store = as_torch_store(RoundStore(formed.store, self._handler))
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
        """How many nodes wait for the next round; at least 1 if this node itself has to join again.

        So the agent stops its workers when its lease ends, before other nodes may form a group without it.
        """
        waiting = self._handler.num_nodes_waiting()
        must_join_again = self._has_joined and self._handler.lease_left() <= 0
        return max(1, waiting) if must_join_again else waiting

    def get_run_id(self) -> str:
        """Identifies the job."""
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, and leave it. Returns whether closing worked.

        The agent that serves the state leaves last: others would wait for its replies in vain.
        """
        closed = self._handler.shutdown()
        self._handler.close()
        return closed


def create(backend: str, parameters: Any) -> TorchrunHandler:
    """Create a handler from torchelastic's ``RendezvousParameters``.

    Raises:
        ConfigurationError: if a parameter is invalid.
        torchelastic.RendezvousConnectionError: if the endpoint cannot be used.
    """
    conf = {name: value for name, value in parameters.config.items() if name not in _OF_TORCHRUN}
    with _torchelastic_errors():
        handler = create_handler(
            backend,
            parameters.endpoint,
            parameters.run_id,
            parameters.min_nodes,
            parameters.max_nodes,
            local_addr=parameters.local_addr,
            **conf,
        )
    return TorchrunHandler(handler, parameters.backend, parameters.local_addr)
