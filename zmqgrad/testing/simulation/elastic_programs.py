"""Drawn programs of elastic rendezvous: nodes join rounds, leave them, and come back, or die.

On one host, processes take turns to serve the state; of two hosts, worker 0 serves it to the end. In each
round, nodes write who has which rank into its store, and read who else is there.
"""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from zmqgrad.elastic import RendezvousHandler, create_handler
from zmqgrad.elastic.endpoint import open_endpoint
from zmqgrad.errors import RendezvousClosedError, RendezvousError, StoreError
from zmqgrad.rendezvous import rendezvous
from zmqgrad.store import Store, TCPStore
from zmqgrad.testing.simulation.programs import HOSTS, PATIENCE, SEED

ENDPOINT = "host0:29400"
DONE_PORT = 29500
JOIN_SECONDS = 20.0
"""How long a node waits for a round."""

LIVES, ROUNDS = 3, 3
"""How often a node joins, and how many rounds it takes part in each time, at most."""


@dataclass
class Stay:
    """One time that this node wanted to take part in a round, from when to when.

    Attributes:
        joined: when it was told its rank.
        store: an id that all nodes of the round have found in its store.
        error: why it did not take part, or not to the end.
        least: how many nodes a round needs.
    """

    began: float
    joined: float = math.inf
    ended: float = math.inf
    rank: int = -1
    size: int = 0
    store: str = ""
    error: str = ""
    least: int = 1


stays: list[Stay] = []


def program(rank: int) -> None:
    """Runs node ``rank``."""
    plan, rng = random.Random(os.environ[SEED]), random.Random(f"{os.environ[SEED]}/{rank}")
    least, by_url = plan.choice((1, 1, 2)), plan.random() < 0.5
    size = int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = {"last_call_timeout": 0.3, "keep_alive_interval": 0.5}
    with ExitStack() as stack:
        if rank == 0 and os.environ[HOSTS] > "1":
            stack.callback(open_endpoint(ENDPOINT, JOIN_SECONDS, is_host=True).close)
        # What a process left open for others to use ends with it: so none ends before all are done.
        done = stack.enter_context(TCPStore("host0", DONE_PORT, is_master=rank == 0, timeout=PATIENCE))
        for _ in range(rng.randrange(1, LIVES + 1)):
            time.sleep(rng.random() * rng.choice((0.01, 0.5)))
            _stay_once(rng, least, settings) if by_url else _stay_for_rounds(rng, least, settings)
        with suppress(StoreError):
            done.set(f"done/{rank}", "")
            done.wait([f"done/{other}" for other in range(size)], LIVES * (JOIN_SECONDS + PATIENCE))
        with suppress(RendezvousError):
            open_endpoint(ENDPOINT, 0.1, is_host=False).close()  # what this process has left open


def _stay_once(rng: random.Random, least: int, settings: dict[str, Any]) -> None:
    """Takes part in a round by a URL, and leaves by closing its store."""
    options = "".join(f"&{name}={value}" for name, value in settings.items())
    url = f"elastic://{ENDPOINT}?run_id=job&min_nodes={least}&max_nodes=4{options}"
    stay = Stay(time.monotonic(), least=least)
    stays.append(stay)
    try:
        store, stay.rank, stay.size = next(iter(rendezvous(url, timeout=JOIN_SECONDS)))
        stay.joined = time.monotonic()
        try:
            _meet(store, stay)
            time.sleep(rng.random() * 0.5)
        finally:
            store.close()
    except (RendezvousError, StoreError) as e:
        stay.error = repr(e)
    stay.ended = time.monotonic()


def _stay_for_rounds(rng: random.Random, least: int, settings: dict[str, Any]) -> None:
    """Takes part in rounds as an agent does: in the next one when a node waits for it or has left."""
    began = time.monotonic()
    try:
        handler = create_handler(
            "zmqgrad", ENDPOINT, "job", least, 4, join_timeout=JOIN_SECONDS, read_timeout=10.0, **settings
        )
    except RendezvousError as e:
        stays.append(Stay(began, ended=time.monotonic(), error=repr(e)))
        return
    try:
        for _ in range(rng.randrange(1, ROUNDS + 1)):
            if not _take_part(handler, rng, least):
                break
    finally:
        try:
            handler.close()
        except (RendezvousError, StoreError) as e:
            stays[-1].error = stays[-1].error or repr(e)
        stays[-1].ended = time.monotonic()


def _take_part(handler: RendezvousHandler, rng: random.Random, least: int) -> bool:
    """Takes part in one round. Returns whether to join the next one."""
    stay = Stay(time.monotonic(), least=least)
    stays.append(stay)
    try:
        while True:
            try:
                formed = handler.next_rendezvous()
                break
            except RendezvousClosedError:
                if handler.is_retired():
                    return False
                raise
        stay.joined, stay.rank, stay.size = time.monotonic(), formed.rank, formed.world_size
        formed.store.set_timeout(5.0)
        _meet(formed.store, stay)
        until = time.monotonic() + rng.random() * 3
        while time.monotonic() < until and not (handler.num_nodes_waiting() or handler.lost_nodes()):
            handler.wait_for_change(max(0.0, until - time.monotonic()))
        if rng.random() < 0.3:
            handler.leave()
    except (RendezvousError, StoreError) as e:
        stay.error = repr(e)
        return False
    finally:
        stay.ended = time.monotonic()
    return True


def _meet(store: Store, stay: Stay) -> None:
    """Notes in the store of a round who has which rank, and waits for the others."""
    own = f"{os.getpid()}/{len(stays)}"
    stay.store = store.compare_set("id", "", own).decode()
    holder = store.compare_set(f"rank/{stay.rank}", "", own).decode()
    if holder != own:
        raise AssertionError(f"{holder} and {own} have rank {stay.rank} of one round")
    store.wait([f"rank/{rank}" for rank in range(stay.size)])
