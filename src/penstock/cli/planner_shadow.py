"""`penstock planner run --no-operation --shadow`: decide next to another autoscaler, from its Prometheus, and change nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.api import Role
from penstock.assess.history import PrometheusHistory
from penstock.assess.observed import COLD_START_S
from penstock.assess.reading import Subject
from penstock.assess.shadow.backend import ShadowBackend
from penstock.assess.shadow.fleet import ShadowFleet
from penstock.assess.shadow.reader import open_reader
from penstock.assess.shadow.record import KEY, ShadowRecord
from penstock.assess.shadow.watched import FLAG, ReplicaSource, WatchedPool, watched_pools
from penstock.cli.cluster import Connection, require_packages
from penstock.core.clock import SimulatedClock
from penstock.core.durations import duration_text
from penstock.core.errors import ConfigError
from penstock.core.flags import duration_flag, flag
from penstock.core.http import loop
from penstock_planner.decide.codec import to_plain
from penstock_planner.service import PlannerService, run_until_stopped
from penstock_planner.sources.base import SourceChain
from penstock_planner.sources.prometheus import connect

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient

MODEL_FLAG = "--served-model-name"

READ_S = 10.0
"""Timeout of one query, real seconds. Chosen: below the usual scrape interval of 15 s."""


@dataclass(frozen=True, slots=True)
class ShadowFlags:
    """What `penstock planner run` takes to watch a fleet that something else scales."""

    shadow: tuple[str, ...] = flag(
        "Decide next to another autoscaler, from --prometheus-url alone, and change nothing: watch this Deployment"
        " (replicas from kube-state-metrics), or the scraped processes that the matchers select ({}: all of the model)."
        " Repeatable for prefill=... and decode=...; needs --no-operation.",
        default=(),
        metavar="[ROLE=][NAMESPACE/]DEPLOYMENT|[ROLE=]{MATCHERS}",
    )
    replicas_from: ReplicaSource | None = flag(
        "With --shadow: where a Deployment's replicas are read, prometheus (kube-state-metrics) or scale (its /scale, with"
        " --kubeconfig).",
        unset="prometheus",
    )
    match: tuple[str, ...] = flag(
        'With --shadow: further label matcher of the engines\' series, as namespace="prod"; repeatable.',
        default=(),
        metavar="MATCHER",
    )
    cold_start_s: float | None = duration_flag(
        "With --shadow: time from requesting a replica until it serves.",
        name="--cold-start",
        ge=0,
        unset=duration_text(COLD_START_S),
    )


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """A shadow planner's run, before it starts.

    Attributes:
        service: Options, graph and addresses of the planner.
        pools: Watched pools by role.
        replicas_from: Source of the replica counts of Deployments.
        matchers: Further PromQL matchers of the engines' series.
        cold_start_s: Simulated seconds from requesting a replica until it serves.
    """

    service: PlannerService
    pools: Mapping[Role, WatchedPool]
    replicas_from: ReplicaSource
    matchers: tuple[str, ...]
    cold_start_s: float

    @classmethod
    def of(cls, flags: ShadowFlags, service: PlannerService, explicit: Mapping[str, Any]) -> ShadowRun:
        """Return the run that the flags ask for.

        Raises:
            ConfigError: flags contradict each other or one is missing, or the graph has other roles.
        """
        pools = watched_pools(flags.shadow)
        _refuse(service, explicit)
        _check_roles(service, pools)
        replicas_from = flags.replicas_from or ReplicaSource.PROMETHEUS
        unnamed = next((each for each in pools.values() if each.deployment is None), None)
        if replicas_from is ReplicaSource.SCALE and unnamed is not None:
            raise ConfigError(f"--replicas-from scale: {FLAG} {unnamed} names no Deployment; give its name")
        if replicas_from is ReplicaSource.PROMETHEUS and flags.replicas_from and len(pools) == 1 and unnamed:
            raise ConfigError(
                f"--replicas-from prometheus: {FLAG} {unnamed} counts scraped processes; name a Deployment, or remove it"
            )
        stated = (
            []
            if service.graph is None
            else [each.startup_seconds for each in service.graph.spec.workers.values()]
        )
        known = max((each for each in stated if each), default=COLD_START_S)
        cold_start_s = known if flags.cold_start_s is None else flags.cold_start_s
        return cls(service, pools, replicas_from, flags.match, cold_start_s)

    def run(self, connection: Connection) -> None:
        """Decide until SIGTERM.

        Raises:
            ConfigError: the server knows no such model, or the cluster no such Deployment.
            ObservationError: the server does not answer, or lacks a series.
            ClusterError: the API server does not answer.
        """
        if self.replicas_from is ReplicaSource.SCALE:
            require_packages("--replicas-from scale", "kubernetes")
        os.umask(0o077)  # ledger, state and event files are one user's, as all that `penstock up` leaves

        async def main(stop: asyncio.Event) -> None:
            if self.replicas_from is ReplicaSource.SCALE:
                async with connection.open() as kube:
                    await self._decide(kube, stop)
            else:
                await self._decide(None, stop)

        loop.run(main)

    async def _decide(self, kube: KubeClient | None, stop: asyncio.Event) -> None:
        service, options = self.service, self.service.options
        assert options.prometheus_url is not None  # noqa: S101 - checked before
        client = connect(options.prometheus_url, options.prometheus_credentials, timeout_s=READ_S)
        subject = Subject(options.served_model_name, self.matchers, setting=MODEL_FLAG)
        reader = await open_reader(
            PrometheusHistory(client, setting="--prometheus-url"), subject, self.pools, kube=kube
        )
        clock = SimulatedClock(service.speed)
        gpus = {
            role: options.prefill_engine_num_gpu if role is Role.PREFILL else options.decode_engine_num_gpu
            for role in self.pools
        }
        backend = ShadowBackend(
            reader, ShadowFleet(self.cold_start_s, gpus), now_s=clock.now_s, speed=service.speed
        )
        # A planner that reads more often than the server scrapes would take one scrape for several.
        pull_s = max(options.metric_pulling_interval, clock.to_simulated_s(reader.scrape_s))
        intervals = {
            "metric_pulling_interval": pull_s,
            "adjustment_interval": max(options.adjustment_interval, pull_s),
        }
        record = ShadowRecord(
            prometheus=options.prometheus_url,
            credentials=options.prometheus_credentials,
            model=options.served_model_name,
            matchers=self.matchers,
            pools=tuple(str(each) for each in self.pools.values()),
            replicas_from=self.replicas_from.value,
            cold_start_s=self.cold_start_s,
            scrape_s=reader.scrape_s,
        )
        run = replace(service, options=options.model_copy(update=intervals), about={KEY: to_plain(record)})
        chain = SourceChain([backend], now_s=clock.now_s, real_now_s=time.monotonic)
        await run_until_stopped(run, backend, None, stop, observer=backend, source=chain)


def _refuse(service: PlannerService, explicit: Mapping[str, Any]) -> None:
    """Refuse options that contradict ``--shadow``, and name those that it needs."""
    options = service.options
    if not options.no_operation:
        raise ConfigError(f"{FLAG}: only watches; add --no-operation")
    if options.prometheus_url is None:
        raise ConfigError(f"--prometheus-url: required with {FLAG}, which reads everything from it")
    if service.graph is None and MODEL_FLAG.removeprefix("--") not in explicit:
        raise ConfigError(f"{MODEL_FLAG}: required with {FLAG}; give the model's name in the metrics' labels")
    for name in ("router-url", "metrics-source"):
        if name in explicit:
            raise ConfigError(f"--{name}: has no effect with {FLAG}, which reads Prometheus alone; remove it")


def _check_roles(service: PlannerService, pools: Mapping[Role, WatchedPool]) -> None:
    if service.graph is None:
        return
    own = {each.role for each in service.graph.spec.workers.values()}
    if own != set(pools):
        watched, planned = (" and ".join(sorted(each.value for each in roles)) for roles in (set(pools), own))
        raise ConfigError(f"{FLAG}: {watched}, but the graph has {planned}; the roles must be the same")
