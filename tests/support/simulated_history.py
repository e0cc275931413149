"""A Prometheus that remembers a simulated fleet: the run's requests as vLLM's series, written as blocks by promtool."""

from __future__ import annotations

import math
import subprocess
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

from penstock.core import metric_names as names
from penstock.core.histogram import TOKEN_GAP_BOUNDS_S, TTFT_BOUNDS_S
from penstock.engine.serve.metrics import token_buckets
from penstock.simulator.observer import Recording

SCRAPE_S = 15.0
TOKEN_BOUNDS = token_buckets(131_072)


def openmetrics(recording: Recording, *, start_s: float, length_s: float, model: str = "llama") -> str:
    """Return a run as scrapes of vLLM workers, whose second 0 is ``start_s``; see `_Scrapes`."""
    scrapes = _Scrapes(recording, start_s, length_s, model)
    requests = recording.requests
    done = ~np.isnan(requests.e2e_s)
    first_s = (requests.arrival_s + requests.ttft_s)[done]
    end_s = (requests.arrival_s + requests.e2e_s)[done]
    handed_s = (requests.arrival_s + requests.wait_s)[done]
    prompts, outputs, one = requests.prompt_tokens[done], requests.output_tokens[done], np.ones(len(first_s))
    gaps = outputs - 1
    gap_s = np.nan_to_num(requests.tpot_s[done])
    lines = [
        *scrapes.histogram(names.VLLM_TTFT, TTFT_BOUNDS_S, first_s, requests.ttft_s[done], one),
        *scrapes.histogram(names.VLLM_ITL, TOKEN_GAP_BOUNDS_S, end_s, gap_s, gaps),
        *scrapes.histogram(names.VLLM_REQUEST_PROMPT_TOKENS, TOKEN_BOUNDS, end_s, prompts, one),
        *scrapes.histogram(names.VLLM_REQUEST_GENERATION_TOKENS, TOKEN_BOUNDS, end_s, outputs, one),
        *scrapes.counter(names.VLLM_PREFIX_QUERIES, first_s, prompts),
        *scrapes.counter(names.VLLM_PREFIX_HITS, first_s, requests.cached_tokens[done]),
        *scrapes.gauge(names.VLLM_RUNNING, handed_s, end_s),
        *scrapes.gauge(names.VLLM_WAITING, requests.arrival_s[done], handed_s),
    ]
    return "\n".join([*lines, "# EOF", ""])


class _Scrapes:
    """Scrapes of all workers.

    A recording does not say which worker served a request, so that ready workers count requests in turn.
    """

    def __init__(self, recording: Recording, start_s: float, length_s: float, model: str) -> None:
        self._times = np.arange(0.0, length_s + 0.1, SCRAPE_S)
        self._stamps = [f"{start_s + at_s:.3f}" for at_s in self._times]
        self._alive = _alive(recording, self._times)
        self._model = model

    def histogram(self, name, bounds, at_s, values, counts):
        """Yield a histogram of values, each observed ``counts`` times at ``at_s``."""
        yield f"# TYPE {name} histogram"
        own = self._owners(at_s)
        for worker in range(len(self._alive)):
            mine = own == worker
            for bound in (*bounds, math.inf):
                within = mine & (values <= bound)
                le = "+Inf" if math.isinf(bound) else repr(float(bound))
                total = self._running_total(at_s[within], counts[within])
                yield from self._samples(f"{name}_bucket", worker, total, f',le="{le}"')
            yield from self._samples(f"{name}_count", worker, self._running_total(at_s[mine], counts[mine]))
            total = self._running_total(at_s[mine], (values * counts)[mine])
            yield from self._samples(f"{name}_sum", worker, total)

    def counter(self, name, at_s, amounts):
        """Yield a counter of amounts."""
        yield f"# TYPE {name} counter"
        own = self._owners(at_s)
        for worker in range(len(self._alive)):
            total = self._running_total(at_s[own == worker], amounts[own == worker])
            yield from self._samples(f"{name}_total", worker, total)

    def gauge(self, name, since_s, until_s):
        """Yield a gauge of what lasts from one time to another."""
        yield f"# TYPE {name} gauge"
        own, one = self._owners(since_s), np.ones(len(since_s))
        for worker in range(len(self._alive)):
            mine = own == worker
            begun = self._running_total(since_s[mine], one[mine])
            yield from self._samples(name, worker, begun - self._running_total(until_s[mine], one[mine]))

    def _owners(self, at_s):
        """Return the worker that counts each event: of those that answer the scrapes before and after it, in turn."""
        places = np.clip((at_s // SCRAPE_S).astype(int), 0, len(self._times) - 1)
        ready = [
            [
                worker
                for worker, (begin, last) in enumerate(self._alive)
                if begin <= place < max(last, begin + 1)
            ]
            for place in range(len(self._times))
        ]
        return np.array(
            [
                ready[place][number % len(ready[place])] if ready[place] else 0
                for number, place in enumerate(places)
            ]
        )

    def _running_total(self, at_s, amounts):
        order = np.argsort(at_s, kind="stable")
        total = np.concatenate(([0.0], np.cumsum(amounts[order])))
        return total[np.searchsorted(at_s[order], self._times, side="right")]

    def _samples(self, name, worker, values, more=""):
        begin, last = self._alive[worker]
        labels = f'engine="0",instance="10.0.0.{worker}:8000",job="vllm",model_name="{self._model}",pod="llama-{worker}"{more}'
        for place in range(begin, last + 1):
            yield f"{name}{{{labels}}} {values[place]:.10g} {self._stamps[place]}"


def _alive(recording, times):
    """Return the scrapes, from the first to the last, that each worker answered."""
    at_s = [sample.at_s for sample in recording.samples]
    found, serving = [], []
    for place, when in enumerate(times):
        sample = recording.samples[max(0, bisect_right(at_s, when) - 1)]
        count = sum(ready for ready, _, _ in sample.replicas.values())
        while len(serving) < count:
            serving.append(len(found))
            found.append([place, len(times) - 1])
        while len(serving) > count:
            found[serving.pop()][1] = place - 1
    return found


@contextmanager
def prometheus_of(text: str, folder: Path, port: int) -> Iterator[str]:
    """Run a Prometheus that holds the samples, and give its URL."""
    file, data, config = folder / "history.txt", folder / "data", folder / "prometheus.yml"
    file.write_text(text)
    config.write_text("global: {}\n")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), str(data)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    arguments = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=100y", "--log.level=warn",
    ]  # fmt: skip
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen(arguments, stdout=log, stderr=log) as server,
    ):
        try:
            _wait_ready(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, "prometheus ended"
        try:
            with urlopen(f"{url}/-/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.1)
    raise AssertionError("prometheus is not ready within 120 s")
