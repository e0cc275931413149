"""Load for relay benchmarks: a source that speaks vLLM's SSE, clients that time it, CPU and memory of a PID.

The target under test is only a URL and a PID. Run as a script it is the source, with the times between tokens and to the first
one: `python bench/sse_load.py ITL_MS TTFT_MS`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import orjson
import psutil

from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.core.http.loop import run
from penstock.core.http.server import HttpServer, Request, Responder
from penstock.core.http.sse import DONE
from penstock.core.metric_names import VLLM_KV_USAGE, VLLM_RUNNING, VLLM_WAITING

MODEL = "bench-model"
_TIMEOUTS = Timeouts(connect_s=10.0, first_byte_s=60.0, idle_s=60.0)
_METRICS = "".join(
    f'# TYPE {name} gauge\n{name}{{model_name="{MODEL}",engine="0"}} {value}\n'
    for name, value in ((VLLM_RUNNING, 1), (VLLM_WAITING, 0), (VLLM_KV_USAGE, 0.1))
).encode()


_SLOT = "@"
_STAMP = re.compile(rb'"text":"(\d+)"')
_PREFIX_BYTES = 64
"""Prompts that start alike for this long share a prefix: what `Source.seen` counts."""

_KV_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "0e1f2a3b-4c5d-6e7f-8a9b-0c1d2e3f4a5b",
    "remote_request_id": "cmpl-0123456789abcdef0123456789abcdef-0",
    "remote_block_ids": [list(range(4))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


# ---------------------------------------------------------------------- the source


def _event(
    request_id: str, text: str, finish: str | None = None, usage: dict[str, int] | None = None
) -> bytes:
    choices = (
        []
        if usage is not None
        else [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}]
    )
    chunk = {
        "id": request_id,
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": choices,
        "usage": usage,
    }
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


class _Stream:
    """Sends one token per ``itl_s`` on its own schedule, each as one event in one write.

    A token's text is the time of its sending, so that the client knows how long it was on the way.
    """

    def __init__(self, responder: Responder, tokens: int, itl_s: float, tail: list[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._responder = responder
        self._lead, self._rest = _event("cmpl-0123456789abcdef0123456789abcdef", _SLOT).split(_SLOT.encode())
        self._left = tokens
        self._itl_s = itl_s
        self._tail = tail
        self._due_s = 0.0
        self.done: asyncio.Future[None] = self._loop.create_future()

    def begin(self) -> None:
        """Send the first token now and the others on schedule."""
        self._due_s = self._loop.time()
        self.send()

    def send(self) -> None:
        """Send one token."""
        if self._responder.closed:
            self.done.set_result(None)
            return
        self._responder.write(b"%s%d%s" % (self._lead, time.monotonic_ns(), self._rest))
        self._left -= 1
        if self._left <= 0:
            for part in self._tail:
                self._responder.write(part)
            self._responder.end()
            self.done.set_result(None)
            return
        self._due_s += self._itl_s
        self._loop.call_at(self._due_s, self.send)


class Source:
    """A worker without a model: prompt tokens are bytes/4, output tokens come every ``itl_s``."""

    def __init__(self, itl_s: float, ttft_s: float = 0.0) -> None:
        self._itl_s = itl_s
        self._ttft_s = ttft_s
        self._requests = 0
        self._prefixes: set[str] = set()

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer the endpoints that a router asks of a vLLM worker."""
        path = request.path
        if path == "/v1/completions":
            await self._complete(orjson.loads(request.body), responder)
        elif path == "/health":
            responder.send(200, b"")
        elif path == "/metrics":
            responder.send(200, _METRICS, content_type="text/plain; charset=utf-8")
        elif path == "/seen":
            seen = {"requests": self._requests, "prefixes": len(self._prefixes)}
            self._requests, self._prefixes = 0, set()
            responder.send(200, orjson.dumps(seen))
        elif path == "/v1/models":
            responder.send(200, orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:
            responder.send(404, b"{}")

    async def _complete(self, body: dict[str, object], responder: Responder) -> None:
        tokens = int(str(body.get("max_tokens", 16)))
        text = str(body.get("prompt", ""))
        prompt = len(text) // 4
        self._requests += 1
        self._prefixes.add(text[:_PREFIX_BYTES])
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        request_id = "cmpl-0123456789abcdef0123456789abcdef"
        if not body.get("stream"):
            asked = body.get("kv_transfer_params")
            prefill = isinstance(asked, dict) and asked.get("do_remote_decode")
            choice = {"index": 0, "text": " abc" * tokens, "logprobs": None, "finish_reason": "length"}
            answer = {
                "id": request_id,
                "object": "text_completion",
                "created": 1_700_000_000,
                "model": MODEL,
                "choices": [choice],
                "usage": usage,
                "kv_transfer_params": _KV_PARAMS if prefill else None,
            }
            responder.send(200, orjson.dumps(answer))
            return
        tail = [_event(request_id, "", usage=usage)] if body.get("stream_options") else []
        stream = _Stream(responder, tokens, self._itl_s, [*tail, DONE])
        responder.start(200)
        if self._ttft_s:
            await asyncio.sleep(self._ttft_s)
        stream.begin()
        await stream.done


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU time and memory of a process and its children."""

    cpu_s: float
    rss_mb: float


def wait_until_ready(
    url: str,
    *,
    within_s: float = 20.0,
    has_to_serve: bool = True,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Return when ``url`` answers 200, or anything where it need not serve; end the bench where its process ends."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{url}: its process ended with status {process.returncode}")
        with contextlib.suppress(OSError):
            try:
                with urllib.request.urlopen(url, timeout=2.0) as answer:
                    if answer.status == 200:
                        return
            except urllib.error.HTTPError:
                if not has_to_serve:
                    return
        time.sleep(0.05)
    raise SystemExit(f"{url} did not answer 200 within {within_s} s")


def sample(pid: int) -> Sample:
    """Read CPU seconds (user and system, living children included) and resident megabytes."""
    root = psutil.Process(pid)
    cpu_s, rss = 0.0, 0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        cpu_s += times.user + times.system
        rss += process.memory_info().rss
    return Sample(cpu_s, rss / 1e6)


def spawn(*argv: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a Python script that prints ``{"port": N}`` first; return it and its port."""
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{argv[0]} ended before it listened; see its error above")
    return process, int(json.loads(line)["port"])


def spawn_source(itl_ms: float, ttft_ms: float = 0.0) -> tuple[subprocess.Popen[bytes], str]:
    """Start a source; return it and its URL."""
    process, port = spawn(__file__, str(itl_ms), str(ttft_ms))
    return process, f"http://127.0.0.1:{port}"


def stop(*processes: subprocess.Popen[bytes]) -> None:
    """Terminate processes that this run started."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


# ---------------------------------------------------------------------- load


@dataclass(slots=True)
class LoadResult:
    """What one load saw.

    Attributes:
        done: Requests answered in full.
        failed: Requests that were not, by cause.
        events: Events with a token.
        reads: Socket reads that carried them; ``events / reads`` near 1 means one at a time.
        ttft_s: Per request, from sending to the first body bytes.
        relay_s: Per event, from the source's sending to the client's reading.
        cpu_s: CPU seconds of the target during the load.
        wall_s: Seconds of the load.
    """

    done: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    events: int = 0
    reads: int = 0
    ttft_s: list[float] = field(default_factory=list)
    relay_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def fail(self, cause: str) -> None:
        """Count a failure."""
        self.failed[cause] = self.failed.get(cause, 0) + 1

    def checked(self) -> LoadResult:
        """Return it, or end the bench where a request failed."""
        if self.failed:
            raise SystemExit(f"requests failed: {self.failed}")
        return self


def _body(tokens: int, *, stream: bool, prompt: str = "wxyz" * 64) -> bytes:
    return orjson.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": stream})


_HEADERS = ((b"content-type", b"application/json"),)


async def _one_stream(pool: ConnectionPool, url: str, body: bytes, result: LoadResult) -> None:
    sent_s = time.perf_counter()
    events, first_s = 0, 0.0
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_data(data: bytes) -> None:
        nonlocal events, first_s
        if not first_s:
            first_s = time.perf_counter()
        count = data.count(b'data: {"')
        events += count
        result.events += count
        result.reads += 1
        stamp = _STAMP.search(data)
        if stamp is not None:
            result.relay_s.append((time.monotonic_ns() - int(stamp[1])) / 1e9)

    try:
        response = await pool.stream("POST", url, body=body, headers=_HEADERS, timeouts=_TIMEOUTS)
        response.set_sink(on_data, lambda: done.set_result(None), done.set_exception)
        await done
    except Exception as exc:  # noqa: BLE001 - counted and printed by cause
        result.fail(type(exc).__name__)
        return
    if response.status != 200 or not events:
        result.fail(f"status {response.status}")
        return
    result.done += 1
    result.ttft_s.append(first_s - sent_s)


async def streams(url: str, pid: int, *, count: int, tokens: int) -> LoadResult:
    """Hold ``count`` streams of ``tokens`` events at once, started 1/``count`` of an ITL of 5 ms apart."""
    result = LoadResult()
    pool = ConnectionPool()
    target = f"{url}/v1/completions"
    body = _body(tokens, stream=True)
    before, started_s = sample(pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(_one_stream(pool, target, body, result))
            await asyncio.sleep(0.005 * 7 / count)
    result.cpu_s = sample(pid).cpu_s - before.cpu_s
    result.wall_s = time.perf_counter() - started_s
    await pool.close()
    return result


async def shorts(url: str, pid: int, *, requests: int, concurrency: int, tokens: int = 8) -> LoadResult:
    """Send ``requests`` unstreamed requests, ``concurrency`` at a time."""
    body = _body(tokens, stream=False)

    async def one(pool: ConnectionPool, target: str, result: LoadResult) -> None:
        sent_s = time.perf_counter()
        try:
            answer = await pool.request("POST", target, body=body, headers=_HEADERS, timeouts=_TIMEOUTS)
        except Exception as exc:  # noqa: BLE001 - counted and printed by cause
            result.fail(type(exc).__name__)
            return
        if answer.status != 200:
            result.fail(f"status {answer.status}")
            return
        result.done += 1
        result.ttft_s.append(time.perf_counter() - sent_s)

    return await _closed_loop(one, url, pid, requests, concurrency)


async def prompts(url: str, pid: int, *, texts: Sequence[str], concurrency: int, tokens: int) -> LoadResult:
    """Stream one answer per prompt, ``concurrency`` at a time, in order."""
    left = iter(texts)

    async def one(pool: ConnectionPool, target: str, result: LoadResult) -> None:
        await _one_stream(pool, target, _body(tokens, stream=True, prompt=next(left)), result)

    return await _closed_loop(one, url, pid, len(texts), concurrency)


async def _closed_loop(
    one: Callable[[ConnectionPool, str, LoadResult], Awaitable[None]],
    url: str,
    pid: int,
    requests: int,
    concurrency: int,
) -> LoadResult:
    result = LoadResult()
    pool = ConnectionPool()
    left = requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await one(pool, f"{url}/v1/completions", result)

    before, started_s = sample(pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    result.cpu_s = sample(pid).cpu_s - before.cpu_s
    result.wall_s = time.perf_counter() - started_s
    await pool.close()
    return result


async def paced(
    urls: dict[str, str], *, rps: float, seconds: float, tokens: int, prompt: str = "wxyz" * 64
) -> dict[str, LoadResult]:
    """Send streams at a steady rate to each of ``urls`` in turn, so that noise hits all alike."""
    results = {name: LoadResult() for name in urls}
    pool = ConnectionPool()
    body = _body(tokens, stream=True, prompt=prompt)
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rps * seconds)):
            name = list(urls)[number % len(urls)]
            group.create_task(_one_stream(pool, f"{urls[name]}/v1/completions", body, results[name]))
            due_s += 1 / rps
            await asyncio.sleep(max(0.0, due_s - loop.time()))
    await pool.close()
    return results


def percentile(values: list[float], fraction: float) -> float:
    """Return the value below which ``fraction`` of ``values`` lie; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


async def _serve(stop_event: asyncio.Event, source: Source) -> None:
    server = HttpServer(source.handle)
    await server.start("127.0.0.1", 0)
    print(json.dumps({"port": server.port}), flush=True)
    await stop_event.wait()
    await server.close(grace_s=0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("itl_ms", type=float, help="between two tokens of its answers, milliseconds")
    parser.add_argument("ttft_ms", type=float, help="before the first, milliseconds")
    arguments = parser.parse_args()
    run(lambda stop_event: _serve(stop_event, Source(arguments.itl_ms / 1000, arguments.ttft_ms / 1000)))
