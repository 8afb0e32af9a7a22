"""What stores do: one process serves, the others ask."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from tools.bench.processes import Place
from tools.bench.sides import take
from tools.bench.timing import Budget

CLIENTS = 4
"""How many ask at once where several do."""

ADDS = 1000
WAKES = 50
PROCESSES = 1 + CLIENTS
VALUE = b"v" * 64

QUESTIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    # Not set alone: torch's does not wait for its answer, and a thousand of them would wait for one get.
    "store_set_get": ("set a value of 64 bytes, and get it", lambda s: (s.set("key", VALUE), s.get("key"))),
    "store_get": ("get a value of 64 bytes", lambda s: s.get("key")),
    "store_get_cached": ("get a value that is watched (torch: get it)", lambda s: _get_cached(s, "key")),
    "store_get_1MB": ("get a value of 1 MB", lambda s: s.get("large")),
    "store_add": ("add to a counter", lambda s: s.add("counter", 1)),
    "store_compare_set": ("compare and set", lambda s: s.compare_set("compared", "a", "a")),
    "store_check": ("do two keys exist?", lambda s: s.check(["key", "large"])),
    "store_multi_get": (
        "get a hundred values at once",
        lambda s: s.multi_get([f"key{n}" for n in range(100)]),
    ),
}
TOGETHER = {
    "store_connect": "connect a client",
    "store_add_together": f"one add, of {CLIENTS} clients that add at once",
    "store_wake": "from set to the end of another client's wait",
    "store_watch": "from set to another client's callback (torch has none)",
}
AS_ROUND_TRIPS = {"store_get", "store_add", "store_compare_set", "store_check", "store_watch"}
"""Those that go there and back, and no more."""


def run_store(place: Place, side_name: str, port: int, names: list[str], budget: Budget) -> dict[str, float]:
    """In each process, the first of which serves: seconds of those of ``names`` that it can tell."""
    side = take(side_name)

    def connect(serve: bool = False) -> Any:
        return side.store.TCPStore(
            "127.0.0.1", port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    server = connect(serve=True) if place.rank == 0 else None
    place.together()
    store = server or connect()
    found: dict[str, float] = {}
    if place.rank == 1:
        for n in range(100):
            store.set(f"key{n}", VALUE)
        store.set("key", VALUE)
        store.set("large", b"v" * (1 << 20))
        for name, (_, ask) in QUESTIONS.items():
            if name in names:
                place.say(name)
                found[name] = budget.median(lambda ask=ask: ask(store))  # type: ignore[misc]
        if "store_connect" in names:
            place.say("store_connect")
            found["store_connect"] = budget.median(lambda: _close(connect()))
    began = place.together()
    if "store_add_together" in names and place.rank > 0:
        for _ in range(ADDS):
            store.add("total", 1)
        found["store_add_together"] = (time.perf_counter() - began) / (ADDS * CLIENTS)
    place.together()
    if "store_wake" in names and place.rank in (1, 2):
        found.update(_wake(store, place.rank == 1))
    place.together()
    if "store_watch" in names and place.rank in (1, 2) and hasattr(store, "watch_key"):
        found.update(_watch(store, place.rank == 1))
    place.together()
    return found


def _get_cached(store: Any, key: str) -> object:
    return store.get_cached(key) if hasattr(store, "get_cached") else store.get(key)


def _watch(store: Any, watches: bool) -> dict[str, float]:
    """One is called back, the other sets, a while after the last time."""
    if watches:
        late: SimpleQueue[float] = SimpleQueue()
        store.watch_key("watched", lambda old, new: late.put(time.monotonic() - float(new)))
        store.set("watching", b"")
        return {"store_watch": statistics.median([late.get(timeout=60) for _ in range(WAKES)])}
    store.wait(["watching"])
    for _ in range(WAKES):
        time.sleep(0.003)
        store.set("watched", repr(time.monotonic()))
    return {}


def _close(store: Any) -> None:
    """Torch's closes with its last reference; ours as well, but not at once."""
    if hasattr(store, "close"):
        store.close()


def _wake(store: Any, waits: bool) -> dict[str, float]:
    """One waits for keys, the other sets them, once the wait is surely there; the clock is the host's."""
    late = []
    for n in range(WAKES):
        if waits:
            store.set(f"armed{n}", b"")
            store.wait([f"bell{n}"])
            now = time.monotonic()
            late.append(now - float(store.get(f"bell{n}")))
        else:
            store.wait([f"armed{n}"])
            time.sleep(0.003)
            store.set(f"bell{n}", repr(time.monotonic()))
    return {"store_wake": statistics.median(late)} if waits else {}
