"""Measure this router beside smg, vllm-router, sglang-router and nginx before the same workers, in one run.

    python bench/rivals.py [--runs 3] [--memory-requests 20000] [--only penstock,smg] [--json]

The rivals (Rust, from PyPI) are installed into a folder of their own, never beside Penstock; one that cannot be
installed or started is left out with a word. Every router stands before the same four source processes, one
router after the other, and the order turns with every run. Figures are per CPU-second of the router.
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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import relay as relays
import sse_load

from penstock_local.ports import ephemeral_port
from penstock_wire.loop import run

_SOURCES = 4
_ITL_MS = 5.0
# A router that leaves Nagle's algorithm on holds the first event until the client has acknowledged the head, up
# to 40 ms later. A worker that takes longer than that for its first token hides it, so 60 favours those.
_TTFT_MS = 60.0
_STREAMS = 64
_PREFIXES = 16
_REQUESTS_PER_PREFIX = 20
_PREFIX_TEXT = 6_000
_LONG_PROMPT = "wxyz" * 12_500
_PACKAGES = {"smg": "smg", "vllm-router": "vllm-router", "sglang-router": "sglang-router"}
_GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: bench}}
spec:
  model: {{name: {model}, servedName: {model}, contextTokens: 131072}}
  runtime: simulated
  services:
    frontend: {{role: router}}
    worker: {{role: aggregated, replicas: 4}}
  router: {{policy: {policy}}}
  engine: {{profile: a100-llama-8b-bf16-tp1}}
  planner: {{maxGpuBudget: 8}}
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """One router under test.

    Attributes:
        name: Shown in the table.
        argv: Its command, from port, source URLs and a folder for its files.
    """

    name: str
    argv: Callable[[int, list[str], Path], list[str]]


def _penstock(policy: str) -> Contender:
    def argv(port: int, sources: list[str], folder: Path) -> list[str]:
        graph = folder / "graph.yaml"
        graph.write_text(_GRAPH.format(model=sse_load.MODEL, policy=policy))
        workers = [f"--worker=aggregated={url}" for url in sources]
        command = [sys.executable, "-m", "penstock_cli", "router", "serve", "--graph", str(graph)]
        return [*command, *workers, "--port", str(port)]

    return Contender(f"penstock {policy}", argv)


def _rust(name: str, command: list[str]) -> Contender:
    def argv(port: int, sources: list[str], folder: Path) -> list[str]:
        metrics = ["--prometheus-port", str(ephemeral_port()), "--log-dir", str(folder)]
        listen = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        return [*command, "--worker-urls", *sources, *listen, *metrics]

    return Contender(name, argv)


def _installed(venv: Path) -> list[Contender]:
    """Return the rivals that can be installed into ``venv``, which is made if needed."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    found = []
    for name, package in _PACKAGES.items():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        if subprocess.run(pip, check=False).returncode != 0:
            print(f"{name}: skipped, cannot be installed", file=sys.stderr)
            continue
        commands = {
            "smg": [str(venv / "bin" / "smg"), "launch"],
            "vllm-router": [str(venv / "bin" / "vllm-router")],
            "sglang-router": [str(python), "-m", "sglang_router.launch_router"],
        }
        found.append(_rust(name, commands[name]))
    return found


@contextmanager
def _started(contender: Contender, sources: list[str]) -> Iterator[tuple[str, int]]:
    """Run one router; gives its URL and PID."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = ephemeral_port()
        log = folder / "router.log"
        with log.open("wb") as out:
            process = subprocess.Popen(contender.argv(port, sources, folder), stdout=out, stderr=out)
        url = f"http://127.0.0.1:{port}"
        try:
            try:
                sse_load.wait_until_ready(f"{url}/v1/models", within_s=30)
            except SystemExit:
                print(log.read_text()[-2000:], file=sys.stderr)
                raise
            yield url, process.pid
        finally:
            sse_load.stop(process)


def _go(load: Callable[[], Coroutine[Any, Any, sse_load.LoadResult]]) -> sse_load.LoadResult:
    result = run(lambda _: load())
    if result.failed:
        print(f"requests failed: {result.failed}", file=sys.stderr)
    return result


def _throughput(url: str, pid: int, seconds: float) -> dict[str, float]:
    tokens = int(seconds * 1000 / _ITL_MS)
    streamed = _go(lambda: sse_load.streams(url, pid, count=_STREAMS, tokens=tokens))
    short = _go(lambda: sse_load.shorts(url, pid, requests=3000, concurrency=16))
    return {
        "events_per_cpu_s": streamed.reads / streamed.cpu_s,
        "short_requests_per_cpu_s": short.done / short.cpu_s,
        "failed": float(sum(streamed.failed.values()) + sum(short.failed.values())),
    }


def _latency(url: str, direct: str, seconds: float) -> dict[str, float]:
    """Stream 64 tokens at 50 req/s to each of router and source, in turn; then with prompts of 50 KB."""
    figures = {}
    for label, prompt in (("", "wxyz" * 64), ("_50kb", _LONG_PROMPT)):
        urls = {"direct": direct, "router": url}

        async def load(urls: dict[str, str] = urls, prompt: str = prompt) -> dict[str, sse_load.LoadResult]:
            return await sse_load.paced(urls, rps=100.0, seconds=seconds, tokens=64, prompt=prompt)

        results = run(lambda _: load())
        routed, plain = results["router"], results["direct"]
        for name, fraction in (("p50", 0.5), ("p99", 0.99)):
            added = sse_load.percentile(routed.ttft_s, fraction) - sse_load.percentile(plain.ttft_s, fraction)
            figures[f"added_ttft_{name}{label}_ms"] = added * 1000
        figures[f"relay_p99{label}_ms"] = sse_load.percentile(routed.relay_s, 0.99) * 1000
        figures[f"direct_relay_p99{label}_ms"] = sse_load.percentile(plain.relay_s, 0.99) * 1000
    return figures


def _seen(sources: list[str]) -> list[dict[str, int]]:
    """Return requests and distinct prefixes of each source since the last call."""
    answers = []
    for source in sources:
        with urllib.request.urlopen(f"{source}/seen", timeout=5) as answer:
            answers.append(json.load(answer))
    return answers


def _placement(url: str, pid: int, sources: list[str], seed: int) -> dict[str, float]:
    """Send requests of 16 shared prefixes in random order; count (worker, prefix) pairs: each is one cold prefill."""
    order = random.Random(seed)
    texts = [
        f"{seed:04d}-{prefix:04d} ".ljust(_PREFIX_TEXT, "abcdefgh"[prefix % 8]) + f" question {number}"
        for prefix in range(_PREFIXES)
        for number in range(_REQUESTS_PER_PREFIX)
    ]
    order.shuffle(texts)
    _seen(sources)
    _go(lambda: sse_load.prompts(url, pid, texts=texts, concurrency=16, tokens=16))
    seen = _seen(sources)
    total = sum(each["requests"] for each in seen)
    return {
        "cold_prefills": float(sum(each["prefixes"] for each in seen)),
        "busiest_share": max(each["requests"] for each in seen) / max(1, total),
    }


def _memory(url: str, pid: int, requests: int) -> dict[str, float]:
    """Send distinct prompts of 2 KB in ten parts; the first tenth warms up."""
    sizes = []
    for part in range(10):
        texts = [f"{part}-{number} " + "lorem ipsum " * 170 for number in range(requests // 10)]
        _go(lambda: sse_load.prompts(url, pid, texts=texts, concurrency=32, tokens=2))  # noqa: B023 - run at once
        sizes.append(sse_load.sample(pid).rss_mb)
    return {"rss_mb": sizes[-1], "rss_growth_mb": sizes[-1] - sizes[0]}


def _one_run(
    contender: Contender, sources: list[str], args: argparse.Namespace, number: int
) -> dict[str, float]:
    with _started(contender, sources) as (url, pid):
        _go(lambda: sse_load.shorts(url, pid, requests=300, concurrency=8))
        figures = {
            **_placement(url, pid, sources, number),
            **_throughput(url, pid, args.seconds),
            **_latency(url, sources[0], args.seconds),
        }
        if number == 0 and args.memory_requests:
            figures |= _memory(url, pid, args.memory_requests)
    return figures


def _nginx_run(nginx: str, source: str, seconds: float) -> dict[str, float]:
    with relays.nginx_relay(nginx, source) as (url, pid):
        return {**_throughput(url, pid, seconds), **_latency(url, source, seconds)}


def _measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    contenders = [_penstock(policy) for policy in args.policies.split(",")] + _installed(args.venv)
    if args.only:
        wanted = args.only.split(",")
        contenders = [each for each in contenders if any(each.name.startswith(name) for name in wanted)]
    nginx = sse_load.which_nginx()
    processes, sources = zip(
        *(sse_load.spawn_source(_ITL_MS, args.ttft_ms) for _ in range(_SOURCES)), strict=True
    )
    runs: dict[str, list[dict[str, float]]] = {}
    try:
        for number in range(args.runs):
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                print(f"run {number + 1}/{args.runs}: {contender.name}", file=sys.stderr)
                try:
                    runs.setdefault(contender.name, []).append(
                        _one_run(contender, list(sources), args, number)
                    )
                except SystemExit as exc:
                    print(f"{contender.name}: left out: {exc}", file=sys.stderr)
            if nginx is not None and not args.only:
                runs.setdefault("nginx (no routing)", []).append(_nginx_run(nginx, sources[0], args.seconds))
    finally:
        sse_load.stop(*processes)
    return {name: _medians(each) for name, each in runs.items() if each}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for each in runs for key in each)
    return {key: statistics.median(each[key] for each in runs if key in each) for key in keys}


_COLUMNS = (
    ("events_per_cpu_s", "events/CPU-s", "{:,.0f}"),
    ("short_requests_per_cpu_s", "short/CPU-s", "{:,.0f}"),
    ("added_ttft_p50_ms", "+TTFT p50", "{:.2f}"),
    ("added_ttft_p50_50kb_ms", "50 KB p50", "{:.2f}"),
    ("relay_p99_ms", "relay p99", "{:.2f}"),
    ("direct_relay_p99_ms", "(direct)", "{:.2f}"),
    ("cold_prefills", "cold", "{:.0f}"),
    ("busiest_share", "busiest", "{:.0%}"),
    ("rss_mb", "RSS MB", "{:.0f}"),
    ("rss_growth_mb", "growth MB", "{:.1f}"),
    ("failed", "failed", "{:.0f}"),
)


def _print(figures: dict[str, dict[str, float]], runs: int) -> None:
    print(
        f"medians of {runs} runs; times in ms; cold: prefills of {_PREFIXES} shared prefixes over {_SOURCES} workers"
    )
    print(f"{'router':<24}" + "".join(f"{title:>13}" for _, title, _ in _COLUMNS))
    for name, figure in figures.items():
        cells = (form.format(figure[key]) if key in figure else "-" for key, _, form in _COLUMNS)
        print(f"{name:<24}" + "".join(f"{cell:>13}" for cell in cells))


def main() -> None:
    """Install, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path.home() / ".cache" / "penstock-bench" / "rivals"
    parser.add_argument("--venv", type=Path, default=cache, help="folder that the rivals are installed into")
    parser.add_argument("--policies", default="dualmap,least-loaded", help="this router's policies")
    parser.add_argument("--only", help="names, comma-separated; default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the medians are shown")
    parser.add_argument("--ttft-ms", type=float, default=_TTFT_MS, help="the workers' time to first token")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each load in seconds")
    parser.add_argument(
        "--memory-requests", type=int, default=20_000, help="distinct prompts of the memory load; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    figures = _measure(args)
    if args.json:
        print(json.dumps({"runs": args.runs, "figures": figures}, indent=2))
    else:
        _print(figures, args.runs)


if __name__ == "__main__":
    main()
