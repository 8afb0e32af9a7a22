"""Counters for Prometheus: of workers in one process, beside a trace, and over HTTP."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import TraceError
from zmqgrad.rpc.membership.membership import LEFT
from zmqgrad.testing import cluster
from zmqgrad.trace import Job, record
from zmqgrad.transport import tap
from zmqgrad.wire.messages import MessageType

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from zmqgrad.trace import prometheus


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def refuse() -> None:
    raise ValueError("refused")


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    yield prometheus.count()
    prometheus.stop()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_messages_bytes_and_latencies_are_counted(registry: CollectorRegistry) -> None:
    with cluster(2):
        for _ in range(5):
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
        for direction, worker in (("sent", "worker0"), ("received", "worker1")):
            labels = {"worker": worker, "type": "CALL", "direction": direction}
            assert value(registry, "zmqgrad_messages_total", **labels) == 5
            assert value(registry, "zmqgrad_message_bytes_total", **labels)
        latency = {"worker": "worker0", "type": "CALL"}
        assert value(registry, "zmqgrad_request_seconds_count", **latency) == 5
        assert value(registry, "zmqgrad_request_seconds_sum", **latency)


def test_counting_again_in_a_registry_goes_on() -> None:
    registry, sent = CollectorRegistry(), {"worker": "worker0", "type": "CALL", "direction": "sent"}
    with cluster(2):
        for _ in range(2):
            with prometheus.serve(0, registry=registry):
                rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))  # not counted
    assert value(registry, "zmqgrad_messages_total", **sent) == 2
    assert value(registry, "zmqgrad_requests_running", worker="worker1") == 0
    known = weakref.ref(registry)
    del registry
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("same", [False, True])
def test_closing_an_endpoint_does_not_stop_the_next_one(same: bool) -> None:
    registry, sent = CollectorRegistry(), {"worker": "worker0", "type": "CALL", "direction": "sent"}
    with cluster(2):
        before = prometheus.serve(0, registry=registry if same else None)
        with prometheus.serve(0, registry=registry):
            before.close()
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
    assert value(registry, "zmqgrad_messages_total", **sent) == 1
    assert tap.active() is None


def test_a_port_that_cannot_be_is_an_error_of_the_trace() -> None:
    with pytest.raises(TraceError, match=r"cannot serve counters at .*:70000: "):
        prometheus.serve(70000)


def test_gradients_leave_no_request_queued(registry: CollectorRegistry) -> None:
    with cluster(2):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", double, args=(x,)).sum()])
        for worker in ("worker0", "worker1"):
            assert value(registry, "zmqgrad_requests_queued", worker=worker) == 0
    sent = {"worker": "worker0", "type": "BACKWARD_AUTOGRAD_REQ", "direction": "sent"}
    assert value(registry, "zmqgrad_messages_total", **sent) == 1
    assert value(registry, "zmqgrad_requests_running", worker="worker1") == 0


def test_failures_are_counted(registry: CollectorRegistry) -> None:
    with cluster(2):
        with pytest.raises(ValueError, match="refused"):
            rpc.rpc_sync("worker1", refuse)
        rpc.rpc_sync("worker1", double, args=(torch.ones(1),))  # after it, the first has surely finished
    assert value(registry, "zmqgrad_requests_failed_total", worker="worker1") == 1


def test_a_worker_that_leaves_is_not_lost(registry: CollectorRegistry) -> None:
    with cluster(3) as made:
        worker = made.workers[0]
        worker.lose(1, LEFT)
        worker.lose(2, "its process has ended")
        eventually(lambda: worker.lost.keys() == {1, 2})
        eventually(lambda: value(registry, "zmqgrad_peers_lost_total", worker="worker0") == 1)


def test_a_trace_is_recorded_beside_the_counters(tmp_path: Path) -> None:
    with record(tmp_path):
        registry = prometheus.count()
        with cluster(2):
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
        prometheus.stop()
    assert value(registry, "zmqgrad_messages_total", worker="worker0", type="CALL", direction="sent")
    calls = [c for c in Job(tmp_path).calls() if c.request.type == "CALL"]
    assert any(c.is_complete and c.started is not None for c in calls)


def attached() -> Any:
    active = tap.active()
    assert active is not None
    return active.attach(tap.Identity(tap.WORKER, "worker0"))


def send(tracer: Any, number: int) -> None:
    tracer.tap(True, 1, (int(MessageType.CALL), 0, 0, number), SimpleNamespace(TYPE=MessageType.CALL), 9, 100)


def test_counters_go_on_while_a_part_is_recorded(tmp_path: Path, registry: CollectorRegistry) -> None:
    with cluster(2):
        with record(tmp_path):
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
        rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
    sent = {"worker": "worker0", "type": "CALL", "direction": "sent"}
    assert value(registry, "zmqgrad_messages_total", **sent) == 2
    assert [call.request.type for call in Job(tmp_path).calls()].count("CALL") == 1


def test_a_reply_that_is_read_before_its_request_is_noted_is_counted(registry: CollectorRegistry) -> None:
    tracer, kind = attached(), MessageType.RESULT
    tracer.tap(False, 1, (int(kind), 0, 0, 7), SimpleNamespace(TYPE=kind, is_awaited_by=bool), 9, 1_000_100)
    send(tracer, 7)
    latency = {"worker": "worker0", "type": "CALL"}
    assert value(registry, "zmqgrad_request_seconds_count", **latency) == 1
    assert value(registry, "zmqgrad_request_seconds_sum", **latency) == 1e-3


def test_requests_that_get_no_reply_are_forgotten_beside_other_threads(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "MAX_OPEN", 10)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        tracer = attached()

        def send_many(first: int) -> None:
            for number in range(first, first + 20_000):
                send(tracer, number)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send_many, range(0, 400_000, 100_000)))
    finally:
        sys.setswitchinterval(interval)


def test_the_counters_are_served_as_text() -> None:
    with prometheus.serve(0) as endpoint:
        with cluster(2):
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),))
            with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as reply:
                text = reply.read().decode()
        with pytest.raises(TraceError, match=r"cannot serve counters at 127\.0\.0\.1:"):
            prometheus.serve(endpoint.port)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {"zmqgrad_messages", "zmqgrad_request_seconds", "zmqgrad_requests_queued"} <= families.keys()
    assert families["zmqgrad_peers_lost"].samples[0].value == 0
