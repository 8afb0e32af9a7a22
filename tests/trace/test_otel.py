"""Spans of OpenTelemetry that cross workers, seen by the SDK's in-memory exporter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.waiting import eventually
from zmqgrad import autograd, rpc
from zmqgrad.errors import GroupError, PayloadError
from zmqgrad.testing import cluster

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from zmqgrad.trace import otel

Finished = Callable[[int], list[ReadableSpan]]


@pytest.fixture
def finished() -> Iterator[Finished]:
    """Waits until so many spans have ended, and returns them in the order of their start."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(provider)

    def wait(count: int) -> list[ReadableSpan]:
        spans = eventually(exporter.get_finished_spans, lambda spans: len(spans) >= count)
        return sorted(spans, key=lambda span: span.start_time or 0)

    yield wait
    otel.uninstrument()
    provider.shutdown()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def relay(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync("worker2", double, args=(x,))
    return result


def refuse() -> None:
    raise ValueError("refused")


def links(spans: list[ReadableSpan]) -> list[tuple[str, SpanKind, Any]]:
    """Name, kind, and the index of the parent of each span."""
    numbers = {span.context.span_id: i for i, span in enumerate(spans)}
    return [(s.name, s.kind, numbers.get(s.parent.span_id) if s.parent else None) for s in spans]


def test_a_nested_call_is_one_trace_over_three_workers(finished: Finished) -> None:
    with cluster(3):
        rpc.rpc_sync("worker1", relay, args=(torch.ones(2),))
        spans = finished(4)
    module = __name__
    assert links(spans) == [
        ("relay", SpanKind.CLIENT, None),
        (f"{module}:relay", SpanKind.SERVER, 0),
        ("double", SpanKind.CLIENT, 1),
        (f"{module}:double", SpanKind.SERVER, 2),
    ]
    assert len({span.context.trace_id for span in spans}) == 1
    assert dict(spans[2].attributes or {}) == {
        "rpc.system": "zmqgrad",
        "rpc.method": "double",
        "rpc.service": "worker2",
        "zmqgrad.caller": "worker1",
        "zmqgrad.callee": "worker2",
    }


def test_calls_are_children_of_the_programs_own_span(finished: Finished) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    with cluster(2), provider.get_tracer("test").start_as_current_span("step") as step:
        rpc.rpc_async("worker1", double, args=(torch.ones(2),)).wait()
        rpc.remote("worker1", double, args=(torch.ones(2),)).to_here()
        spans = finished(4)
        assert trace.get_current_span() is step
    assert [s.parent.span_id for s in spans if s.kind is SpanKind.CLIENT and s.parent] == [
        step.get_span_context().span_id
    ] * 2
    assert len({span.context.trace_id for span in spans}) == 1
    provider.shutdown()


def test_a_group_call_is_one_span_above_its_calls(finished: Finished) -> None:
    with cluster(3):
        group = rpc.group("worker*")
        group.call(double, (torch.ones(2),))
        spans = finished(7)
        assert links(spans)[0] == ("double on 3 workers", SpanKind.INTERNAL, None)
        assert [parent for _, kind, parent in links(spans) if kind is SpanKind.CLIENT] == [0] * 3
        assert (spans[0].attributes or {})["zmqgrad.members"] == 3
        assert spans[0].end_time >= max(span.end_time for span in spans if span.kind is SpanKind.CLIENT)
        future = group.call_async(refuse)
        with pytest.raises(GroupError):
            future.wait()
        spans = finished(14)[7:]
    assert [parent for _, kind, parent in links(spans) if kind is SpanKind.CLIENT] == [0] * 3
    assert spans[0].status.status_code is StatusCode.ERROR
    assert "refused" in (spans[0].status.description or "")
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_group_call_that_cannot_be_sent_ends_its_span(finished: Finished) -> None:
    with cluster(2):
        with pytest.raises(PayloadError):
            rpc.group("worker*").call(double, (threading.Lock(),))
        (span,) = finished(1)
    assert (span.name, span.status.status_code) == ("double on 2 workers", StatusCode.ERROR)


def test_a_failure_marks_the_spans_of_both_ends(finished: Finished) -> None:
    with cluster(2):
        with pytest.raises(ValueError, match="refused"):
            rpc.rpc_sync("worker1", refuse)
        client, server = finished(2)
    assert client.status.status_code is server.status.status_code is StatusCode.ERROR
    assert "refused" in (client.status.description or "")
    assert [event.name for event in server.events] == ["exception"]


def test_calls_inside_an_autograd_context_have_spans(finished: Finished) -> None:
    with cluster(2):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("worker1", double, args=(x,)).sum()])
            assert autograd.get_gradients(context)[x].tolist() == [2.0] * 3
        spans = finished(2)
    assert [kind for _, kind, _ in links(spans)] == [SpanKind.CLIENT, SpanKind.SERVER]


def test_a_call_that_cannot_be_sent_ends_its_span(finished: Finished) -> None:
    with cluster(2) as workers:
        workers.workers[1].close()
        with pytest.raises((RuntimeError, OSError)):
            rpc.rpc_sync("worker1", double, args=(torch.ones(2),), timeout=0.5)
        (span,) = finished(1)
    assert span.status.status_code is StatusCode.ERROR
