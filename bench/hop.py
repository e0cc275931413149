"""What a router's hop adds to TTFT, and what it costs: alone, with everything switched on, and with a second one that picks.

    python bench/hop.py [--seconds 20] [--rps 100] [--runs 3] [--json]

Each of a source that speaks vLLM's SSE, a router, a router with tiers, admission, a session header and an access log, and
the relay of two routers, which asks the other one for each request's worker, gets every fourth request, so that noise
hits all alike. Then each gets short requests, for the CPU time of all processes that they pass. Medians of ``--runs``.
Goal: one router adds 0.3 ms at p50 at most.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import servers
import sse_load
from options import read_options

from penstock.core.http.loop import run
from penstock.local.ports import unused_port

ITL_MS = 5.0
TOKENS = 16
SOURCES = 2
SHORTS = 1500
_ALL_ON = "  router: {admission: {mode: token-capacity}, tiers: {enabled: true}, sessionHeader: x-session}\n"
_FOLLOWS_S = 30.0
DIRECT, ONE, ALL_ON, RELAYED = "direct", "one router", "everything on", "another picks"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to a worker.

    Attributes:
        url: Where requests go.
        pids: Routers that they pass.
    """

    url: str
    pids: tuple[int, ...] = ()


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, Way]]:
    """Run sources and routers."""
    plain, all_on, statefile = folder / "plain.yaml", folder / "all.yaml", folder / "state.json"
    text = servers.manifest("bench", sse_load.MODEL, {"aggregated": SOURCES})
    plain.write_text(text)
    all_on.write_text(text + _ALL_ON)
    started = []
    try:
        sources = []
        for _ in range(SOURCES):
            process, url = sse_load.spawn_source(ITL_MS)
            started.append(process)
            sources.append(url)
        fixed = [word for url in sources for word in ("--worker", f"aggregated={url}")]
        log = str(folder / "access.jsonl")
        ports = [unused_port() for _ in range(4)]
        servers.list_all(statefile, sources, [f"http://127.0.0.1:{port}" for port in ports[2:]])
        found = ["--discovery", str(statefile)]
        for port, graph, words in zip(
            ports,
            (plain, all_on, plain, plain),
            (fixed, [*fixed, "--access-log", log], found, found),
            strict=True,
        ):
            # One behind the other: the third is older than the fourth, so it decides.
            started.append(servers.start_router(port, graph, words, folder / f"{port}.log"))
        one, everything, decides, follows = (
            Way(f"http://127.0.0.1:{port}", (process.pid,))
            for port, process in zip(ports, started[SOURCES:], strict=True)
        )
        _wait_until_followed(follows)
        yield {
            DIRECT: Way(sources[0]),
            ONE: one,
            ALL_ON: everything,
            RELAYED: Way(follows.url, (*follows.pids, *decides.pids)),
        }
    finally:
        sse_load.stop(*started)


def _wait_until_followed(follower: Way) -> None:
    """Return when a router asks the other one for workers."""
    deadline_s = time.monotonic() + _FOLLOWS_S
    while time.monotonic() < deadline_s:
        run(lambda _: sse_load.shorts(follower.url, follower.pids[0], requests=1, concurrency=1)).checked()
        if servers.picked_elsewhere(follower.url) > 0:
            return
        time.sleep(0.2)
    raise SystemExit(f"the second router passes nothing on after {_FOLLOWS_S:.0f} s")


def added_ms(found: dict[str, Way], rps: float, seconds: float) -> dict[str, float]:
    """Return TTFT of the direct way, and what the others add to it, in milliseconds."""
    urls = {name: way.url for name, way in found.items()}
    loads = run(lambda _: sse_load.paced(urls, rps=rps, seconds=seconds, tokens=TOKENS))
    figures: dict[str, float] = {}
    for fraction in (0.5, 0.99):
        at = {
            name: sse_load.percentile(load.checked().ttft_s, fraction) * 1000 for name, load in loads.items()
        }
        figures[f"{DIRECT} p{100 * fraction:.0f}"] = at[DIRECT]
        figures |= {f"{name} p{100 * fraction:.0f}": at[name] - at[DIRECT] for name in at if name != DIRECT}
    return figures


def cpu_us(found: dict[str, Way]) -> dict[str, float]:
    """Return the CPU microseconds of a short request in all routers that it passes, and in the busiest of them."""
    figures: dict[str, float] = {}
    for name, way in found.items():
        if not way.pids:
            continue
        before = [sse_load.sample(pid).cpu_s for pid in way.pids]
        run(lambda _: sse_load.shorts(way.url, way.pids[0], requests=SHORTS, concurrency=16)).checked()  # noqa: B023 - run at once
        used = [sse_load.sample(pid).cpu_s - start for pid, start in zip(way.pids, before, strict=True)]
        figures[f"{name} us"] = sum(used) / SHORTS * 1e6
        figures[f"{name} busiest us"] = max(used) / SHORTS * 1e6
    return figures


def show(figures: dict[str, float], names: tuple[str, ...]) -> None:
    """Print the table."""
    print(f"{'way':<16}{'TTFT p50 ms':>14}{'p99 ms':>10}{'CPU us':>10}{'busiest':>10}")
    print(f"{DIRECT:<16}{figures[f'{DIRECT} p50']:>14.2f}{figures[f'{DIRECT} p99']:>10.2f}")
    for name in names:
        added = f"{figures[f'{name} p50']:>+14.2f}{figures[f'{name} p99']:>+10.2f}"
        print(f"{name:<16}{added}{figures[f'{name} us']:>10.0f}{figures[f'{name} busiest us']:>10.0f}")


def compare(description: str | None, ways: Callable[[Path], AbstractContextManager[dict[str, Way]]]) -> None:
    """Measure the ways, and print what all but the direct one add."""
    options = read_options(description, seconds=20.0, rps=100.0, runs=3)
    with tempfile.TemporaryDirectory() as folder, ways(Path(folder)) as found:
        added_ms(found, options.rps, 2.0)
        runs = [added_ms(found, options.rps, options.seconds) | cpu_us(found) for _ in range(options.runs)]
    figures = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures, tuple(name for name in found if name != DIRECT))


if __name__ == "__main__":
    compare(__doc__, ways)
