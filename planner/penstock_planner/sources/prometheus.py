"""Reads the same metrics from Prometheus; needs the extra ``penstock[prometheus]``.

The client library blocks, so queries run in a separate thread, with one timeout for all queries of a read.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from penstock.core import metric_names as names
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, ObservationError
from penstock.core.worker_metrics import OwnNames, names_on_page
from penstock_planner.decide.demand.reading import Reading, assess, missing
from penstock_planner.sources.base import Query, Readings, Urls, address, total_of
from penstock_planner.sources.prometheus_credentials import credentials_for
from penstock_planner.targets.base import Endpoint

READ_TIMEOUT_S = 2.0
"""Timeout for all queries of a read, real seconds. Chosen: instant queries over thousands of series take well below one second."""

FRESH_S = 30.0
"""Real seconds up to which a sample counts as fresh, even if the planner requires younger values.

Chosen: two of the usual scrape intervals of 15 s; with less, most samples of a healthy server would count as stale.
"""


@dataclass(frozen=True, slots=True)
class GraphLabels:
    """Labels that select one graph's series in Prometheus, since two graphs can serve the same model.

    The chart's PodMonitor sets the label ``graph``. Series without it count if their ``instance`` is one of the graph's processes.

    Attributes:
        model_name: Name of the served model.
        graph: Name of the graph; None does not filter by it.
        namespace: Namespace of the graph; None does not filter by it.
    """

    model_name: str
    graph: str | None = None
    namespace: str | None = None

    def selector(self, extra: str = "") -> str:
        """Return the PromQL selector for the graph's series and for series without a graph label.

        Args:
            extra: One more label matcher; empty for none.
        """
        matchers = [f'model_name="{escaped(self.model_name)}"']
        if self.namespace is not None:
            matchers.append(f'namespace="{escaped(self.namespace)}"')
        if self.graph is not None:
            matchers.append(f'graph=~"{escaped(re.escape(self.graph))}|"')
        return "{" + ",".join([*matchers, extra] if extra else matchers) + "}"


@dataclass(frozen=True, slots=True)
class _Series:
    """The newest sample of one series."""

    labels: Mapping[str, str]
    reading: Reading

    @property
    def process(self) -> tuple[str, str]:
        """Identity of the process that exports it: target and engine number."""
        labels = self.labels
        return labels.get("instance") or labels.get("pod", ""), labels.get("engine", "")

    @property
    def age_s(self) -> float:
        """Age of the sample, seconds; infinite if unknown."""
        return math.inf if self.reading.age_s is None else self.reading.age_s

    def is_of(self, worker: Endpoint) -> bool:
        """Return whether this worker exports it."""
        return worker.name == self.labels.get("pod") or address(worker.url) == self.labels.get("instance")


class PrometheusSource:
    """Metrics source that queries a Prometheus server for one graph."""

    name = "prometheus"
    counts_demand = False

    def __init__(
        self,
        client: Any,
        labels: GraphLabels,
        *,
        clock: SimulatedClock,
        routers: Urls | None = None,
        own_names: OwnNames | None = None,
    ) -> None:
        """Create a source.

        Args:
            client: Client of the Prometheus server, as returned by `connect`.
            labels: Labels of the graph's series.
            clock: Simulated clock, to convert ages.
            routers: Function that returns the routers' URLs; None if they are unknown.
            own_names: Names of the metrics in runtimes that do not use vLLM's names.
        """
        self._client = client
        self._labels = labels
        self._clock = clock
        self._routers = routers
        self._own_names = own_names or {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prometheus")

    async def read(self, query: Query) -> Readings:
        """Return the newest values in Prometheus; their age is computed from the clock of Prometheus.

        The demand at the routers is not provided, since samples are too infrequent for it.

        Raises:
            ObservationError: Prometheus does not answer within 2 real seconds (`READ_TIMEOUT_S`), or refuses a query.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                usage = await self._series(names.VLLM_KV_USAGE, query.max_age_s, upper=1.0)
                queue = await self._routers_queue(query)
                is_complete = queue is not None
                waiting = await self._waiting(query.endpoints, query.max_age_s)
        except TimeoutError as exc:
            raise ObservationError(f"prometheus: no answer within {READ_TIMEOUT_S:g} s") from exc
        return Readings(
            {worker.name: self._mean([s for s in usage if s.is_of(worker)]) for worker in query.kv_workers},
            queue if queue is not None else self._workers_queue(query, waiting),
            queue_is_complete=is_complete,
            worker_waiting={worker.name: waiting[worker.name] for worker in query.kv_workers},
        )

    def close(self) -> None:
        """Stop the thread that queries Prometheus, without waiting for a running query."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _mean(self, engines: Sequence[_Series]) -> Reading:
        """Return the mean over the engines of a data-parallel worker; missing if one of them is missing."""
        if not engines:
            return missing("no such series", source=self.name)
        total = total_of([each.reading for each in engines])
        return total if total.value is None else replace(total, value=total.value / len(engines))

    async def _routers_queue(self, query: Query) -> Reading | None:
        """Return the sum of the routers' queues; None if no router is ready, or it is unknown whether the graph has one.

        If a ready router has no series, the sum is unknown, since the sum of the others would be too small; series of routers that are gone
        are ignored. Without known routers, the label ``graph`` decides which series belong to the graph.
        """
        found = await self._series(names.ROUTER_QUEUE_REQUESTS, query.max_age_s)
        if self._routers is None:
            own = [each.reading for each in found if "graph" in each.labels]
            return total_of(own) if own else None
        addresses = {address(url) for url in self._routers()}
        by_router = {
            instance: each.reading
            for each in found
            if (instance := each.labels.get("instance", "")) in addresses
        }
        unseen = sorted(addresses - by_router.keys())
        if unseen:
            why = (
                f"{names.ROUTER_QUEUE_REQUESTS}: {len(by_router)} of {len(addresses)} routers have a series;"
                f" none with instance={' or '.join(unseen)}"
            )
            return missing(why, source=self.name)
        return total_of(list(by_router.values())) if by_router else None

    def _workers_queue(self, query: Query, waiting: Mapping[str, Reading]) -> Reading:
        """Return the sum of the prefill workers' own queues; it is a lower bound if the graph has routers."""
        workers = query.prefill_workers
        if not workers:
            return missing("no ready prefill worker", source=self.name)
        unknown = next((worker.name for worker in workers if waiting[worker.name].value is None), None)
        if unknown is not None:
            return missing(f"{unknown}: {waiting[unknown].why}", source=self.name)
        total = total_of([waiting[worker.name] for worker in workers])
        return replace(total, at_least=self._routers is not None)

    async def _waiting(self, workers: Sequence[Endpoint], max_age_s: float) -> dict[str, Reading]:
        """Return the number of requests that wait for capacity in each worker; for older workers, all waiting requests."""
        by_reason = await self._series(names.VLLM_WAITING_BY_REASON, max_age_s, extra='reason="capacity"')
        waiting: list[_Series] = []
        if not all(any(each.is_of(worker) for each in by_reason) for worker in workers):
            waiting = await self._series(names.VLLM_WAITING, max_age_s)
        found = {}
        for worker in workers:
            engines = [s.reading for s in by_reason if s.is_of(worker)] or [
                s.reading for s in waiting if s.is_of(worker)
            ]
            found[worker.name] = total_of(engines) if engines else missing("no such series", source=self.name)
        return found

    async def _series(
        self, metric: str, max_age_s: float, *, extra: str = "", upper: float | None = None
    ) -> list[_Series]:
        """Return the metric's newest samples, one per process."""
        max_age_s = max(max_age_s, self._clock.to_simulated_s(FRESH_S))
        selector = self._labels.selector(extra)
        selected = [name + selector for name in names_on_page(metric, self._own_names)]
        values = await self._ask(" + ".join(selected))
        # All these metrics are on the same page, so they have the same age.
        ages = {
            _key(item): _number(item, 0) - _number(item)
            for item in await self._ask(f"timestamp({selected[0]})")
        }
        series = []
        for item in values:
            age_s = self._clock.to_simulated_s(ages.get(_key(item), math.nan))
            reading = assess(_number(item), age_s=age_s, max_age_s=max_age_s, source=self.name, upper=upper)
            series.append(_Series(item.get("metric", {}), reading))
        return _distinct(series)

    async def _ask(self, promql: str) -> list[dict[str, Any]]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, promql)

    def _guarded(self, promql: str) -> list[dict[str, Any]]:
        return asked(
            self._client, lambda: self._client.custom_query(promql), setting="planner.metrics.prometheusUrl"
        )


def asked(client: Any, send: Callable[[], Any], *, setting: str) -> list[Any]:
    """Send a query to Prometheus and return its result as a list.

    Args:
        client: Client of the server, as returned by `connect`; its URL is used in messages.
        send: Function without parameters that sends the query with the client and returns the result; it can raise the
            errors of the client library, of requests and of json.
        setting: Name of the key or flag with the server's address, for messages.

    Raises:
        ObservationError: no server answers, the answer is not from Prometheus, or Prometheus refuses the query.
    """
    from prometheus_api_client.exceptions import PrometheusApiClientException  # noqa: PLC0415 - optional extra
    from requests import ConnectionError as NoConnection  # noqa: PLC0415 - likewise
    from requests import JSONDecodeError, Timeout  # noqa: PLC0415 - likewise

    place = urlsplit(client.url).netloc.rpartition("@")[2]
    try:
        return list(send())
    except Timeout as exc:
        raise ObservationError(f"prometheus: {place} did not answer in time") from exc
    except NoConnection as exc:
        raise ObservationError(
            f"prometheus: nothing answers at {place}; start it, or correct {setting}"
        ) from exc
    except (JSONDecodeError, KeyError, TypeError) as exc:
        raise ObservationError(
            f"prometheus: {place} does not answer as Prometheus does: no JSON with data; a login page or a proxy may be in"
            f" front of it; correct {setting}"
        ) from exc
    except PrometheusApiClientException as exc:
        raise ObservationError(f"prometheus: {place} refuses the query: {exc}") from exc
    except Exception as exc:  # whatever else requests raises
        raise ObservationError(f"prometheus: {type(exc).__name__}: {exc}") from exc


def require_client(setting: str = "--prometheus-url") -> None:
    """Check that the Prometheus client is installed; `penstock up` and `planner run` call it before they start.

    ``setting`` is the flag that needs it, for the message.

    Raises:
        ConfigError: the optional dependencies for Prometheus are not installed; the message has the command that
            installs them.
    """
    try:
        import prometheus_api_client  # noqa: F401, PLC0415 - optional extra
    except ImportError as exc:
        raise ConfigError(
            f"{setting}: prometheus-api-client is not installed; run pip install 'penstock[prometheus]'"
        ) from exc


def connect(
    url: str,
    credentials_file: str | None = None,
    *,
    timeout_s: float = READ_TIMEOUT_S,
    setting: str = "--prometheus-url",
) -> Any:
    """Return a client of the Prometheus server at ``url`` with the credentials for it; no request is sent yet.

    The result is a ``PrometheusConnect`` of the package prometheus-api-client, which is an optional dependency.

    Args:
        url: Address of the server.
        credentials_file: File as read by `credentials_for`; None for no credentials.
        timeout_s: Timeout for one query, real seconds.
        setting: Flag that names the server, for messages.

    Raises:
        ConfigError: the optional dependencies for Prometheus are not installed, or the file is invalid.
    """
    require_client(setting)
    from prometheus_api_client import PrometheusConnect  # noqa: PLC0415 - optional extra
    from requests import Session  # noqa: PLC0415 - comes with the extra
    from urllib3.util.retry import Retry  # noqa: PLC0415 - likewise

    credentials, session = credentials_for(url, credentials_file), Session()
    if credentials is not None:
        credentials.give_to(session)
    # The library's own retries take seconds; using the chain's next source is better than waiting.
    return PrometheusConnect(url=url, timeout=timeout_s, retry=Retry(total=0), session=session)


def _distinct(series: Sequence[_Series]) -> list[_Series]:
    """Return the youngest series of each process, since two scrape jobs can read the same page."""
    by_process: dict[tuple[str, str], list[_Series]] = {}
    for each in series:
        by_process.setdefault(each.process, []).append(each)
    return [min(found, key=lambda each: each.age_s) for found in by_process.values()]


def _key(item: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((key, value) for key, value in item.get("metric", {}).items() if key != "__name__")


def _number(item: Mapping[str, Any], index: int = 1) -> float:
    """Return a sample's value or, with ``index`` 0, the time of the query by Prometheus' own clock; NaN if there is none."""
    try:
        return float(item["value"][index])
    except (KeyError, IndexError, TypeError, ValueError):
        return math.nan


def escaped(text: str) -> str:
    """Return a label value escaped for PromQL, to be put between double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
