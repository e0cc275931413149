"""OpenTelemetry traces over OTLP/HTTP in JSON, enabled by OTEL_* variables; routers and simulated workers create spans with it.

No OpenTelemetry package is imported, and nothing is measured, unless an endpoint is set.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.core.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = get_logger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED_PROTOCOLS: Final = ("http/protobuf", "http/json")
"""Values of OTEL_EXPORTER_OTLP_PROTOCOL that are accepted; collectors take both at one address. JSON is sent, because
the protobuf exporter has files in common with xds-protos, so that installing one would overwrite the other's."""
_CLOSE_S: Final = 3.0
"""Maximum wall-clock seconds to send the last spans. Chosen: a collector answers within milliseconds, and a pod's
shutdown must not wait for one that does not answer."""
_POLL_S: Final = 0.02

Attributes = Mapping[str, str | int | float | bool]
"""Attributes of a span."""


_PARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{1,64})?"
)
_STATE_KEY: Final = rb"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_STATE_MEMBER: Final = re.compile(rb"(%b)=[ -+\--<>-~]{0,255}[!-+\--<>-~]" % _STATE_KEY)
_MAX_STATE_MEMBERS: Final = 32
_MAX_STATE_BYTES: Final = 512
"""Maximum length of tracestate in bytes: the recommendation requires propagating at least this much; longer headers
are dropped."""


def trace_context(headers: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the well-formed trace headers of a request; malformed ones are dropped, since other processes would log and forward them.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/.
    """
    parent, state = headers.get(b"traceparent"), headers.get(b"tracestate")
    if parent is None or not _PARENT.fullmatch(parent):
        return ()
    found = ((b"traceparent", parent),)
    return found if state is None or not _is_state(state) else (*found, (b"tracestate", state))


def _is_state(state: bytes) -> bool:
    if len(state) > _MAX_STATE_BYTES:
        return False
    members = [member for each in state.split(b",") if (member := each.strip(b" \t"))]
    keys = {match[1] for each in members if (match := _STATE_MEMBER.fullmatch(each))}
    return len(members) <= _MAX_STATE_MEMBERS and len(keys) == len(members)


def open_tracing(service: str) -> Tracing | None:
    """Return the tracer of this process; None if the environment does not enable tracing or the packages are missing.

    Sampling follows OTEL_TRACES_SAMPLER.

    Args:
        service: Service name of the spans, unless OTEL_SERVICE_NAME is set.
    """
    environment = os.environ
    variable = next((each for each in _ENDPOINTS if environment.get(each)), None)
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if variable is None or is_off or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    protocol = next((each for each in _PROTOCOLS if environment.get(each)), None)
    if protocol is not None and environment[protocol] not in _SUPPORTED_PROTOCOLS:
        log.warning(
            "no traces: of OTLP only HTTP is spoken, mostly at port 4318", **{protocol: environment[protocol]}
        )
        return None
    try:
        from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - optional dependency
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional dependency
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - optional dependency
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - optional dependency
    except ModuleNotFoundError as exc:
        log.warning(
            "no traces: install penstock[tracing], or unset the variable", variable=variable, missing=exc.name
        )
        return None
    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    log.info("traces leave", endpoint=environment[variable])
    return Tracing(provider)


class Tracing:
    """Creates the spans of one process and exports them to a collector."""

    def __init__(self, provider: TracerProvider) -> None:
        """Create the tracer from a provider, which samples and exports spans."""
        from opentelemetry import trace  # noqa: PLC0415 - optional dependency
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - optional dependency
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._extract = TraceContextTextMapPropagator().extract
        self.start_span = provider.get_tracer("penstock").start_span
        self.context_with_span = trace.set_span_in_context
        self.kinds = trace.SpanKind
        self.error = trace.StatusCode.ERROR

    def begin(
        self, name: str, headers: Mapping[bytes, bytes], *, began_ns: int, attributes: Attributes
    ) -> TraceSpan:
        """Return the span of an incoming request; it is a child of the span in the ``traceparent`` header if there is one.

        Args:
            name: Name of the span.
            headers: Headers of the request, with lower-case names.
            began_ns: Unix time of its start in nanoseconds.
            attributes: Attributes of the span.
        """
        sent = {name.decode(): value.decode("ascii") for name, value in trace_context(headers)}
        span = self.start_span(
            name,
            self._extract(sent) if sent else None,
            kind=self.kinds.SERVER,
            attributes=dict(attributes),
            start_time=began_ns,
        )
        return TraceSpan(self, span)

    async def close(self) -> None:
        """Export the remaining spans, which takes at most 3 wall-clock seconds (`_CLOSE_S`); spans not exported by then are lost."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        until_s = time.monotonic() + _CLOSE_S
        while thread.is_alive() and time.monotonic() < until_s:  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(_POLL_S)


class TraceSpan:
    """One span of a trace, which can have children. If the span is not sampled, its methods do nothing and cost almost nothing.

    Attributes:
        is_recorded: Whether the span is sampled.
    """

    __slots__ = ("_span", "_tracing", "is_recorded")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        """Wrap a span that has started."""
        self._tracing = tracing
        self._span = span
        self.is_recorded = span.is_recording()

    @property
    def trace_id(self) -> str:
        """ID of the trace as 32 hexadecimal digits, as trace viewers show it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> bytes:
        """Value of the ``traceparent`` header with which a called process continues the trace."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()

    def child(
        self, name: str, attributes: Attributes, *, began_ns: int | None = None, is_call: bool = False
    ) -> TraceSpan:
        """Return a new span inside this one; if this span is not sampled, return this span itself.

        Args:
            name: Name of the span.
            attributes: Attributes of the span.
            began_ns: Unix time of its start in nanoseconds; None means now.
            is_call: Whether the span is a call of another process and lasts until its answer (OpenTelemetry's kind
                CLIENT).
        """
        if not self.is_recorded:
            return self
        tracing = self._tracing
        span = tracing.start_span(
            name,
            tracing.context_with_span(self._span),
            kind=tracing.kinds.CLIENT if is_call else tracing.kinds.INTERNAL,
            attributes=dict(attributes),
            start_time=began_ns,
        )
        return TraceSpan(tracing, span)

    def note(self, event: str) -> None:
        """Add an event with the current time to the span."""
        if self.is_recorded:
            self._span.add_event(event)

    def link(self, other: TraceSpan, why: str) -> None:
        """Link this span to another one, which caused it but is not its parent.

        Args:
            other: The other span.
            why: Value of the link's attribute ``penstock.link``.
        """
        if self.is_recorded:
            self._span.add_link(other._span.get_span_context(), {"penstock.link": why})

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes of the span; attributes with value None are left out."""
        if self.is_recorded:
            known = {key: value for key, value in attributes.items() if value is not None}
            self._span.set_attributes(known)

    def fail(self, problem: BaseException | str) -> None:
        """Mark the span as failed, with the exception or a message."""
        if not self.is_recorded:
            return
        if isinstance(problem, BaseException):
            self._span.record_exception(problem)
        self._span.set_status(self._tracing.error, str(problem))

    def end(self, ended_ns: int | None = None) -> None:
        """End the span at a Unix time in nanoseconds; None means now."""
        if self.is_recorded:
            self._span.end(ended_ns)
