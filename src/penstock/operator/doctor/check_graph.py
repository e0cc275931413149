"""One graph's facts to findings: its conditions, its pods, its routers' and workers' metrics. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.api.runtimes import DEFAULT_RUNTIME, traits_of
from penstock.core import metric_names as names
from penstock.core.errors import ObservationError
from penstock.core.exposition import Sample, parse_samples
from penstock.kube.objects.names import SERVING
from penstock.operator.doctor.facts import (
    REJECTED_SHARE,
    Absence,
    Finding,
    GraphFacts,
    Object,
    Page,
    Unreadable,
    ok,
    problem,
    unknown,
    warning,
)
from penstock.operator.plan.diagnose import diagnose
from penstock.operator.plan.pods import PodView, pod_view

_DOOR: Final = (
    names.ROUTER_ARRIVALS + names.COUNTER_SUFFIX,
    names.ROUTER_REFUSED + names.COUNTER_SUFFIX,
    names.ROUTER_QUEUE_TIMEOUTS + names.COUNTER_SUFFIX,
    names.ROUTER_QUEUE_REQUESTS,
)

MAX_AGE_S: Final = 10.0
"""Age above which the planner takes no reading; planner.metrics.maxAgeSeconds' default."""

_BAD: Final[Mapping[str, tuple[str, bool]]] = {
    "Ready": ("False", True),
    "Schedulable": ("False", True),
    "BudgetRespected": ("False", True),
    "Degraded": ("True", False),
    "PlannerActive": ("False", False),
}
"""Status of each condition that is a finding, and whether it is a problem or a warning."""

_STARTING: Final = frozenset({"Pending", "Progressing", ""})


def graph_findings(
    facts: GraphFacts, *, now_s: float, interval_s: float, absence: Absence | None = None
) -> Iterator[Finding]:
    """Yield what is to be said of one graph.

    Args:
        facts: The graph, its pods and their pages.
        now_s: The API server's clock, seconds since the epoch.
        interval_s: Time between the two looks, real seconds.
        absence: Why no operator acts on it, so that its status may be out of date; None if one does.
    """
    graph = facts.graph
    subject = f"graph {graph['metadata']['namespace']}/{graph['metadata']['name']}"
    yield from _status(subject, graph, absence)
    if isinstance(facts.pods, Unreadable):
        yield unknown(
            subject, f"pods: {facts.pods.why}", f"kubectl get pods -n {graph['metadata']['namespace']}"
        )
        return
    views = [pod_view(each) for each in facts.pods]
    for view in views:
        found = diagnose(view, now_s=now_s)
        if found is not None:
            report = problem if found.category.is_fault else warning
            yield report(f"pod {view.namespace}/{view.name}", found.message, found.remedy)
    frontend = traits_of(graph["spec"].get("runtime", DEFAULT_RUNTIME)).frontend
    if frontend is not None:
        yield ok(subject, f"runs {frontend.name}'s own frontend, whose metrics Penstock does not judge")
    else:
        yield from _routers(subject, facts, views, interval_s)
    yield from _workers(subject, facts, views)
    yield from _prometheus(subject, facts)


def _status(subject: str, graph: Object, absence: Absence | None) -> Iterator[Finding]:
    namespace, name = graph["metadata"]["namespace"], graph["metadata"]["name"]
    describe = f"kubectl describe -n {namespace} gd {name}"
    status = graph.get("status") or {}
    if graph["metadata"].get("deletionTimestamp"):
        yield _deletion(subject, graph, absence)
        return
    if absence is not None:
        phase = status.get("phase")
        shown = f"its status, {phase}, may be out of date" if phase else "none has looked at it"
        yield problem(subject, f"{absence.why}; {shown}", absence.remedy)
        return
    seen = status.get("observedGeneration", 0)
    if not seen:
        logs = "kubectl logs -A -l app.kubernetes.io/component=operator"
        yield problem(subject, "no operator has looked at it", logs)
        return
    newest = graph["metadata"].get("generation", seen)
    if seen < newest:
        yield warning(
            subject, f"its status is of generation {seen}, the newest is {newest}", f"wait, then {describe}"
        )
    phase = status.get("phase", "")
    bad = list(_conditions(subject, status.get("conditions", ()), phase, describe))
    yield from bad
    if not bad and phase == "Ready":
        yield ok(subject, "is Ready")
    elif not bad:
        yield warning(subject, f"is {phase or 'without a phase'}", describe)


def _deletion(subject: str, graph: Object, absence: Absence | None) -> Finding:
    namespace, name = graph["metadata"]["namespace"], graph["metadata"]["name"]
    conditions = {each["type"]: each for each in (graph.get("status") or {}).get("conditions", ())}
    finalizers = ", ".join(graph["metadata"].get("finalizers", ()))
    if absence is None:
        said = conditions.get("Progressing", {}).get("message", "")
        return warning(subject, f"is being deleted: {said}", f"kubectl describe -n {namespace} gd {name}")
    patch = '{"metadata":{"finalizers":null}}'
    give_up = f"give the drain up: kubectl patch -n {namespace} gd {name} --type merge --patch '{patch}'"
    message = f"is being deleted and keeps its finalizers {finalizers}: {absence.why}"
    return problem(subject, message, f"{absence.remedy}; or {give_up}")


def _conditions(subject: str, conditions: Any, phase: str, describe: str) -> Iterator[Finding]:
    for each in conditions:
        bad, is_grave = _BAD.get(each["type"], ("", False))
        if each["status"] != bad:
            continue
        message = f"{each['type']} is {bad}: {each.get('reason', '')}: {each.get('message', '')}".rstrip(": ")
        starting = each["type"] == "Ready" and phase in _STARTING
        yield (problem if is_grave and not starting else warning)(subject, message, describe)


def _routers(subject: str, facts: GraphFacts, views: list[PodView], interval_s: float) -> Iterator[Finding]:
    routers = [view for view in views if view.role == "router" and view.ready]
    if not routers:
        if any(each.get("role") == "router" for each in facts.graph["spec"]["services"].values()):
            describe = (
                f"kubectl get pods -n {facts.graph['metadata']['namespace']} -l penstock.dev/role=router"
            )
            yield problem(subject, "no router is ready, so no request is answered", describe)
        return
    workers = [
        view
        for view in views
        if view.role not in ("router", "")
        and view.ready
        and view.serving == SERVING
        and not view.worker_index
    ]
    for router in routers:
        yield _readiness(router, facts.ready.get(router.name))
        page = facts.pages.get(router.name)
        if page is not None:
            yield from _router_page(router, page, workers, _max_age_s(facts.graph), interval_s)


def _max_age_s(graph: Object) -> float:
    metrics = graph["spec"].get("planner", {}).get("metrics", {})
    return float(metrics.get("maxAgeSeconds", MAX_AGE_S))


def _readiness(router: PodView, answer: str | Unreadable | None) -> Finding:
    subject = f"router {router.namespace}/{router.name}"
    if answer is None or isinstance(answer, Unreadable):
        why = "was not asked" if answer is None else answer.why
        if isinstance(answer, Unreadable) and answer.is_forbidden:
            return unknown(subject, why, "ask for the right: get pods/proxy")
        return problem(subject, f"/ready: {why}", f"kubectl logs -n {router.namespace} {router.name}")
    try:
        reasons = json.loads(answer).get("reasons", [])
    except (ValueError, AttributeError):
        reasons = [f"an answer that cannot be read: {answer[:100]!r}"]
    if reasons:
        return problem(
            subject, f"serves nothing: {'; '.join(map(str, reasons))}", "see the pods of its workers"
        )
    return ok(subject, "would serve a request now")


def _samples(text: str, *wanted: str) -> list[Sample] | None:
    try:
        return parse_samples(text, wanted)
    except ObservationError:
        return None


def _router_page(
    router: PodView, page: Page, workers: list[PodView], max_age_s: float, interval_s: float
) -> Iterator[Finding]:
    subject = f"router {router.namespace}/{router.name}"
    logs = f"kubectl logs -n {router.namespace} {router.name}"
    if isinstance(page.first, Unreadable) or isinstance(page.later, Unreadable):
        yield _unread(subject, page, logs)
        return
    wanted = (names.ROUTER_WORKER_READY, names.ROUTER_WORKER_METRICS_AGE, *_DOOR)
    first, later = _samples(page.first, *wanted), _samples(page.later, *wanted)
    if first is None or later is None:
        yield problem(subject, "/metrics cannot be read as Prometheus text", logs)
        return
    view = _RouterView(
        ready=_by_worker(later, names.ROUTER_WORKER_READY),
        ages_s=_by_worker(later, names.ROUTER_WORKER_METRICS_AGE),
        before_s=_by_worker(first, names.ROUTER_WORKER_METRICS_AGE),
        max_age_s=max_age_s,
        interval_s=interval_s,
    )
    faults = {worker: view.fault(worker.name) for worker in workers}
    for worker, fault in faults.items():
        if fault is not None:
            remedy = f"kubectl logs -n {worker.namespace} {worker.name}; {logs}"
            yield problem(subject, f"worker {worker.name}: {fault}", remedy)
    if workers and not any(faults.values()):
        oldest_s = max(view.ages_s[worker.name] for worker in workers)
        yield ok(subject, f"sends to {len(workers)} workers; their metrics are at most {oldest_s:.1f} s old")
    yield from _rejections(subject, first, later, interval_s)


def _rejections(
    subject: str, first: list[Sample], later: list[Sample], interval_s: float
) -> Iterator[Finding]:
    """Say what share of the requests between the two observations was turned away."""
    came, *lost = (_total(later, name) - _total(first, name) for name in _DOOR[:3])
    rejected = sum(lost)
    if rejected <= 0:
        return
    message = (
        f"rejected {rejected:.0f} of {came:.0f} requests within {interval_s:.0f} s;"
        f" {_total(later, names.ROUTER_QUEUE_REQUESTS):.0f} wait"
    )
    remedy = "see why the planner does not grow: kubectl describe gd; raise maxGpuBudget or replicas"
    # Requests that came before the first observation may be rejected after it.
    is_overloaded = rejected > REJECTED_SHARE * max(came, rejected)
    yield (problem if is_overloaded else warning)(subject, message, remedy)


def _total(samples: list[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


@dataclass(frozen=True, slots=True)
class _RouterView:
    """What one router says of its workers, by name; ages at the second and at the first look, seconds."""

    ready: Mapping[str, float]
    ages_s: Mapping[str, float]
    before_s: Mapping[str, float]
    max_age_s: float
    interval_s: float

    def fault(self, name: str) -> str | None:
        """Return what is wrong between the router and a ready worker; None if nothing is."""
        if name not in self.ready:
            return "is ready, but the router does not know it; its EndpointSlice may be missing"
        if self.ready[name] != 1:
            return "is ready, but the router sends nothing to it"
        age_s = self.ages_s.get(name)
        if age_s is None:
            return "its metrics have never been read"
        if age_s > self.max_age_s:
            return (
                f"its metrics are {age_s:.0f} s old, above planner.metrics.maxAgeSeconds {self.max_age_s:g}"
            )
        # Every scrape resets the age; grown by the full interval, there was none.
        grown_s = age_s - self.before_s.get(name, age_s)
        if grown_s > 0 and grown_s >= 0.9 * self.interval_s:
            return f"its metrics were not read again within {self.interval_s:.0f} s"
        return None


def _by_worker(samples: list[Sample], name: str) -> dict[str, float]:
    return {each.labels.get("worker", ""): each.value for each in samples if each.name == name}


def _unread(subject: str, page: Page, remedy: str) -> Finding:
    why = page.later if isinstance(page.later, Unreadable) else page.first
    assert isinstance(why, Unreadable)  # noqa: S101 - the caller saw that one of the two is
    if why.is_forbidden:
        return unknown(subject, f"/metrics: {why.why}", "ask for the right: get pods/proxy")
    return problem(subject, f"/metrics: {why.why}", remedy)


def _workers(subject: str, facts: GraphFacts, views: list[PodView]) -> Iterator[Finding]:
    read = 0
    for view in views:
        page = facts.pages.get(view.name)
        if page is None or view.role == "router":
            continue
        about = f"worker {view.namespace}/{view.name}"
        logs = f"kubectl logs -n {view.namespace} {view.name}"
        if isinstance(page.first, Unreadable) or isinstance(page.later, Unreadable):
            yield _unread(about, page, logs)
            continue
        fault = _of_page(page.first, page.later)
        if fault is None:
            read += 1
        else:
            yield problem(about, fault, logs)
    if read:
        yield ok(subject, f"the metrics of {read} workers can be read")


def _of_page(first: str, later: str) -> str | None:
    tokens = f"{names.VLLM_GENERATION_TOKENS}{names.COUNTER_SUFFIX}"
    prompts = f"{names.VLLM_PROMPT_TOKENS}{names.COUNTER_SUFFIX}"
    pages = [_samples(text, names.VLLM_RUNNING, tokens, prompts) for text in (first, later)]
    if pages[0] is None or pages[1] is None:
        return "/metrics cannot be read as Prometheus text"
    totals = [
        {name: sum(each.value for each in page if each.name == name) for name in {each.name for each in page}}
        for page in pages
        if page is not None
    ]
    if names.VLLM_RUNNING not in totals[1]:
        return f"/metrics holds no {names.VLLM_RUNNING}; is it a vLLM or Penstock worker?"
    busy = min(each.get(names.VLLM_RUNNING, 0.0) for each in totals)
    stands = all(totals[0].get(each) == totals[1].get(each) for each in (tokens, prompts))
    if busy > 0 and stands:
        return f"has {busy:.0f} requests under way, but its token counters stand still"
    return None


def _prometheus(subject: str, facts: GraphFacts) -> Iterator[Finding]:
    if facts.prometheus is None:
        return
    url = facts.graph["spec"]["planner"]["metrics"]["prometheusUrl"]
    if isinstance(facts.prometheus, Unreadable):
        report = unknown if facts.prometheus.is_forbidden else warning
        yield report(
            subject, f"Prometheus {url}: {facts.prometheus.why}", f"try it from a pod: curl {url}/-/ready"
        )
    elif facts.prometheus == 0:
        remedy = "scrape the graphs: helm upgrade … --set monitoring.podMonitor.enabled=true"
        yield warning(subject, f"Prometheus {url} holds no series of its workers", remedy)
    else:
        yield ok(subject, f"Prometheus {url} holds series of {facts.prometheus} workers")
