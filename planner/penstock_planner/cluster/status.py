"""Reports a graph's planner to users: ``status.planner``, the condition PlannerActive, and an Event for each decision.

The status is written with server-side apply, only if it differs from the live object. Observers of the loop must not block, so reports
and Events are queued, and separate tasks write them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Any, Final

from penstock.api import Role
from penstock.core.errors import NotFoundError, PenstockError
from penstock.core.logs import get_logger
from penstock.core.stamps import stamp
from penstock.gpu_pool.bid import WANTS_S
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.objects.names import PLANNER
from penstock_planner.cluster.watch import PLANNER_CONDITION, Key
from penstock_planner.core.phase import PlannerPhase
from penstock_planner.decide.bounds.pool import bids_in
from penstock_planner.decide.config import MAX_BACKOFF_INTERVALS, DecideConfig
from penstock_planner.decide.decision import Action, Decision, Reason, RoleDecision
from penstock_planner.observers import PlannerView
from penstock_planner.problems import UnknownSignals
from penstock_planner.served_shares import shares_of

STEADY_S: Final = 60.0
"""Simulated seconds (60) between two updates of the figures in a status that change with every decision.

Chosen: each update is one API write."""

WRITE_TIMEOUT_S: Final = 10.0
"""Timeout for writing one status or Event, real seconds. Chosen: a busy API server answers within it; other writes wait meanwhile."""

RETRY_S: Final = 5.0
"""Real seconds after which a failed write is retried. Chosen: a status may be this old."""

TRUST_S: Final = 30.0
"""Real seconds (30) for which a written status is assumed to be in place although the watch does not show it yet.

Chosen: watches lag by milliseconds; if the status still differs after this time, another writer has overwritten it.
"""

SILENT_READINGS: Final = 4
"""Readings in a row that a worker has to miss at every router to be reported as silent. Chosen: one reading may time out, and
with the default of one reading a second a frozen worker is reported within five."""

log = get_logger(__name__)


def silent_after_s(interval_s: float) -> float:
    """Return the age, in seconds, above which a worker counts as silent: that of the newest value that any router has of it.

    A silent worker is one from which no router gets values. The age is four times (`SILENT_READINGS`) the interval, but
    at least 4 s; it is simulated or real seconds, as ``interval_s`` is.

    Args:
        interval_s: Time between two readings of the workers by a router, in simulated or real seconds.
    """
    return SILENT_READINGS * max(1.0, interval_s)


class PlannerReason(StrEnum):
    """Reason of the condition PlannerActive in a graph's status; a closed set.

    Attributes:
        OBSERVING: The planner decides at its interval.
        ADJUSTING: The planner waits until replicas have started or drained.
        BACKING_OFF: A scale-up failed, and is retried after a pause.
        SCALED_BY: Another client sets a role's replicas, and the planner leaves the role to it.
        NO_OPERATION: The planner decides without scaling, because it is configured so.
        PAUSED: The planner decides without scaling, because the graph is paused.
        METRICS_MISSING: Metrics have been unknown for too long.
        WORKER_SILENT: No router gets values from a worker.
        TARGET_UNAVAILABLE: The cluster cannot be watched.
        DISABLED: The graph has no planner.
        MISCONFIGURED: The options of the planner are invalid.
        PROFILE_MISSING: The performance profile for mode sla does not exist.
        PROFILE_INVALID: The performance profile for mode sla cannot be used.
        FAILED: The planner ended with an error, and is restarted.
    """

    OBSERVING = "Observing"
    ADJUSTING = "Adjusting"
    BACKING_OFF = "BackingOff"
    SCALED_BY = "ScaledBy"
    NO_OPERATION = "NoOperation"
    PAUSED = "Paused"
    METRICS_MISSING = "MetricsMissing"
    WORKER_SILENT = "WorkerSilent"
    TARGET_UNAVAILABLE = "TargetUnavailable"
    DISABLED = "Disabled"
    MISCONFIGURED = "Misconfigured"
    PROFILE_MISSING = "ProfileMissing"
    PROFILE_INVALID = "ProfileInvalid"
    FAILED = "Failed"


_TRUTH = {
    PlannerReason.OBSERVING: "True",
    PlannerReason.ADJUSTING: "True",
    PlannerReason.WORKER_SILENT: "True",
    PlannerReason.NO_OPERATION: "True",
    PlannerReason.TARGET_UNAVAILABLE: "Unknown",
}
"""Status of the condition by reason; False for reasons that are not listed."""


_SHOWN_EARLIER: Final = 9
"""Maximum number of earlier decisions in a status. Chosen: ten with the newest one, since every list of graphs includes the status."""


@dataclass(frozen=True, slots=True)
class Report:
    """The planner's part of a graph's status, at one time.

    Attributes:
        reason: Reason of the condition PlannerActive.
        message: One sentence that explains the reason; it stays the same while the state is the same.
        generation: Generation of the graph that the planner uses.
        last_decision: Sentence of the newest decision that changed replicas; empty if there is none.
        decision_id: Id of that newest decision; empty if there is none.
        decision_time: Time of that newest decision (RFC 3339); empty if there is none.
        earlier: Earlier decisions that changed replicas, newest first, each with the text fields that the status shows;
            at most 9 (`_SHOWN_EARLIER`).
        served_in_time: Observed percentage of the last half hour's requests that met the TTFT target, such as
            ``99.2%``; empty if unknown.
        predicted_in_time: Percentage that the planner's latency model predicts for the same requests and workers; empty
            if unknown.
        gpus: GPUs of existing workers, draining ones included.
        budget: GPU budget; None if there is no limit.
        wants: Number of replicas by role that the planner requests (bids for) from the GPU pool; empty if it requests
            none.
        wants_time: Time of the newest request to the GPU pool, to the minute (RFC 3339); empty if this process has made
            none yet.
    """

    reason: PlannerReason
    message: str
    generation: int
    last_decision: str = ""
    decision_id: str = ""
    decision_time: str = ""
    earlier: tuple[Mapping[str, str], ...] = ()
    served_in_time: str = ""
    predicted_in_time: str = ""
    gpus: int = 0
    budget: int | None = None
    wants: Mapping[str, int] = field(default_factory=dict)
    wants_time: str = ""

    @property
    def condition(self) -> dict[str, Any]:
        """Condition PlannerActive as a mapping of the fields that it has in a graph's status, without ``lastTransitionTime``."""
        return {
            "type": PLANNER_CONDITION,
            "status": _TRUTH.get(self.reason, "False"),
            "reason": self.reason.value,
            "message": self.message,
            "observedGeneration": self.generation,
        }

    @property
    def planner(self) -> dict[str, Any]:
        """Content of the graph's ``status.planner``, as a mapping of its fields."""
        decided = {"lastDecision": self.last_decision, "decisionId": self.decision_id}
        timed = {"decisionTime": self.decision_time} if self.decision_time else {}
        before = {"earlier": list(self.earlier)} if self.earlier else {}
        shares = {"servedInTime": self.served_in_time, "predictedInTime": self.predicted_in_time}
        found = {
            **({**decided, **timed, **before} if self.decision_id else {}),
            **(shares if self.served_in_time else {}),
            **({"wants": dict(self.wants)} if self.wants else {}),
            **({"wantsTime": self.wants_time} if self.wants and self.wants_time else {}),
            "gpus": self.gpus,
        }
        return found if self.budget is None else {**found, "budget": self.budget}

    def after(self, sentence: str, decision_id: str, decision_time: str) -> Report:
        """Return the report with a newer decision; the decision of this report becomes the first of the earlier decisions.

        Args:
            sentence: Text of the newer decision, such as "decode 2 -> 3: ...".
            decision_id: Id of the newer decision.
            decision_time: Time of the newer decision (RFC 3339).
        """
        timed = {"decisionTime": self.decision_time} if self.decision_time else {}
        last = {"decisionId": self.decision_id, **timed, "sentence": self.last_decision}
        return replace(
            self,
            last_decision=sentence,
            decision_id=decision_id,
            decision_time=decision_time,
            earlier=(*([last] if self.decision_id else []), *self.earlier)[:_SHOWN_EARLIER],
        )


def is_said(report: Report, status: Mapping[str, Any]) -> bool:
    """Return whether a graph's status in the cluster already contains everything in the report.

    Args:
        report: The report.
        status: The graph's ``status``, as the API server returned it.
    """
    condition = report.condition
    return dict(status.get("planner") or {}) == report.planner and any(
        {key: each.get(key) for key in condition} == condition for each in status.get("conditions") or ()
    )


class StatusListener:
    """Observer that turns the ticks (metrics scrapes) and decisions of one planner loop into reports for ``status.planner``."""

    def __init__(
        self,
        first: Report,
        config: DecideConfig,
        *,
        say: Callable[[Report], None],
        paused: str = "",
        unused: str = "",
        silent: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Start with a report.

        Args:
            first: First report, whose decisions are kept in the following ones.
            config: Configuration of the planner.
            say: Callback that receives each new report.
            paused: Reason for which the planner is paused; empty if it is not.
            unused: Sentence about keys of the graph without effect; empty if there are none.
            silent: Function that returns the names of the workers of which no router gets values now.
        """
        self._unused = unused
        self._silent = silent
        self._report = first
        self._say = say
        self._signals = UnknownSignals(needs_demand=config.policy.follows_demand)
        # The limits that restrict roles, as text; the time since which it is shown, and the last time that a limit applied.
        self._limits = ""
        self._binding: tuple[object, ...] = ()
        self._limits_since_s = self._limited_s = 0.0
        self._shares_s = -inf
        self._external = config.external
        self._is_edited = False
        self._failed: dict[Role, str] = {}
        self._longest_s = MAX_BACKOFF_INTERVALS * config.adjustment_interval_s
        if config.no_operation:
            reason = PlannerReason.PAUSED if paused else PlannerReason.NO_OPERATION
            why = paused or "planner.noOperation"
            self._calm = (reason, f"decides and records, but does not scale: {why}")
            self._report = replace(first, wants={})
        else:
            self._calm = (PlannerReason.OBSERVING, f"decides every {config.interval_s:g} s")

    def tick(self, view: PlannerView) -> None:
        """Update the graph's report from the state of the planner loop at a tick (a metrics scrape).

        Args:
            view: State of the planner at the tick.
        """
        reason, message = self._reason(view)
        self._is_edited = self._is_edited or self._is_left(view)
        if view.phase is PlannerPhase.TARGET_UNAVAILABLE:
            self._report = replace(self._report, reason=reason, message=message)
        else:
            self._report = replace(
                self._report,
                reason=reason,
                message=message,
                gpus=view.gpus,
                budget=view.max_gpu_budget,
            )
        self._report = replace(self._report, wants_time=stamp(view.wall_s // WANTS_S * WANTS_S))
        self._say(self._report)

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Update the graph's report from a decision. A decision that changes replicas is reported at once.

        From the decision come the limits that keep a role from the replicas it needs, the fractions of requests on
        time, the replicas requested from a GPU pool, and the reasons of failed scale-ups. The sentences of the decision
        are only reported if it changes replicas, or if it is the first decision after the planner stopped leaving a
        role to another client that had set the role's replicas.
        """
        self._follow_limits(decision)
        self._follow_shares(decision)
        self._follow_bid(decision)
        for role in decision.roles:
            self._follow_failure(role, view)
        follows_edit = self._is_edited and not self._is_left(view)
        said = decision.changes or (decision.roles if follows_edit else ())
        if said:
            self._is_edited = False
            sentence = "; ".join(role.sentence for role in said)
            self._report = self._report.after(sentence, decision.id, stamp(view.wall_s))
            self._say(self._report)

    def _is_left(self, view: PlannerView) -> bool:
        """Return whether the planner currently leaves one of its own roles to another writer."""
        return bool(view.other_writers.keys() - set(self._external))

    def _follow_limits(self, decision: Decision) -> None:
        found = [(role, step) for role in decision.roles for step in role.steps if step.name == "limit"]
        if not found:
            if decision.at_s - self._limited_s >= STEADY_S:
                self._limits, self._binding = "", ()
            return
        self._limited_s = decision.at_s
        binding = tuple((role.role, step.inputs.get("binds")) for role, step in found)
        is_fresh = self._limits and decision.at_s - self._limits_since_s < STEADY_S
        if binding != self._binding and not is_fresh:
            self._limits = "; ".join(f"{role.role.value}: {step.outcome}" for role, step in found)
            self._binding, self._limits_since_s = binding, decision.at_s

    def _follow_shares(self, decision: Decision) -> None:
        """Take the observed and predicted fractions on time, at most once per `STEADY_S`; the next tick reports them."""
        shares = shares_of(decision)
        if shares is not None and decision.at_s - self._shares_s >= STEADY_S:
            self._shares_s = decision.at_s
            self._report = replace(
                self._report,
                served_in_time=f"{shares.served:.1%}",
                predicted_in_time=f"{shares.predicted:.1%}",
            )

    def _follow_bid(self, decision: Decision) -> None:
        """Take the decision's bid, if the decision is carried out; the next tick reports it, and the previous bid stays until then."""
        bids = bids_in(decision)
        if bids and not decision.no_operation:
            wants = {role.value: bid.replicas for role, bid in sorted(bids.items())}
            self._report = replace(self._report, wants=wants)

    def _follow_failure(self, role: RoleDecision, view: PlannerView) -> None:
        """Keep the reason of a role's failed scale-up while the role requests another one."""
        if role.reason in {Reason.NEVER_READY, Reason.WITHDRAWAL_BACKOFF}:
            before = self._failed.get(role.role, "its last scale-up never became ready")
            self._failed[role.role] = view.failures.get(role.role, before)
        elif role.action is not Action.UP:
            self._failed.pop(role.role, None)

    def _reason(self, view: PlannerView) -> tuple[PlannerReason, str]:
        unknown = self._signals.after(view)
        if view.phase is PlannerPhase.TARGET_UNAVAILABLE:
            return (
                PlannerReason.TARGET_UNAVAILABLE,
                (
                    "the cluster cannot be watched, so the planner makes no decisions and replicas stay "
                    "as they are"
                ),
            )
        reason, message = self._acting(view, unknown)
        held = self._held(view)
        if not held:
            return reason, message
        roles = {role for found, _, _ in held for role in found}
        others = [role.value for role in view.desired if role not in roles and role not in self._external]
        words = [each for _, _, each in held]
        if others:
            words.append(f"{' and '.join(others)}: {message}")
        return held[0][1], "; ".join(words)

    def _acting(self, view: PlannerView, unknown: str) -> tuple[PlannerReason, str]:
        """Return the reason and message for the roles that the planner is allowed to scale, and the workers that are silent."""
        reason, message = self._state(view, unknown)
        silent = ", ".join(sorted(self._silent()))
        if not silent:
            return reason, message
        words = f"routers get no metrics from {silent}: check its node, and kubectl logs"
        if reason in {PlannerReason.OBSERVING, PlannerReason.ADJUSTING}:
            reason = PlannerReason.WORKER_SILENT
        return reason, f"{words}; {message}"

    def _state(self, view: PlannerView, unknown: str) -> tuple[PlannerReason, str]:
        if view.phase is PlannerPhase.ADJUSTING:
            return PlannerReason.ADJUSTING, "waiting until replicas have started or drained"
        if unknown:
            return PlannerReason.METRICS_MISSING, unknown
        reason, message = self._calm
        external = [
            f"{role.value} is scaled by {who}"
            for role, who in view.other_writers.items()
            if role in self._external
        ]
        scheduled = [f"schedule {each}" for each in view.scheduled]
        return reason, "; ".join(filter(None, (message, *external, *scheduled, self._limits, self._unused)))

    def _held(self, view: PlannerView) -> list[tuple[frozenset[Role], PlannerReason, str]]:
        """Return the roles that the planner owns and does not scale now, each with the reason and its sentence."""
        found = []
        left = {role: who for role, who in view.other_writers.items() if role not in self._external}
        if left:
            words = "; ".join(f"{role.value} is scaled by {who}" for role, who in left.items())
            advice = (
                "the planner does not scale it for now; set scaling.managedBy: external, or remove the "
                "other writer"
            )
            found.append((frozenset(left), PlannerReason.SCALED_BY, f"{words}: {advice}"))
        failed = {role: why for role, why in self._failed.items() if role not in left}
        if failed:
            words = "; ".join(f"{role.value}: {why}" for role, why in failed.items())
            pause = f"retried after pauses that double up to {self._longest_s:g} s"
            found.append((frozenset(failed), PlannerReason.BACKING_OFF, f"{words}; {pause}"))
        return found


class StatusWriter:
    """Writes the newest report of each graph to the graph's status, if the status differs from it.

    Attributes:
        writes: Number of successful writes.
    """

    def __init__(
        self,
        client: KubeClient,
        live: Callable[[Key], Mapping[str, Any] | None],
        *,
        now_s: Callable[[], float] = time.time,
        retry_s: float = RETRY_S,
    ) -> None:
        """Create a writer; `run` writes.

        Args:
            client: Kubernetes client.
            live: Function that returns a watched graph object by its key, or None if it does not exist.
            now_s: Clock, real seconds since 1970.
            retry_s: Real seconds after which failed writes are retried.
        """
        self._client = client
        self._live = live
        self._now_s = now_s
        self._retry_s = retry_s
        self._wanted: dict[Key, Report] = {}
        self._written: dict[Key, tuple[Report, float]] = {}
        self._wake = asyncio.Event()
        self.writes = 0

    def say(self, key: Key, report: Report) -> None:
        """Queue a graph's report for writing, in place of a queued older one. Does nothing if the status already contains the report.

        Args:
            key: Namespace and name of the graph.
            report: The newest report.
        """
        if self._is_news(key, report):
            self._wanted[key] = report
            self._wake.set()
        else:
            self._wanted.pop(key, None)

    def forget(self, key: Key) -> None:
        """Discard the queued report of a graph that was deleted.

        Args:
            key: Namespace and name of the graph.
        """
        self._wanted.pop(key, None)
        self._written.pop(key, None)

    async def run(self) -> None:
        """Write queued reports to the graphs' statuses until cancelled; failed writes are retried."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            failed = False
            for key in list(self._wanted):
                report = self._wanted.pop(key, None)
                if report is not None and not await self._write(key, report):
                    self._wanted.setdefault(key, report)
                    failed = True
            if failed:
                await asyncio.sleep(self._retry_s)
                self._wake.set()

    def _is_news(self, key: Key, report: Report) -> bool:
        graph = self._live(key)
        if graph is None:
            return False
        written = self._written.get(key)
        if written is not None and written[0] == report and self._now_s() - written[1] < TRUST_S:
            return False
        return not is_said(report, graph.get("status") or {}) or (
            written is not None and written[0] != report
        )

    async def _write(self, key: Key, report: Report) -> bool:
        graph = self._live(key)
        if graph is None or not self._is_news(key, report):
            return True
        metadata = graph["metadata"]
        obj = {
            "apiVersion": graph["apiVersion"],
            "kind": graph["kind"],
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": {
                "planner": report.planner,
                "conditions": [{**report.condition, "lastTransitionTime": self._since(report, graph)}],
            },
        }
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._client.apply(obj, field_manager=PLANNER, subresource="status")
        except NotFoundError:
            return True
        except (PenstockError, TimeoutError) as exc:
            log.warning("status not written", graph="/".join(key), error=str(exc) or "no answer")
            return False
        self.writes += 1
        self._written[key] = (report, self._now_s())
        return True

    def _since(self, report: Report, graph: Mapping[str, Any]) -> str:
        """Return the time at which the condition's status last changed, which is now if this report changes it."""
        for each in (graph.get("status") or {}).get("conditions") or ():
            if each.get("status") == report.condition["status"] and each.get("lastTransitionTime"):
                return str(each["lastTransitionTime"])
        return stamp(self._now_s())


MAX_WAITING: Final = 1000
"""Maximum number of queued Events; more are dropped. Chosen: several decisions of every graph of a large cluster."""


class DecisionEventWriter:
    """Queues and writes the Kubernetes Events of one process.

    Attributes:
        dropped: Number of Events that could not be queued or written.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        instance: str,
        now_s: Callable[[], float] = time.time,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Create a writer; `run` writes.

        Args:
            client: Kubernetes client.
            instance: Name of this process, for the Events' ``reportingInstance``.
            now_s: Clock, real seconds since 1970.
            max_waiting: Maximum number of queued Events.
        """
        self._recorder = EventRecorder(client, PLANNER, instance, "Scale", on_dropped=self._drop, now_s=now_s)
        self._waiting: asyncio.Queue[tuple[Mapping[str, Any], EventMessage]] = asyncio.Queue(max_waiting)
        self.dropped = 0

    def emit(self, regarding: Mapping[str, Any], message: EventMessage) -> None:
        """Queue a Kubernetes Event about an object. Drops the Event if the queue is full.

        Args:
            regarding: The object, with its apiVersion, kind and metadata.
            message: Reason and text of the Event.
        """
        try:
            self._waiting.put_nowait((regarding, message))
        except asyncio.QueueFull:
            self._drop()

    async def run(self) -> None:
        """Write queued Kubernetes Events until cancelled."""
        while True:
            regarding, message = await self._waiting.get()
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._recorder.emit(regarding, message)
            except TimeoutError:
                self._drop()
            finally:
                self._waiting.task_done()

    async def written(self) -> None:
        """Wait until all queued Kubernetes Events are written."""
        await self._waiting.join()

    def _drop(self) -> None:
        self.dropped += 1
        log.warning("event dropped", dropped=self.dropped)


class EventListener:
    """Observer of one graph's planner loop that emits Kubernetes Events about replica changes and failed scale-ups."""

    def __init__(self, emit: Callable[[EventMessage], None]) -> None:
        self._emit = emit

    def tick(self, view: PlannerView) -> None:
        """Do nothing; ticks (metrics scrapes) cause no Kubernetes Events."""

    def decided(self, decision: Decision, view: PlannerView) -> None:  # noqa: ARG002 - the listener's shape
        """Emit one Kubernetes Event for each role whose replicas change or whose scale-up failed.

        Does nothing in no-operation mode.

        Args:
            decision: The decision, which is recorded and not carried out yet.
            view: State of the planner at the newest tick (metrics scrape); not used.
        """
        for role in decision.roles:
            if not decision.no_operation and (
                role.action is not Action.HOLD or role.reason is Reason.NEVER_READY
            ):
                self._emit(_message(role, decision.id))


def _message(role: RoleDecision, decision_id: str) -> EventMessage:
    is_held, has_failed = role.action is Action.HOLD, role.reason is Reason.NEVER_READY
    reason = "ScaledUp" if role.action is Action.UP else "ScaledDown"
    if has_failed:
        reason = "ScaleUpFailed" if is_held else "ScaleUpRolledBack"
    return EventMessage(reason, role.sentence, is_warning=has_failed, detail=decision_id)
