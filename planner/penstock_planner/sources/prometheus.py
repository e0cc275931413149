"""Reads the same names from Prometheus; needs the extra ``penstock[prometheus]``.

The client library blocks, so queries run in one thread of their own, each with a time-out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from penstock_core import metric_names as names
from penstock_core.clock import ModelClock
from penstock_core.errors import ConfigError, ObservationError
from penstock_planner.decide.reading import Reading, judge, missing
from penstock_planner.sources.base import Query, Readings, address

QUERY_TIMEOUT_S = 2.0
"""Real seconds for one query. Chosen: instant queries over thousands of series take well below one."""

FRESH_S = 30.0
"""Real seconds up to which a sample is fresh even if the planner asks for younger ones. Chosen: two of the
usual 15 s scrape intervals; with less, most samples of a healthy server would count as stale."""


class Client(Protocol):
    """The one method of `prometheus_api_client.PrometheusConnect` that is used."""

    def custom_query(self, query: str) -> list[dict[str, Any]]:
        """Return an instant vector."""
        ...


class PrometheusSource:
    """One Prometheus server."""

    name = "prometheus"

    def __init__(
        self, client: Client, *, served_model_name: str, clock: ModelClock, namespace: str | None = None
    ) -> None:
        """Build the source.

        Args:
            client: Of the server.
            served_model_name: Label ``model_name`` of the series.
            clock: For ages.
            namespace: Label ``namespace`` of the series; None: not asked for.
        """
        self._client = client
        labels = {"model_name": served_model_name, **({"namespace": namespace} if namespace else {})}
        self._selector = "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prometheus")

    async def read(self, query: Query) -> Readings:
        """Return the newest samples with their age by Prometheus' own timestamps.

        Raises:
            ObservationError: Prometheus does not answer.
        """
        max_age_s = max(query.max_age_s, self._clock.to_model_s(FRESH_S))
        kv = await self._vector(names.VLLM_KV_USAGE)
        waiting = await self._vector(names.ROUTER_QUEUE_REQUESTS)
        queue: Reading
        if waiting:
            total = sum(value for value, _ in waiting.values())
            oldest_s = max(age_s for _, age_s in waiting.values())
            queue = judge(total, age_s=oldest_s, max_age_s=max_age_s, source=self.name)
        else:
            queue = await self._workers_queue(query, max_age_s)
        found = {
            worker.name: kv.get(worker.name) or kv.get(address(worker.url)) for worker in query.kv_workers
        }
        return Readings(
            {
                name: missing("no such series", source=self.name)
                if sample is None
                else judge(sample[0], age_s=sample[1], max_age_s=max_age_s, source=self.name, upper=1.0)
                for name, sample in found.items()
            },
            queue,
            queue_is_whole=bool(waiting),
        )

    def close(self) -> None:
        """Leave the thread to end by itself; a query under way is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _workers_queue(self, query: Query, max_age_s: float) -> Reading:
        by_reason = await self._vector(names.VLLM_WAITING_BY_REASON, extra='reason="capacity"')
        waiting = by_reason or await self._vector(names.VLLM_WAITING)
        total, oldest_s = 0.0, 0.0
        for worker in query.prefill_workers:
            sample = waiting.get(worker.name) or waiting.get(address(worker.url))
            if sample is None:
                return missing(f"{worker.name}: no such series", source=self.name)
            total += sample[0]
            oldest_s = max(oldest_s, sample[1])
        if not query.prefill_workers:
            return missing("no ready prefill worker", source=self.name)
        return judge(total, age_s=oldest_s, max_age_s=max_age_s, source=self.name)

    async def _vector(self, metric: str, *, extra: str = "") -> dict[str, tuple[float, float]]:
        """Return (value, age in modelled seconds) by instance, and by pod where there is such a label."""
        selector = self._selector[:-1] + ("," + extra if extra else "") + "}"
        values = await self._ask(metric + selector)
        stamps = {_series(item): _number(item) for item in await self._ask(f"timestamp({metric}{selector})")}
        now_s = time.time()
        samples: dict[str, tuple[float, float]] = {}
        for item in values:
            stamp_s = stamps.get(_series(item))
            age_s = self._clock.to_model_s(now_s - stamp_s) if stamp_s is not None else float("nan")
            for label in ("instance", "pod"):
                key = item.get("metric", {}).get(label)
                if key:
                    samples[key] = (_number(item), age_s)
        return samples

    async def _ask(self, promql: str) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await loop.run_in_executor(self._thread, self._guarded, promql)
        except TimeoutError as exc:
            raise ObservationError(f"prometheus: no answer to {promql} in {QUERY_TIMEOUT_S:g} s") from exc

    def _guarded(self, promql: str) -> list[dict[str, Any]]:
        try:
            return self._client.custom_query(promql)
        except Exception as exc:  # the library raises its own, requests' and json's errors
            raise ObservationError(f"prometheus: {type(exc).__name__}: {exc}") from exc


def connect(url: str) -> Client:
    """Return a client of the server at ``url``; nothing is sent yet.

    Raises:
        ConfigError: the extra is not installed.
    """
    try:
        from prometheus_api_client import PrometheusConnect  # noqa: PLC0415 - optional extra
        from urllib3.util.retry import Retry  # noqa: PLC0415 - comes with the extra
    except ImportError as exc:
        raise ConfigError(
            "--prometheus-url: prometheus-api-client is not installed; run pip install 'penstock[prometheus]'"
        ) from exc
    # The library's own retries take seconds; the chain's next source is better than waiting.
    client: Client = PrometheusConnect(url=url, timeout=QUERY_TIMEOUT_S, retry=Retry(total=0))
    return client


def _series(item: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    labels = item.get("metric", {})
    return tuple(sorted((key, value) for key, value in labels.items() if key != "__name__"))


def _number(item: Mapping[str, Any]) -> float:
    try:
        return float(item["value"][1])
    except (KeyError, IndexError, TypeError, ValueError):
        return float("nan")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
