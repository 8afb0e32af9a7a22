"""How the workers of a group of fixed size meet: each publishes a record in the store, and reads all others.

What the store holds, under a prefix of the group:

    name/<name>, rank/<id>   who has it: the first to say so. Two workers of one name or rank are refused
    worker/<id>              the records; where a worker was refused, why

Whoever waits for the others waits in one query for all records, and is told who has not come.
"""

from __future__ import annotations

import logging

import msgspec

from zmqgrad.errors import DuplicateWorkerError, RendezvousTimeoutError, StoreError, StoreTimeoutError
from zmqgrad.rpc.membership.membership import Membership
from zmqgrad.rpc.membership.worker_info import WorkerRecord
from zmqgrad.runtime.clock import Deadline
from zmqgrad.store import Store

logger = logging.getLogger(__name__)

REFUSED = "!"
"""What a worker that was refused publishes instead of its record, before it says why."""

LOOK_SECONDS = 1.0
"""While workers are waited for, who is missing is looked up so often."""


def claim(membership: Membership, store: Store) -> None:
    """Take name and rank of this worker, and publish its record.

    Raises:
        DuplicateWorkerError: if another worker has either.
    """
    own = membership.own
    mine = f"{own.id}/{own.incarnation}"
    for key, what in ((f"name/{own.name}", f"name {own.name!r}"), (f"rank/{own.id}", f"rank {own.id}")):
        holder = store.compare_set(key, "", mine).decode()
        if holder != mine:
            said = (
                f"{what} is not unique: another worker already has it (worker {holder.split('/')[0]}); "
                f"give each of the {membership.world_size} workers a name and rank of its own"
            )
            if not store.check([f"rank/{own.id}"]):
                store.set(f"worker/{own.id}", REFUSED + said)  # nobody else will come for this rank
            raise DuplicateWorkerError(said)
    store.set(f"worker/{own.id}", msgspec.json.encode(own))


def withdraw(membership: Membership, store: Store) -> None:
    """Take back what :func:`claim` took, so that this process may try again at the same store."""
    own = membership.own
    mine = f"{own.id}/{own.incarnation}".encode()
    try:
        store.set_timeout(LOOK_SECONDS)  # it may not answer any more
        for key in (f"name/{own.name}", f"rank/{own.id}"):
            if store.check([key]) and store.get(key) == mine:
                if key.startswith("rank/"):
                    store.delete_key(f"worker/{own.id}")
                store.delete_key(key)
    except StoreError as e:  # it is gone, and with it what it held
        logger.debug("%s: nothing to take back: %s", own.name, e)


def meet(membership: Membership, store: Store, deadline: Deadline) -> None:
    """Wait until all workers have published, and learn their records.

    Raises:
        RendezvousTimeoutError: naming the ranks that did not come.
        DuplicateWorkerError: if one of them was refused, so that the group will never be whole.
    """
    keys = [f"worker/{i}" for i in range(membership.world_size)]
    missing = [i for i in range(membership.world_size) if i != membership.own.id]
    while True:
        try:
            # One query waits and reads. Between two, whoever has met all might be gone, store and all.
            records = read_all(store, keys, min(deadline.left(), LOOK_SECONDS))
            break
        except StoreTimeoutError as e:
            missing = _absent(store, keys, missing)
            if deadline.passed():
                raise _did_not_come(membership, missing) from e
        except StoreError as e:  # rank 0 gave up before us, and took its store along
            raise _did_not_come(membership, missing) from e
    for raw in records:
        if raw.startswith(REFUSED.encode()):
            raise DuplicateWorkerError(raw.decode().removeprefix(REFUSED))
        membership.learn(msgspec.json.decode(raw, type=WorkerRecord))


def _did_not_come(membership: Membership, ranks: list[int]) -> RendezvousTimeoutError:
    return RendezvousTimeoutError(
        f"{membership.own.name}: of {membership.world_size} workers, these ranks did not come in time: "
        f"{ranks}; start them with the same MASTER_ADDR, MASTER_PORT and world size, or allow more time"
    )


def _absent(store: Store, keys: list[str], before: list[int]) -> list[int]:
    """The numbers of those ``keys`` that are not there; as ``before`` if the store has gone meanwhile."""
    try:
        there = set(store.list_keys("worker/"))
    except StoreError:
        return before
    return [i for i, key in enumerate(keys) if key not in there]


def read_all(store: Store, keys: list[str], seconds: float) -> list[bytes]:
    """The values of ``keys``, once they are there; waits up to ``seconds``."""
    patience = store.timeout
    store.set_timeout(seconds)
    try:
        return store.multi_get(keys)
    finally:
        store.set_timeout(patience)
