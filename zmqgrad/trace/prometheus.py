"""Counters of this process for Prometheus, as text over HTTP or in a registry of the program's own.

    from zmqgrad.trace import prometheus

    server = prometheus.serve(9400)      # http://127.0.0.1:9400/metrics
    rpc.init_rpc(...)

Needs the extra ``zmqgrad[prometheus]``. A trace that is recorded (ZMQGRAD_TRACE) continues beside it.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from zmqgrad.errors import TraceError
from zmqgrad.trace.events import Role
from zmqgrad.trace.kinds import BACKWARD, ONE_WAY, REPEATED, SERVED, type_name
from zmqgrad.transport import tap as tapping
from zmqgrad.transport.tap import Identity, Tapped, Tracer
from zmqgrad.wire.messages import REQUEST, RESPONSE

LATENCY_SECONDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 5.0, 30.0)
"""Bounds of the latency histogram."""

MAX_OPEN = 1 << 16
"""Requests without a reply whose time is kept; the oldest are forgotten (their peer was lost, say)."""

_QUEUED = SERVED | BACKWARD
"""Requests that engine threads serve."""

_UNPAIRED = ONE_WAY | REPEATED


class Metrics:
    """What is counted, in ``registry``, by worker (or what else sends), message type and direction."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        kinds, worker = ("worker", "type", "direction"), ("worker",)
        self.messages = counter("zmqgrad_messages", "Messages sent or received.", kinds)
        self.bytes = counter("zmqgrad_message_bytes", "Bytes of messages sent or received.", kinds)
        self.latency = Histogram(
            "zmqgrad_request_seconds",
            "From sending a request to the arrival of its reply.",
            ("worker", "type"),
            registry=registry,
            buckets=LATENCY_SECONDS,
        )
        self.failed = counter("zmqgrad_requests_failed", "Requests that failed to be served.", worker)
        self.queued = gauge("zmqgrad_requests_queued", "Requests that wait for a thread.", worker)
        self.running = gauge("zmqgrad_requests_running", "Requests that threads serve.", worker)
        self.lost = counter("zmqgrad_peers_lost", "Workers that were declared lost.", worker)


_known: weakref.WeakKeyDictionary[CollectorRegistry, Metrics] = weakref.WeakKeyDictionary()
"""What was counted, by registry, which takes each name only once: counting again goes on from there."""


class Counting:
    """A recorder that counts, and passes everything on to ``inner``, the one that was active before."""

    def __init__(self, metrics: Metrics, inner: tapping.Recorder | None) -> None:
        self._metrics = metrics
        self.inner = inner

    def around(self, inner: tapping.Recorder) -> Counting:
        """Returns one that counts the same, and passes everything on to ``inner``."""
        return Counting(self._metrics, inner)

    def attach(self, identity: Identity) -> Tracer:
        """Returns the tracer of the worker or store ``identity``, which counts its messages."""
        inner = self.inner.attach(identity) if self.inner is not None else None
        return cast("Tracer", _CountingTracer(self._metrics, identity, inner))

    def in_child(self) -> tapping.Recorder | None:
        """As :class:`~zmqgrad.transport.tap.Recorder`: a child has no server, and counts nothing."""
        return self.inner.in_child() if self.inner is not None else None


class _CountingTracer:
    """Implements :class:`~zmqgrad.transport.tap.Tracer`; what it does not count, ``inner`` alone gets."""

    def __init__(self, metrics: Metrics, identity: Identity, inner: Tracer | None) -> None:
        self._inner: Any = inner or _NoTracer()
        self.records_arguments = self._inner.records_arguments
        self.records_heartbeats = self._inner.records_heartbeats
        self.tap = tapping.observer(self._count)
        self._metrics = metrics
        is_worker = identity.role == tapping.WORKER
        self._name = identity.name if is_worker else Role(identity.role).name.lower()
        self._number = identity.number
        self._counters = cache(self._make)
        self._latency = cache(lambda kind: metrics.latency.labels(self._name, type_name(kind)))
        # Kind and time of a request, or of its reply, whichever was first; by peer and message id.
        self._open: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self._queued: set[tuple[int, int]] = set()
        if is_worker:
            metrics.queued.labels(self._name).set_function(lambda: len(self._queued))
        self._running = metrics.running.labels(self._name)
        self._failed = metrics.failed.labels(self._name)
        self._lost = metrics.lost.labels(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self, tapped: Tapped) -> None:
        """Counts a message."""
        kind, outgoing = tapped.envelope.type, tapped.outgoing
        messages, size = self._counters(kind, outgoing)
        messages.inc()
        size.inc(tapped.size)
        self._measure(tapped, (tapped.peer, tapped.envelope.message_id))
        self._inner.tap(*tapped)

    def _make(self, kind: int, outgoing: bool) -> tuple[Any, Any]:
        labels = self._name, type_name(kind), "sent" if outgoing else "received"
        return self._metrics.messages.labels(*labels), self._metrics.bytes.labels(*labels)

    def _measure(self, tapped: Tapped, key: tuple[int, int]) -> None:
        outgoing, message = tapped.outgoing, tapped.message
        kind = message.TYPE
        if kind & (REQUEST if outgoing else RESPONSE) and kind not in _UNPAIRED:
            one = (kind, tapped.time)
            other = self._open.setdefault(key, one)  # atomic: another thread may read the reply just now
            if other is not one:
                self._open.pop(key, None)
                request, reply = (one, other) if outgoing else (other, one)
                self._latency(request[0]).observe((reply[1] - request[1]) / 1e9)
            elif len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        elif not outgoing and kind in _QUEUED and not message.is_awaited_by(self._number):
            self._queued.add(key)  # a coordinator reads the gradients for itself at its own channel

    def request_started(self, peer: int, message_id: int) -> None:
        self._queued.discard((peer, message_id))
        self._running.inc()
        self._inner.request_started(peer, message_id)

    def request_finished(self, peer: int, message_id: int, failed: bool) -> None:
        self._running.dec()
        if failed:
            self._failed.inc()
        self._inner.request_finished(peer, message_id, failed)

    def peer_lost(self, peer: int, reason: str, left: bool = False) -> None:
        self._lost.inc(not left)
        for key in [key for key in list(self._queued) if key[0] == peer]:
            self._queued.discard(key)
        self._inner.peer_lost(peer, reason, left)

    def close(self) -> None:
        self._queued.clear()
        self._open.clear()
        self._inner.close()


class _NoTracer:
    """A tracer that does nothing."""

    records_arguments = records_heartbeats = False

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *_: ""


def count(registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Counts from now on, in ``registry`` (None: a new one), which the program serves itself.

    Workers and stores that exist already are included. Called again, it counts in the new one only. In a
    registry that was counted in before, the counters go on from where they were.

    Returns:
        The registry.

    Example:
        >>> registry = prometheus.count()
        >>> rpc.rpc_sync("worker1", pow, args=(2, 3))
        8
        >>> labels = {"worker": "worker0", "type": "CALL", "direction": "sent"}
        >>> registry.get_sample_value("zmqgrad_messages_total", labels)
        1.0
        >>> prometheus.stop()
    """
    registry = CollectorRegistry() if registry is None else registry
    before = tapping.active()
    inner = before.inner if isinstance(before, Counting) else before
    metrics = _known.get(registry)
    if metrics is None:
        metrics = _known[registry] = Metrics(registry)
    tapping.activate(Counting(metrics, inner))
    return registry


def stop() -> None:
    """Stops counting; a trace that is recorded continues.

    Example:
        >>> registry = prometheus.count()
        >>> prometheus.stop()
    """
    before = tapping.active()
    if isinstance(before, Counting):
        tapping.activate(before.inner)


class Endpoint:
    """An HTTP server of the counters; made by :func:`serve`. Also a context manager."""

    def __init__(
        self, server: WSGIServer, thread: threading.Thread, counting: tapping.Recorder | None
    ) -> None:
        self._server, self._thread, self._counting = server, thread, counting
        self.port = int(server.server_port)

    def close(self) -> None:
        """Stops serving, and counting, unless it was begun anew since, as for another endpoint."""
        if tapping.active() is self._counting:
            stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(port: int, address: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> Endpoint:
    """Counts from now on, and serves the counters at ``http://address:port/metrics``.

    Args:
        port: 0 chooses a free one.
        address: where it listens. Anybody who reaches it can read the counters.
        registry: further counters of the program; None: those of this library alone.

    Returns:
        the endpoint; close it when done.

    Raises:
        TraceError: if it cannot listen there.

    Example:
        >>> endpoint = prometheus.serve(0)  # port 0: the system picks one
        >>> endpoint.close()
    """
    registry = CollectorRegistry() if registry is None else registry
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as e:
        raise TraceError(
            f"cannot serve counters at {address}:{port}: {getattr(e, 'strerror', e) or e}"
        ) from e
    count(registry)
    return Endpoint(server, thread, tapping.active())
