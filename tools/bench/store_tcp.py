"""The store beside bare sockets of libzmq that do as much: over tcp, and by the fast path and ipc.

    python -m tools.bench.store_tcp [--rounds N]

``get``: a value of 64 bytes, beside a DEALER's round trip to a ROUTER that sends back what comes.
``watch``: from a ``set`` in one process to the callback in another, beside a message from a DEALER to a
ROUTER in a process that publishes it by an XPUB to a SUB in another.
Rounds are taken in turn; a figure is the median of their medians.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import secrets
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue

import zmq

from zmqgrad.store import TCPStore

VALUE = b"v" * 64
GETS = 2000
SETS = 300
PAUSE_SECONDS = 0.002
"""Between two notifications: one at a time is on its way."""

LIMIT = timedelta(seconds=60)
MODES = ("tcp", "one host")


def bind(socket: zmq.Socket[bytes], mode: str) -> str:
    """Where ``socket`` listens now."""
    socket.linger = 0
    if mode == "tcp":
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    endpoint = f"ipc://@bench-{secrets.token_hex(8)}"
    socket.bind(endpoint)
    return endpoint


def store_at(port: int, mode: str, serve: bool = False) -> TCPStore:
    """A store that uses the fast path where the mode allows it."""
    return TCPStore("127.0.0.1", port, is_master=serve, timeout=LIMIT, fast_path=mode != "tcp")


def echo(mode: str, pipe: Connection) -> None:
    """A ROUTER that sends back what comes."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        pipe.send(bind(router, mode))
        while True:
            router.send_multipart(router.recv_multipart())


def publish(mode: str, pipe: Connection) -> None:
    """A ROUTER and an XPUB that publishes what comes to it."""
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        context.socket(zmq.XPUB) as publisher,
    ):
        pipe.send((bind(router, mode), bind(publisher, mode)))
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(publisher, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is publisher:
                    publisher.recv()  # a subscription
                else:
                    publisher.send_multipart([b"topic", router.recv_multipart()[1]])


def serve(mode: str, pipe: Connection) -> None:
    """A store's server."""
    store = store_at(0, mode, serve=True)
    pipe.send(store.port)
    pipe.recv()
    store.close()


def watch(mode: str, pipe: Connection) -> None:
    """Says how long each notification took, of the store's or of the bare sockets'."""
    late: SimpleQueue[float] = SimpleQueue()

    def called(old: bytes | None, new: bytes | None) -> None:
        late.put(time.monotonic() - float(new or b"0"))

    port, published = pipe.recv()
    with store_at(port, mode) as store, zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        store.watch_key("watched", called)
        subscriber.connect(published)
        subscriber.subscribe(b"topic")
        pipe.send("ready")
        while (what := pipe.recv()) != "end":
            took = []
            for _ in range(SETS):
                if what == "store":
                    took.append(late.get(timeout=60))
                else:
                    stamp = subscriber.recv_multipart()[1]
                    took.append(time.monotonic() - float(stamp))
            pipe.send(statistics.median(took[10:]))


def measure(mode: str, rounds: int) -> dict[tuple[str, str], float]:
    """Seconds by what was done, and by which side."""
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for part in (echo, publish, serve, watch):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=part, args=(mode, there), daemon=True))
        processes[-1].start()
    echoing, publishing, serving, watching = pipes
    echo_at, (router_at, publisher_at), port = echoing.recv(), publishing.recv(), serving.recv()
    watching.send((port, publisher_at))
    watching.recv()
    found: dict[tuple[str, str], list[float]] = {}
    with (
        store_at(port, mode) as store,
        zmq.Context() as zcontext,
        zcontext.socket(zmq.DEALER) as asker,
        zcontext.socket(zmq.DEALER) as setter,
    ):
        asker.connect(echo_at)
        setter.connect(router_at)
        store.set("key", VALUE)

        def bare_get() -> None:
            asker.send(VALUE)
            asker.recv()

        for _ in range(rounds):
            for side, get in (("store", lambda: store.get("key")), ("bare", bare_get)):
                took = []
                for _ in range(GETS):
                    began = time.perf_counter()
                    get()
                    took.append(time.perf_counter() - began)
                found.setdefault(("get", side), []).append(statistics.median(took))
                watching.send(side)
                for _ in range(SETS):
                    time.sleep(PAUSE_SECONDS)
                    stamp = repr(time.monotonic()).encode()
                    if side == "store":
                        store.set("watched", stamp)
                    else:
                        setter.send(stamp)
                found.setdefault(("watch", side), []).append(watching.recv())
        watching.send("end")
    for process in processes:
        process.kill()
        process.join()
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{'':18}{'store us':>10}{'bare us':>10}{'ratio':>8}")
    for mode in MODES:
        found = measure(mode, rounds)
        for what in ("get", "watch"):
            ours, bare = (found[what, side] * 1e6 for side in ("store", "bare"))
            print(f"{what + ', ' + mode:18}{ours:10.1f}{bare:10.1f}{ours / bare:8.2f}", flush=True)


if __name__ == "__main__":
    main()
