"""Runs one planner loop per graph: starts it, restarts it when its inputs change, and stops it.

Each graph has its own task. A failure in one task is logged, reported in the graph's status and retried with exponential backoff. It
does not affect other graphs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.api import GraphDeployment, Role, as_pool_member
from penstock.api.manifests.validation import problems_outside_pools, validate
from penstock.core.backoff import Backoff
from penstock.core.errors import ClusterError, ConfigError, InvalidSpecError, ManifestProblem, PenstockError
from penstock.core.logs import bind_task, get_logger
from penstock.kube.objects.names import paused_by, status_pool
from penstock.performance.profile import PerformanceProfile
from penstock_planner.cluster.profiles import POLL_S, ConfigMapProfiles, ProfileError
from penstock_planner.cluster.status import PlannerReason, Report
from penstock_planner.cluster.watch import Key, Object, Watch
from penstock_planner.decide.config import DecideConfig
from penstock_planner.options import PlannerOptions, join
from penstock_planner.targets.kubernetes import ScaledService, services_of


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Everything that a graph's planner loop depends on. A loop needs no restart as long as its plan stays equal.

    Attributes:
        options: Options of the planner, from the graph and the command line.
        config: Configuration of the decisions, derived from the options.
        services: Scaled worker services by role.
        disabled: Reason for which the graph has no planner; empty if it has one.
        paused: Reason for which the planner decides without acting; empty if it acts.
        unused: Sentence about keys of the graph that have no effect on a cluster; empty if there are none.
    """

    options: PlannerOptions
    config: DecideConfig
    services: Mapping[Role, ScaledService]
    disabled: str = ""
    paused: str = ""
    unused: str = ""


def parse(obj: Mapping[str, Any]) -> GraphDeployment:
    """Return a watched Kubernetes object parsed as a GraphDeployment, including whether it belongs to a GPU pool.

    Args:
        obj: The object as the API server returned it, as from `Watch.graph`.

    Raises:
        InvalidSpecError: the manifest of the graph is invalid for this version of Penstock.
    """
    keys = ("apiVersion", "kind", "metadata", "spec")
    problems, graph = validate(GraphDeployment, {key: obj[key] for key in keys})
    if graph is not None and draws(obj):
        return as_pool_member(graph)
    if graph is not None:
        problems = problems_outside_pools(graph)
    if problems or not isinstance(graph, GraphDeployment):
        raise InvalidSpecError(
            [ManifestProblem(".".join(map(str, path)), message, "graph") for path, message in problems]
        )
    return graph


def draws(obj: Mapping[str, Any]) -> bool:
    """Return whether a watched graph takes its GPUs from a GPU pool, according to the status that the operator writes.

    Args:
        obj: The graph's object as the API server returned it, as from `Watch.graph`.
    """
    return status_pool(obj) is not None


def plan_of(
    graph: GraphDeployment,
    overrides: Mapping[str, Any],
    performance: PerformanceProfile | None = None,
    *,
    paused: str = "",
    is_drawing: bool = False,
) -> GraphPlan:
    """Return a graph's plan: everything that its planner loop depends on.

    Args:
        graph: Graph as returned by `parse`.
        overrides: Options of the planner process, by kebab-case name, that replace the options in the graph's manifest.
        performance: Performance profile for mode sla; None in other modes.
        paused: Reason for which the graph is paused; empty if it is not.
        is_drawing: Whether the graph takes its GPUs from a GPU pool.

    Raises:
        ConfigError: the planner cannot run with these options.
    """
    disabled = why_disabled(graph)
    given = {**overrides, "no-operation": True} if paused else overrides
    options = join(given={} if disabled else given, graph=None if disabled else graph)
    config = options.decide_config(graph, performance)
    unused = ""
    has_gates = is_drawing or config.max_gpu_budget is not None
    if config.switches_roles and not may_switch(graph, has_gates=has_gates):
        unused = "engine.switchable has no effect here: it needs planner.maxGpuBudget or a GpuPool, and replicas of one pod"
        config = replace(config, switches_roles=False)
    return GraphPlan(options, config, services_of(graph), disabled, paused, unused)


def may_switch(graph: GraphDeployment, *, has_gates: bool) -> bool:
    """Return whether workers of the graph can change between prefill and decode without a restart, which saves the start of a pod.

    This needs pods that wait with a scheduling gate until the GPU budget has room, so that a switched worker can
    replace a gated pod, and replicas of exactly one pod.

    Args:
        graph: The parsed graph.
        has_gates: Whether the graph's pods have such a scheduling gate.
    """
    nodes = {each.nodes_per_replica for each in graph.spec.workers.values()}
    return has_gates and nodes == {1}


def why_disabled(graph: GraphDeployment) -> str:
    """Return the reason for which a graph has no planner, in words; empty if the graph has a planner."""
    planner = graph.spec.planner
    if not planner.enabled:
        return "spec.planner.enabled is false"
    if not any(service.scaling for service in graph.spec.workers.values()):
        return "no worker service has spec.services.*.scaling"
    return ""


PAUSES: Final = Backoff(first_s=1.0, limit_s=60.0)
"""Backoff, in real seconds, before the failed planner of a graph is restarted: 1, 2, 4 ... 60.

Chosen: the ledger lock of the previous leader is released within seconds, and a bug must not fill the log.
"""

STEADY_S: Final = 120.0
"""Real seconds (120) for which a planner must run to count as healthy; after its next failure the backoff starts at its
shortest."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannerJob:
    """One run of one graph's planner loop, with inputs that do not change during the run.

    Attributes:
        key: Namespace and name of the graph.
        graph: The parsed graph.
        plan: Plan of the graph: what its planner loop depends on.
        live: The graph's object, as watched in the cluster, from which ``graph`` and ``plan`` were made.
    """

    key: Key
    graph: GraphDeployment
    plan: GraphPlan
    live: Object


Work = Callable[[PlannerJob, asyncio.Event], Coroutine[Any, Any, None]]
"""Function that plans one graph until the event is set."""


class Fleet:
    """Runs one planner loop for each graph that this process plans.

    Attributes:
        poll_s: Real seconds between two reads of a graph's performance profile.
        pauses: Rule for how many real seconds to wait before a graph's planner is restarted, by its number of failures.
    """

    def __init__(
        self,
        graphs: Watch,
        *,
        overrides: dict[str, Any],
        profiles: ConfigMapProfiles,
        work: Work,
        say: Callable[[Key, Report], None],
        forget: Callable[[Key], None],
        poll_s: float = POLL_S,
        pauses: Backoff = PAUSES,
    ) -> None:
        """Create a fleet without planners; `run` starts them.

        Args:
            graphs: Copies of the watched graphs.
            overrides: Options of the process, by kebab-case name, that replace each graph's own options.
            profiles: Reader of the graphs' performance profiles.
            work: Function that plans one graph.
            say: Callback that receives the report for a graph's status.
            forget: Callback that is called when a graph's task ends, because the graph was deleted.
            poll_s: Real seconds between two reads of a graph's profile.
            pauses: Backoff, in real seconds, after failures of a graph's planner.
        """
        self.poll_s = poll_s
        self.pauses = pauses
        self._graphs = graphs
        self._overrides = overrides
        self._profiles = profiles
        self._work = work
        self._say = say
        self._forget = forget
        self._queued: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._changed: dict[Key, asyncio.Event] = {}

    def enqueue(self, key: Key) -> None:
        """Have the planner of a graph started, restarted or stopped as needed, because the graph was added, changed or deleted.

        Returns at once.

        Args:
            key: Namespace and name of the graph.
        """
        self._queued[key] = None
        self._wake.set()

    async def run(self) -> None:
        """Keep the planners of all graphs running until this call is cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                queued, self._queued = self._queued, {}
                for key in queued:
                    if key in self._changed:
                        self._changed[key].set()
                    elif self._graphs.graph(key) is not None:
                        self._changed[key] = asyncio.Event()
                        group.create_task(self._tend(key), name=f"planner {key[0]}/{key[1]}")

    async def _tend(self, key: Key) -> None:
        bind_task(namespace=key[0], graph=key[1])
        failures = 0
        loop = asyncio.get_running_loop()
        try:
            while (live := self._graphs.graph(key)) is not None:
                self._changed[key].clear()
                started_s = loop.time()
                is_over = await self._attempt(key, live)
                if is_over:
                    continue
                failures = 1 if loop.time() - started_s >= STEADY_S else failures + 1
                await self._changed_within(key, self.pauses.pause_s(failures))
        finally:
            self._changed.pop(key, None)
            self._forget(key)
            if self._graphs.graph(key) is not None:
                self.enqueue(key)

    async def _attempt(self, key: Key, live: Object) -> bool:
        """Run a graph's planner until its plan changes or the graph is deleted; return False if it failed."""
        try:
            graph = parse(live)
            plan = await self._plan_of(key, live, graph)
            if plan.disabled:
                self._report(key, live, PlannerReason.DISABLED, plan.disabled)
                await self._until_other(key, live, None)
                return True
            log.info("planner of graph started")
            await self._run(PlannerJob(key, graph, plan, live))
        except ProfileError as exc:
            self._report(key, live, exc.reason, str(exc))
            log.info("graph lacks the profile that its planner needs", why=str(exc))
            await self._changed_within(key, self.poll_s)
        except ConfigError as exc:
            self._report(key, live, PlannerReason.MISCONFIGURED, str(exc))
            log.warning("graph cannot be planned", why=str(exc))
            return False
        except PenstockError as exc:
            self._report(key, live, PlannerReason.FAILED, str(exc))
            log.warning("planner of graph failed", why=str(exc))
            return False
        except Exception as exc:  # root of the graph's task: the others must not notice
            self._report(key, live, PlannerReason.FAILED, f"{type(exc).__name__}: {exc}")
            log.exception("planner of graph failed")
            return False
        return True

    async def _run(self, job: PlannerJob) -> None:
        """Plan until the graph is deleted or its plan changes."""
        stop = asyncio.Event()
        worker = asyncio.create_task(self._work(job, stop))
        watcher = asyncio.create_task(self._until_other(job.key, job.live, job.plan))
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await worker
        finally:
            watcher.cancel()
            worker.cancel()
            await asyncio.wait({worker, watcher})

    async def _plan_of(self, key: Key, live: Object, graph: GraphDeployment) -> GraphPlan:
        """Return a graph's plan, with its profile.

        Raises:
            ConfigError: the planner cannot run.
            ClusterError: the profile cannot be read.
        """
        is_planned = not why_disabled(graph)
        performance = await self._profiles.read(key, graph) if is_planned else None
        return plan_of(graph, self._overrides, performance, paused=paused_by(live), is_drawing=draws(live))

    async def _until_other(self, key: Key, live: Object, plan: GraphPlan | None) -> None:
        """Wait until the graph is deleted or its plan changes; without a plan, until the graph changes in any way."""
        planned, uid = _version(live), live["metadata"].get("uid")
        polled = plan is not None and self._profiles.is_read_again(parse(live))
        while True:
            await self._changed_within(key, self.poll_s if polled else None)
            self._changed[key].clear()
            now = self._graphs.graph(key)
            if now is None or now["metadata"].get("uid") != uid:
                return
            if not polled and _version(now) == planned:
                continue
            planned = _version(now)
            try:
                if plan is None or await self._plan_of(key, now, parse(now)) != plan:
                    return
            except ConfigError:
                return
            except ClusterError as exc:  # the last profile read stays valid
                log.warning("profile not read again", why=str(exc))

    async def _changed_within(self, key: Key, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed[key].wait()
        except TimeoutError:
            return

    def _report(self, key: Key, live: Object, reason: PlannerReason, message: str) -> None:
        self._say(key, last_report(live, reason, " ".join(message.split())))


def _version(live: Object) -> tuple[int | None, str, bool]:
    """Return a value that changes whenever the graph's plan can change, except for a change of its profile."""
    return live["metadata"].get("generation"), paused_by(live), draws(live)


def last_report(live: Object, reason: PlannerReason, message: str) -> Report:
    """Return a report for the graph's status that has a new reason and message, and the same decisions as the status has now.

    Args:
        live: The graph's object as watched in the cluster.
        reason: Reason of the condition PlannerActive.
        message: Message of the condition PlannerActive; cut after 1000 characters.
    """
    said = (live.get("status") or {}).get("planner") or {}
    return Report(
        reason=reason,
        message=message[:1000],
        generation=live["metadata"].get("generation", 0),
        last_decision=said.get("lastDecision", ""),
        decision_id=said.get("decisionId", ""),
        decision_time=said.get("decisionTime", ""),
        earlier=tuple(said.get("earlier") or ()),
        served_in_time=said.get("servedInTime", ""),
        predicted_in_time=said.get("predictedInTime", ""),
        gpus=said.get("gpus", 0),
        budget=said.get("budget"),
        wants=said.get("wants") or {},
    )
