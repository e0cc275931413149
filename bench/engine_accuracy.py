"""Compares TTFT and ITL measured against a real worker process with those of its own model.

    python bench/engine_accuracy.py [--rate 50] [--seconds 10] [--json]

The client sends a Poisson stream of requests at --speed 1 and notes when each token arrives. Afterwards
the same arrivals run through the same core in virtual time; what differs is the server: sockets, timers,
HTTP, and this machine. The goal: p50 and p99 within 5% + 2 ms of the model's. The last column is the share of
single samples that near; a request that arrives around the start of a step may honestly catch another one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import sse_load
from options import read_options

from penstock.core.http.client import ConnectionPool
from penstock.core.http.loop import run
from penstock.engine.core.engine import Engine
from penstock.engine.core.kv_blocks import prefix_keys
from penstock.engine.core.requests import EngineRequest
from penstock.engine.core.timeline import Timeline
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.local.ports import unused_port

RELATIVE, ABSOLUTE_S = 0.05, 0.002
MODEL = "bench"
_CONNECTIONS = 64


@dataclass(slots=True)
class Sent:
    """One request and when its tokens arrived; times in seconds of one monotonic clock."""

    name: str
    prompt: str
    outputs: int
    sent_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)


def workload(rate: float, seconds: float, seed: int) -> list[tuple[float, Sent]]:
    """Return (offset, request): prompts of 64 to 512 tokens, outputs of 16 to 64."""
    rng = random.Random(seed)
    rows: list[tuple[float, Sent]] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt = f"{len(rows):08d}" + "".join(rng.choices("abcdefgh ", k=4 * rng.randint(64, 512) - 8))
        rows.append((at_s, Sent(f"r{len(rows)}", prompt, rng.randint(16, 64))))
    return rows


async def send(pool: ConnectionPool, url: str, request: Sent) -> None:
    """Stream one request, noting the arrival of each event."""
    body = {"prompt": request.prompt, "max_tokens": request.outputs, "ignore_eos": True, "stream": True}
    encoded = json.dumps(body).encode()
    request.sent_s = time.monotonic()
    response = await pool.stream("POST", url + "/v1/completions", body=encoded)
    async for piece in response:
        now_s = time.monotonic()
        request.tokens_s += [now_s] * piece.count(b'"text":')


async def send_all(url: str, rows: list[tuple[float, Sent]]) -> None:
    """Send every request at its offset."""
    pool = ConnectionPool()
    warm_up = (pool.request("GET", url + "/health") for _ in range(_CONNECTIONS))
    await asyncio.gather(*warm_up)  # connections stand before the clock starts
    begin_s = time.monotonic() + 0.1
    async with asyncio.TaskGroup() as group:
        for offset_s, request in rows:
            await asyncio.sleep(max(0.0, begin_s + offset_s - time.monotonic()))
            group.create_task(send(pool, url, request))
    await pool.close()


def model_times(flags: ServeFlags, rows: list[Sent]) -> dict[str, list[float]]:
    """Return when each token is due by the model, for arrivals at the times that were measured."""
    settings = resolve(flags)
    timeline = Timeline(Engine(settings.engine, settings.profile.latency()))
    for row in sorted(rows, key=lambda row: row.sent_s):
        prompt = row.prompt.encode()
        keys = prefix_keys(prompt, settings.engine.limits.block_size)
        timeline.submit(EngineRequest(row.name, len(prompt) // 4, row.outputs, row.sent_s, keys))
    due: dict[str, list[float]] = {row.name: [] for row in rows}
    while (at_s := timeline.next_due_s()) is not None:
        for outcome in timeline.run_until(at_s, max_steps=1):
            for state in {*timeline.engine.batcher.decoding, *outcome.finished}:
                times = due[state.request.request_id]
                if timeline.engine.batcher.outputs_of(state) > len(times):
                    times.append(outcome.end_s)
    return due


def compare(rows: list[Sent], due: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return percentiles of both sides, and the share of accurate samples."""
    pairs: dict[str, list[tuple[float, float]]] = {"TTFT": [], "ITL": []}
    for row in rows:
        model = due[row.name]
        pairs["TTFT"].append((row.tokens_s[0] - row.sent_s, model[0] - row.sent_s))
        for place in range(1, row.outputs):
            measured_gap = row.tokens_s[place] - row.tokens_s[place - 1]
            pairs["ITL"].append((measured_gap, model[place] - model[place - 1]))
    return {name: summarise(samples) for name, samples in pairs.items()}


def summarise(samples: list[tuple[float, float]]) -> dict[str, float]:
    """Return milliseconds by side and quantile."""
    measured, model = sorted(pair[0] for pair in samples), sorted(pair[1] for pair in samples)
    near = [is_near(got, due) for got, due in samples]
    figures: dict[str, float] = {"samples": len(samples), "accurate_share": sum(near) / len(near)}
    for label, side in (("measured", measured), ("model", model)):
        figures[f"{label}_mean_ms"] = statistics.fmean(side) * 1000
        for quantile in (50, 99):
            figures[f"{label}_p{quantile}_ms"] = side[len(side) * quantile // 100] * 1000
    figures["is_accurate"] = all(
        is_near(figures[f"measured_p{quantile}_ms"] / 1000, figures[f"model_p{quantile}_ms"] / 1000)
        for quantile in (50, 99)
    )
    return figures


def is_near(measured_s: float, model_s: float) -> bool:
    """Whether a figure is within 5% + 2 ms of the model's."""
    return abs(measured_s - model_s) <= RELATIVE * model_s + ABSOLUTE_S


async def lag_p99_ms(url: str) -> float:
    """Return the worker's own p99 of lateness."""
    pool = ConnectionPool()
    page = (await pool.request("GET", url + "/metrics")).body.decode()
    await pool.close()
    (line,) = [line for line in page.splitlines() if line.startswith("penstock_schedule_lag_p99_seconds ")]
    return float(line.split()[1]) * 1000


async def bench(flags: ServeFlags, rate: float, seconds: float) -> dict[str, Any]:
    """Load the running worker and compare it with its model."""
    url = f"http://{flags.host}:{flags.port}"
    rows = workload(rate, seconds, seed=1)
    await send_all(url, rows)
    requests = [request for _, request in rows]
    figures: dict[str, Any] = compare(requests, model_times(flags, requests))
    figures["requests"] = len(requests)
    figures["lag_p99_ms"] = await lag_p99_ms(url)
    return figures


def main() -> None:
    """Print the table."""
    args = read_options(__doc__, rate=50.0, seconds=10.0)
    flags = ServeFlags(MODEL, "h200-llama-3.1-8b-tp1", port=unused_port())
    command = [sys.executable, "-m", "penstock.cli", "--log-level", "warning", "engine", "serve", MODEL]
    worker = subprocess.Popen([*command, "--profile", flags.profile, "--port", str(flags.port)])
    try:
        sse_load.wait_until_ready(f"http://{flags.host}:{flags.port}/health")
        figures = run(lambda _: bench(flags, args.rate, args.seconds))
    finally:
        sse_load.stop(worker)
    if args.json:
        print(json.dumps(figures, indent=2))
        return
    print(
        f"{figures['requests']} requests at {args.rate:g}/s, speed 1, worker's p99 lag {figures['lag_p99_ms']:.2f} ms"
    )
    print(
        f"{'':6}{'samples':>9}{'model p50':>11}{'measured':>10}{'model p99':>11}{'measured':>10}"
        f"{'5% + 2 ms':>11}{'single samples':>16}"
    )
    for name in ("TTFT", "ITL"):
        row = figures[name]
        print(
            f"{name:6}{row['samples']:9.0f}{row['model_p50_ms']:9.2f}ms{row['measured_p50_ms']:8.2f}ms"
            f"{row['model_p99_ms']:9.2f}ms{row['measured_p99_ms']:8.2f}ms"
            f"{'ok' if row['is_accurate'] else 'missed':>11}{row['accurate_share']:16.2%}"
        )


if __name__ == "__main__":
    main()
