"""Reads a watched fleet: its engines' counters from a Prometheus, and its replicas from there or from ``/scale``. It writes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.api import Role
from penstock.assess.history import Period, PrometheusHistory
from penstock.assess.reading import MINUTE_S, Subject, engine_of
from penstock.assess.shadow.counters import CounterNames, Counts, counter_names, counts_of
from penstock.assess.shadow.watched import FLAG, WatchedPool
from penstock.core.errors import ConfigError, NotFoundError, ObservationError
from penstock_planner.decide.demand.observation import PoolCounts

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient

USUAL_SCRAPE_S: Final = 15.0
"""Interval between scrapes, real seconds, until two samples of one series have shown it. Chosen: a common setting."""
OLD_SCRAPES: Final = 4
"""Scrape intervals after which the newest sample is too old to decide by. Chosen: two lost scrapes are common."""
LEAST_OLD_S: Final = 30.0
"""Real seconds up to which a sample is never too old. Chosen: two of the usual scrape intervals."""
_READY: Final = "kube_deployment_status_replicas_ready"
_ALL: Final = "kube_deployment_status_replicas"


@dataclass(frozen=True, slots=True)
class WorldState:
    """One reading of the watched fleet.

    Attributes:
        counts: What the engines of each role have counted.
        replicas: Replicas by role; scraped processes are all ready.
    """

    counts: Mapping[Role, Counts]
    replicas: Mapping[Role, PoolCounts]


class WorldReader:
    """Reads one watched fleet. `open_reader` makes it, so that what is missing is known before the planner starts."""

    def __init__(
        self,
        history: PrometheusHistory,
        subject: Subject,
        pools: Mapping[Role, WatchedPool],
        *,
        names: CounterNames,
        scrape_s: float,
        selectors: Mapping[Role, str],
        kube: KubeClient | None,
    ) -> None:
        """Create a reader.

        Args:
            history: The Prometheus server.
            subject: The model's series.
            pools: The watched pools.
            names: Names of the series to read.
            scrape_s: Real seconds between two scrapes.
            selectors: PromQL selector of each role's series, with braces and without a name.
            kube: Client for ``/scale``; None reads the replicas from Prometheus.
        """
        self._history = history
        self._subject = subject
        self._pools = pools
        self._names = names
        self._selectors = selectors
        self._kube = kube
        self.scrape_s = scrape_s

    @property
    def names(self) -> CounterNames:
        """Names of the series that are read."""
        return self._names

    async def read(self) -> WorldState:
        """Return the newest counts and replicas.

        Raises:
            ObservationError: the server does not answer, or its samples are too old.
            ClusterError: the API server does not answer.
        """
        counts = await asyncio.to_thread(self._counts)
        return WorldState(
            counts, {role: await self._replicas(pool, counts[role]) for role, pool in self._pools.items()}
        )

    def _counts(self) -> dict[Role, Counts]:
        found = {}
        for role, selector in self._selectors.items():
            names = "|".join(self._names.all)
            samples = self._history.newest(f'{{__name__=~"{names}",{selector.removeprefix("{")}')
            times = self._history.newest(f"timestamp({self._names.running}{selector})")
            if not samples or not times:
                raise ObservationError(
                    f"prometheus: no process of {self._subject.model} ({role.value}) is scraped at present"
                )
            newest_s = max(each.value for each in times)
            age_s = times[0].asked_s - newest_s
            if age_s > max(LEAST_OLD_S, OLD_SCRAPES * self.scrape_s):
                raise ObservationError(
                    f"prometheus: the newest sample of {self._subject.model} is {age_s:.0f} s old"
                )
            found[role] = counts_of(
                *([(each.labels, each.value) for each in part] for part in (samples, times))
            )
        return found

    async def _replicas(self, pool: WatchedPool, counts: Counts) -> PoolCounts:
        if pool.deployment is None:
            return PoolCounts(counts.processes(self._names.running))
        if self._kube is not None:
            return await scale_of(self._kube, pool)
        return await asyncio.to_thread(self._counted, pool)

    def _counted(self, pool: WatchedPool) -> PoolCounts:
        found = self._history.newest(f'{{__name__=~"{_READY}|{_ALL}",{pool.kube_matchers}}}')
        by_name: dict[str, int] = {}
        for each in found:
            name = each.labels.get("__name__", "")
            by_name[name] = max(by_name.get(name, 0), round(each.value))
        if _READY not in by_name:
            raise ObservationError(
                f"prometheus: no {_READY} of Deployment {pool.deployment}; scrape kube-state-metrics, check the name, or count"
                f" scraped processes with {FLAG} '{{}}'"
            )
        ready = by_name[_READY]
        return PoolCounts(ready, max(0, by_name.get(_ALL, ready) - ready))


async def scale_of(kube: KubeClient, pool: WatchedPool) -> PoolCounts:
    """Return the replicas of a Deployment by its ``/scale``, which counts ready ones and others together."""
    path = f"/apis/apps/v1/namespaces/{pool.namespace or 'default'}/deployments/{pool.deployment}/scale"
    try:
        found = await kube.raw_get(path)
    except NotFoundError as exc:
        raise ConfigError(
            f"{FLAG} {pool}: namespace {pool.namespace or 'default'} has no such Deployment; give {FLAG} NAMESPACE/DEPLOYMENT"
        ) from exc
    existing = int(found.get("status", {}).get("replicas") or 0)
    asked = int(found.get("spec", {}).get("replicas") or 0)
    return PoolCounts(min(existing, asked), max(0, asked - existing))


async def open_reader(
    history: PrometheusHistory,
    subject: Subject,
    pools: Mapping[Role, WatchedPool],
    *,
    kube: KubeClient | None,
) -> WorldReader:
    """Return a reader of a watched fleet that has read it once.

    Args:
        history: The Prometheus server.
        subject: The model's series.
        pools: The watched pools.
        kube: Client for the Deployments' ``/scale``; None reads the replicas from Prometheus.

    Raises:
        ConfigError: the server knows no such model, or the cluster no such Deployment.
        ObservationError: the server does not answer, or lacks a series.
        ClusterError: the API server does not answer.
    """
    # The names of the last hour, so that an idle night's start still knows them.
    now_s = time.time()
    engine, known = await asyncio.to_thread(engine_of, history, subject, Period(now_s - 3600, 60, MINUTE_S))
    names = counter_names(engine, known)
    selectors = {role: subject.selector(engine, *pool.matchers) for role, pool in pools.items()}
    running = [names.running + selector for selector in selectors.values()]
    scrape_s = await asyncio.to_thread(_scrape_interval, history, running)
    reader = WorldReader(
        history,
        subject,
        pools,
        names=names,
        scrape_s=scrape_s,
        selectors=selectors,
        kube=kube,
    )
    await reader.read()
    return reader


def _scrape_interval(history: PrometheusHistory, series: list[str]) -> float:
    """Return the shortest real time between the newest two samples of a series."""
    found = [
        times[-1] - times[-2]
        for each in series
        for times in history.sample_times(f"{each}[5m]")
        if len(times) > 1
    ]
    return max(1.0, min(found, default=USUAL_SCRAPE_S))
