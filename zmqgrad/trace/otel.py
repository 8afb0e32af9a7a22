"""Calls as spans of OpenTelemetry, which cross workers: the span at the callee is a child of the caller's.

    from zmqgrad.trace import otel

    otel.instrument()        # in each process, after the tracer provider is set

Needs the extra ``zmqgrad[otel]``, and in the program an SDK with an exporter. The span travels as a
``traceparent`` (W3C Trace Context). Attributes follow the semantic conventions for RPC.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from zmqgrad.transport import tap

_HEADER = "traceparent"
_propagator = TraceContextTextMapPropagator()


class _Open:
    """A span that has not ended."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, error: str) -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Outgoing(_Open):
    """As :class:`~zmqgrad.transport.tap.OutgoingSpan`."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get(_HEADER, "")  # empty: without an SDK, no span is valid


class _Group(_Open):
    """As :class:`~zmqgrad.transport.tap.GroupSpan`."""

    def parent(self) -> AbstractContextManager[object]:
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)


class _Spans:
    """As :class:`~zmqgrad.transport.tap.Spans`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def call(self, function: str, caller: str, callee: str) -> tap.OutgoingSpan:
        attributes = _attributes(function, caller, callee)
        return _Outgoing(self._tracer.start_span(function, kind=SpanKind.CLIENT, attributes=attributes))

    def group(self, function: str, caller: str, members: int) -> tap.GroupSpan:
        attributes = {"rpc.system": "zmqgrad", "rpc.method": function, "zmqgrad.caller": caller}
        name = f"{function} on {members} workers"
        return _Group(self._tracer.start_span(name, attributes={**attributes, "zmqgrad.members": members}))

    def serve(
        self, traceparent: str, function: str, caller: str, callee: str
    ) -> AbstractContextManager[object]:
        span: AbstractContextManager[object] = self._tracer.start_as_current_span(
            function,
            context=_propagator.extract({_HEADER: traceparent}),
            kind=SpanKind.SERVER,
            attributes=_attributes(function, caller, callee),
        )
        return span


def _attributes(function: str, caller: str, callee: str) -> dict[str, str]:
    return {
        "rpc.system": "zmqgrad",
        "rpc.method": function,
        "rpc.service": callee,
        "zmqgrad.caller": caller,
        "zmqgrad.callee": callee,
    }


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Makes a span of each call that this process makes or serves, from now on.

    Args:
        tracer_provider: where the spans go; None: OpenTelemetry's global one.

    Example:
        >>> otel.instrument()  # with the provider of the program
        >>> rpc.rpc_sync("worker1", pow, args=(2, 3))
        8
        >>> otel.uninstrument()
    """
    tap.spans = _Spans(trace.get_tracer("zmqgrad", tracer_provider=tracer_provider))


def uninstrument() -> None:
    """Makes no spans any more. Idempotent.

    Example:
        >>> otel.uninstrument()
    """
    tap.spans = None
