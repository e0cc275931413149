"""What one request costs the router's own code: parsed, keyed, routed, relayed and counted, without sockets.

    python bench/request.py [--batches 60] [--json]

The transports are objects that answer at once, so that neither the kernel nor other processes are in the figure; of all
batches the fastest counts, because a busy machine only ever adds. `bench/router.py` measures real sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from opentelemetry.exporter.otlp.json.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from options import read_options

from penstock.api import Role, RouterConfig
from penstock.core.http.client_connection import ClientConnection, Origin
from penstock.core.http.loop import run
from penstock.core.http.server_connection import ServerConnection, ServerContext
from penstock.core.tracing import Tracing
from penstock.router.core.worker import WorkerSpec
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

MODEL = "bench-model"
WORKERS = 4
BATCH = 200
EVENTS = 64
_USAGE = b'"usage":{"prompt_tokens":64,"completion_tokens":8,"total_tokens":72}'
_BODY = (
    b'{"id":"cmpl-1","object":"text_completion","model":"bench-model","choices":[{"index":0,"text":"a b c",'
)
_WHOLE = _BODY + b'"finish_reason":"stop"}],' + _USAGE + b"}"
_EVENT = b"data: " + _BODY + b'"finish_reason":null}],"usage":null}\n\n'
_EVENT_WITH_ID = b"data: " + _BODY + b'"finish_reason":null,"token_ids":[70123]}],"usage":null}\n\n'
_BY_TOKENS = {"retries": {"continueBy": "tokens"}}
_ALL_ON = {"admission": {"mode": "token-capacity"}, "tiers": {"enabled": True}, "sessionHeader": "x-session"}
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _request(*, stream: bool) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "wxyz" * 64, "max_tokens": 8, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def _stream_of(event: bytes) -> list[bytes]:
    return [
        _SSE_HEAD + _framed(event),
        *[_framed(event)] * (EVENTS - 1),
        _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ]


ANSWERS = {
    "whole": [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(_WHOLE), _WHOLE)
    ],
    "streamed": _stream_of(_EVENT),
    "streamed by tokens": _stream_of(_EVENT_WITH_ID),
}
"""What a worker answers, one item to a read of its socket."""


class _Transport(asyncio.Transport):
    """A socket that takes everything at once."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self.write = on_write  # type: ignore[method-assign]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...
    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class _Worker:
    """Answers each request on its connection."""

    def __init__(self, answer: list[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self.answer, self._loop = answer, loop
        self.connection: ClientConnection | None = None

    def on_write(self, _data: bytes) -> None:
        """Take a request; a read comes with each turn of the loop."""
        self._loop.call_soon(self._send, 0)

    def _send(self, at: int) -> None:
        assert self.connection is not None
        if at + 1 < len(self.answer):
            self._loop.call_soon(self._send, at + 1)
        self.connection.data_received(self.answer[at])


class _Client:
    """Sends one request at a time."""

    def __init__(self, shared: ServerContext, request: bytes) -> None:
        self._request, self._left = request, 0
        self._ended: asyncio.Future[None] | None = None
        self._connection = ServerConnection(shared)
        self._loop = shared.loop
        self._connection.connection_made(_Transport(self._on_write))

    def _on_write(self, data: bytes) -> None:
        if data != b"0\r\n\r\n" and not data.endswith(b"}"):
            return
        self._left -= 1
        if self._left:
            self._loop.call_soon(self._connection.data_received, self._request)
        elif self._ended is not None:
            self._ended.set_result(None)

    async def send(self, count: int) -> None:
        """Return when this many requests are answered."""
        self._left, self._ended = count, self._loop.create_future()
        self._connection.data_received(self._request)
        await self._ended


class _Discard(SpanExporter):
    """Encodes spans as OTLP and sends them nowhere."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).to_json()
        return SpanExportResult.SUCCESS


def _tracing(share: float) -> Tracing:
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Discard()))
    return Tracing(provider)


def _router(answer: list[bytes], *, all_on: bool, traced: float | None) -> RouterServer:
    """Return a router whose connections to workers are objects of this process."""
    workers = tuple(
        WorkerSpec(f"w{i}", Role.AGGREGATED, f"http://w{i}:80", supervised=True) for i in range(WORKERS)
    )
    given = _ALL_ON if all_on else _BY_TOKENS if answer is ANSWERS["streamed by tokens"] else {}
    config = RouterConfig.model_validate(given)
    access_log = os.devnull if all_on else None
    server = RouterServer(
        RouterSettings(MODEL, disaggregated=False, config=config, workers=workers, access_log=access_log),
        None if traced is None else _tracing(traced),
    )
    server.admission.set_workers(workers)
    pool = cast("Any", server.context.pool)

    async def connect(origin: Origin, _timeouts: object, loop: asyncio.AbstractEventLoop) -> ClientConnection:
        worker = _Worker(answer, loop)
        connection = ClientConnection(origin, loop, pool._free, pool._gone)  # noqa: SLF001 - as above
        worker.connection = connection
        connection.connection_made(_Transport(worker.on_write))
        return connection

    pool._connect = connect  # noqa: SLF001 - as above
    return server


async def _microseconds(
    kind: str, batches: int, *, all_on: bool = False, traced: float | None = None
) -> float:
    """Return the CPU microseconds of a request: the fastest of ``batches``."""
    server = _router(ANSWERS[kind], all_on=all_on, traced=traced)
    shared: ServerContext = cast("Any", server)._http._shared  # noqa: SLF001 - the server itself would listen
    shared.loop, shared.bound = asyncio.get_running_loop(), 1
    client = _Client(shared, _request(stream=kind.startswith("streamed")))
    fastest = float("inf")
    for _ in range(batches):
        began = time.process_time()
        await client.send(BATCH)
        fastest = min(fastest, (time.process_time() - began) / BATCH)
    return fastest * 1e6


def main() -> None:
    """Print the table."""
    arguments = read_options(__doc__, batches=60)
    batches = arguments.batches
    found = {kind: run(lambda _: _microseconds(kind, batches)) for kind in ANSWERS}  # noqa: B023 - run at once
    found["everything on"] = run(lambda _: _microseconds("whole", batches, all_on=True))
    for share in (1.0, 0.01):
        found[f"traced {share:g}"] = run(lambda _: _microseconds("whole", batches, traced=share))  # noqa: B023 - as above
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"whole answer: {found['whole']:.1f} us of the router's own code a request")
    print(f"… with tiers, admission and access log: {found['everything on']:.1f} us")
    print(
        f"… with spans of each request: {found['traced 1']:.1f} us; of 1% of them: {found['traced 0.01']:.1f} us"
    )
    for kind in ("streamed", "streamed by tokens"):
        per_event = (found[kind] - found["whole"]) / EVENTS
        print(
            f"{kind}, {EVENTS} events: {found[kind]:.1f} us a request; {per_event:.2f} us an event beyond a whole one"
        )


if __name__ == "__main__":
    main()
