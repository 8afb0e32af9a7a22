"""The store that the nodes of one round share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from zmqgrad.elastic.operators import Action, Context, Operator
from zmqgrad.errors import RendezvousConnectionError, StoreError, TransportError
from zmqgrad.store import PrefixStore, Store, TCPStore


class RoundStores(ABC):
    """Opens the store of each round."""

    are_served = False
    """Whether rank 0 serves the store of each round, and publishes its address."""

    serves_now = False
    """Whether this process serves the store that was opened last, so that others need it to live."""

    def serve(self) -> str:
        """Serve the store of the next round, as its rank 0. Returns the address to publish.

        Raises:
            RendezvousConnectionError: if it cannot be served.
        """
        raise NotImplementedError

    @abstractmethod
    def open(self, run_id: str, number: int, address: str, timeout: float) -> Store:
        """Open the store of round ``number``, at the address that rank 0 has published.

        Args:
            run_id: id of the job.
            number: sequence number of the round.
            address: what rank 0 got from :meth:`serve`.
            timeout: seconds that connecting may take.

        Returns:
            the store, which the caller closes.

        Raises:
            RendezvousConnectionError: if it cannot be opened.
        """

    def close(self) -> None:  # noqa: B027  # stores of others stay open
        """Close the stores that this object has opened. Idempotent."""


class SharedStore(RoundStores):
    """Gives each round a prefix of ``store``, which outlives all of them and is not closed here."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(self, run_id: str, number: int, address: str, timeout: float) -> Store:
        return PrefixStore(f"zmqgrad/rendezvous/{run_id}/{number}", self._store)


class ServedByRankZero(RoundStores):
    """Gives each round a store that its rank 0 serves: the loss of any host ends one round at most.

    The store of a round stays open until that of the next one is open, because the other nodes may use it
    until they notice that the round is over.

    Args:
        host: the name or address of this host for the other nodes.
        timeout: of the calls of the stores, in seconds.
    """

    are_served = True

    def __init__(self, host: str, timeout: float) -> None:
        self._host = host
        self._timeout = timeout
        self._served: TCPStore | None = None
        self._opened: TCPStore | None = None

    def serve(self) -> str:
        self._close(self._served)
        try:
            self._served = TCPStore(
                self._host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        except (StoreError, TransportError) as e:
            raise RendezvousConnectionError(f"rank 0 cannot serve a store at {self._host}: {e}") from e
        return f"{self._host}:{self._served.port}"

    def open(self, run_id: str, number: int, address: str, timeout: float) -> Store:
        served, self._served = self._served, None
        self.serves_now = served is not None and address == f"{self._host}:{served.port}"
        if served is not None and self.serves_now:
            store = served
        else:
            self._close(served)  # of a round that was lost before its store was opened
            store = self._connect(number, address, timeout)
        self._close(self._opened)
        self._opened = store
        return store

    def _connect(self, number: int, address: str, timeout: float) -> TCPStore:
        host, _, port = address.rpartition(":")
        try:
            store = TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)
        except (StoreError, TransportError) as e:
            raise RendezvousConnectionError(
                f"the store of round {number}, which rank 0 serves at {address}, cannot be used: {e}"
            ) from e
        store.set_timeout(self._timeout)
        store.expect_no_restart()  # rank 0 serves it as long as it takes part in the round
        return store

    def _close(self, store: TCPStore | None) -> None:
        if store is not None:
            store.close()

    def close(self) -> None:
        self._close(self._served)
        self._close(self._opened)
        self._served = self._opened = None
        self.serves_now = False


def await_address(number: int) -> Operator:
    """An operator that waits until rank 0 has published the store of round ``number``, or is lost."""

    def operator(context: Context, deadline: float) -> Action:
        state = context.state
        if state.store_address or not is_intact(context, number):
            return Action.FINISH
        if context.now > deadline:
            return Action.ERROR_TIMEOUT
        return Action.KEEP_ALIVE if context.must_keep_alive else Action.SYNC

    return operator


def is_intact(context: Context, number: int) -> bool:
    """Whether round ``number`` is still complete, and has this node and its rank 0."""
    state = context.state
    return (
        state.complete
        and state.round == number
        and context.is_participant
        and any(rank == 0 for rank in state.participants.values())
    )
