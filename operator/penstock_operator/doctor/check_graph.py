"""Turns the facts about one graph into findings: its conditions, its pods, and its routers' and workers' metrics. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Final

from penstock.api.runtimes import DEFAULT_RUNTIME, RuntimeTraits, traits_of
from penstock.api.service import DEFAULT_ROUTERS
from penstock.core import metric_names as names
from penstock.core.errors import ObservationError
from penstock.core.exposition import Sample
from penstock.core.kv_transfers import REMEDY, KvTransferCounts, TransferResult
from penstock.core.overload import is_overloaded
from penstock.core.worker_metrics import OwnNames, names_on_page, worker_samples
from penstock.kube.objects.names import SERVING
from penstock_operator.doctor.facts import GraphFacts, Object, Page, Unreadable, full_name
from penstock_operator.doctor.findings import Finding, ok, problem, unknown, warning
from penstock_operator.plan.diagnose import diagnose
from penstock_operator.plan.pods import PodView, pod_view

_ADMISSION_SERIES: Final = (
    names.ROUTER_ARRIVALS + names.COUNTER_SUFFIX,
    names.ROUTER_REFUSED + names.COUNTER_SUFFIX,
    names.ROUTER_QUEUE_TIMEOUTS + names.COUNTER_SUFFIX,
    names.ROUTER_QUEUE_REQUESTS,
)

_TOKENS: Final = tuple(
    each + names.COUNTER_SUFFIX for each in (names.VLLM_GENERATION_TOKENS, names.VLLM_PROMPT_TOKENS)
)
_ESTIMATES: Final = names.ROUTER_PROMPT_ESTIMATE_RATIO + "_bucket"
_LOW, _HIGH = 0.67, 1.5
"""Ratios of a prompt's estimated to its counted tokens below or above which the estimate is off by half. Both are bucket
bounds of the histogram."""
_ESTIMATES_NEEDED: Final = 100
"""Minimum number of prompts before estimates are judged. Chosen: the router calibrates its estimates with the first
50 prompts."""
_KV_TRANSFERS: Final = names.ROUTER_KV_TRANSFERS + names.COUNTER_SUFFIX

MAX_AGE_S: Final = 10.0
"""Age in seconds above which the planner ignores a metrics reading; the default of planner.metrics.maxAgeSeconds."""

_BAD: Final[Mapping[str, tuple[str, bool]]] = {
    "Ready": ("False", True),
    "Schedulable": ("False", True),
    "BudgetRespected": ("False", True),
    "Degraded": ("True", False),
    "PlannerActive": ("False", False),
}
"""Status of each condition type that makes it a finding, and whether the finding is a problem (True) or a warning
(False)."""

_STARTING: Final = frozenset({"Pending", "Progressing", ""})


def graph_findings(
    facts: GraphFacts, *, now_s: float, interval_s: float, absence: tuple[str, str] | None = None
) -> Iterator[Finding]:
    """Yield the findings (ok, warning, problem or unknown, each with a message and a remedy) about one graph.

    Args:
        facts: The graph with its pods and metrics.
        now_s: Unix time in seconds by the API server's clock.
        interval_s: Wall-clock seconds between the two readings of metrics.
        absence: Reason why no operator acts on the graph, so that its status may be outdated, and a remedy; None if an
            operator acts on it.
    """
    graph, subject = facts.graph, f"graph {full_name(facts.graph)}"
    yield from _status(subject, graph, absence)
    if isinstance(facts.pods, Unreadable):
        namespace = graph["metadata"]["namespace"]
        yield unknown(subject, f"pods: {facts.pods.why}", f"kubectl get pods -n {namespace}")
        return
    views = [pod_view(each) for each in facts.pods]
    for view in views:
        found = diagnose(view, now_s=now_s)
        if found is not None:
            report = problem if found.category.is_fault else warning
            yield report(f"pod {view.namespace}/{view.name}", found.message, found.remedy)
    frontend = _traits(graph).frontend
    if frontend is not None:
        yield ok(subject, f"runs {frontend.name}'s own frontend, whose metrics Penstock does not judge")
    else:
        yield from _routers(subject, facts, views, interval_s)
    yield from _workers(subject, facts, views)
    yield from _prometheus(subject, facts)


def _traits(graph: Object) -> RuntimeTraits:
    return traits_of(graph["spec"].get("runtime", DEFAULT_RUNTIME))


def _status(subject: str, graph: Object, absence: tuple[str, str] | None) -> Iterator[Finding]:
    metadata, status = graph["metadata"], graph.get("status") or {}
    describe = f"kubectl describe -n {metadata['namespace']} gd {metadata['name']}"
    phase, seen = status.get("phase", ""), status.get("observedGeneration", 0)
    if metadata.get("deletionTimestamp"):
        yield _deletion(subject, graph, absence, describe)
    elif absence is not None:
        why, remedy = absence
        shown = f"its status, {phase}, may be out of date" if phase else "none has reconciled it"
        yield problem(subject, f"{why}; {shown}", remedy)
    elif seen < 1:
        logs = "kubectl logs -A -l app.kubernetes.io/component=operator"
        yield problem(subject, "no operator has reconciled it", logs)
    else:
        newest = metadata.get("generation", seen)
        if seen < newest:
            message = f"its status is of generation {seen}, the newest is {newest}"
            yield warning(subject, message, f"wait, then {describe}")
        bad = list(_conditions(subject, status, phase, describe))
        yield from bad
        if not bad and phase == "Ready":
            yield ok(subject, "is Ready")
        elif not bad:
            yield warning(subject, f"is {phase or 'without a phase'}", describe)


def _deletion(subject: str, graph: Object, absence: tuple[str, str] | None, describe: str) -> Finding:
    if absence is None:
        conditions = {each["type"]: each for each in (graph.get("status") or {}).get("conditions", ())}
        message = conditions.get("Progressing", {}).get("message", "")
        return warning(subject, f"is being deleted: {message}", describe)
    metadata, patch = graph["metadata"], '{"metadata":{"finalizers":null}}'
    where = f"-n {metadata['namespace']} gd {metadata['name']}"
    give_up = f"abandon the drain: kubectl patch {where} --type merge --patch '{patch}'"
    finalizers = ", ".join(metadata.get("finalizers", ()))
    message = f"is being deleted and keeps its finalizers {finalizers}: {absence[0]}"
    # Giving up the drain is listed first, since nothing can be installed into a namespace that is being deleted.
    return problem(subject, message, f"{give_up}; or let it drain: {absence[1]}")


def _conditions(subject: str, status: Object, phase: str, describe: str) -> Iterator[Finding]:
    for each in status.get("conditions", ()):
        bad, is_grave = _BAD.get(each["type"], ("", False))
        if each["status"] == bad:
            message = f"{each['type']} is {bad}: {each.get('reason', '')}: {each.get('message', '')}"
            starting = each["type"] == "Ready" and phase in _STARTING
            yield (problem if is_grave and not starting else warning)(subject, message.rstrip(": "), describe)


def _routers(subject: str, facts: GraphFacts, views: list[PodView], interval_s: float) -> Iterator[Finding]:
    spec, namespace = facts.graph["spec"], facts.graph["metadata"]["namespace"]
    routers = [view for view in views if view.role == "router" and view.ready]
    if not routers and any(each.get("role") == "router" for each in spec["services"].values()):
        describe = f"kubectl get pods -n {namespace} -l penstock.dev/role=router"
        yield problem(subject, "no router is ready, so no request is answered", describe)
    workers = [
        view
        for view in views
        if view.role not in ("router", "")
        and view.ready
        and view.serving == SERVING
        and not view.worker_index
    ]
    max_age_s = float(spec.get("planner", {}).get("metrics", {}).get("maxAgeSeconds", MAX_AGE_S))
    yield from _single_router(subject, spec["services"])
    for router in routers:
        yield _readiness(router, facts.ready.get(router.name))
        page = facts.pages.get(router.name)
        if page is not None:
            yield from _router_page(router, page, workers, max_age_s, interval_s)


def _single_router(subject: str, services: Object) -> Iterator[Finding]:
    """Report a graph whose specification has only one router."""
    routers = {name: each for name, each in services.items() if each.get("role") == "router"}
    for name, each in routers.items() if len(routers) == 1 else ():
        maximum = (each.get("scaling") or {}).get("maxReplicas", each.get("replicas"))
        if maximum == 1:
            message = "has one router, so no request is answered while its node is drained or it restarts"
            remedy = f"remove services.{name}.replicas, which means {DEFAULT_ROUTERS}, or write {DEFAULT_ROUTERS} or more"
            yield warning(subject, message, remedy)


def _readiness(router: PodView, answer: str | Unreadable | None) -> Finding:
    subject = f"router {router.namespace}/{router.name}"
    if answer is None or isinstance(answer, Unreadable):
        return _unread(subject, "/ready", answer or Unreadable("was not queried"), _logs(router))
    try:
        reasons = json.loads(answer).get("reasons", [])
    except (ValueError, AttributeError):
        reasons = [f"its response cannot be parsed: {answer[:100]!r}"]
    if reasons:
        message = f"cannot serve requests: {'; '.join(map(str, reasons))}"
        return problem(subject, message, "see the pods of its workers")
    return ok(subject, "would serve a request now")


def _logs(pod: PodView) -> str:
    return f"kubectl logs -n {pod.namespace} {pod.name}"


def _unread(subject: str, path: str, found: Unreadable, remedy: str) -> Finding:
    if found.is_forbidden:
        return unknown(subject, f"{path}: {found.why}", "ask for the right: get pods/proxy")
    return problem(subject, f"{path}: {found.why}", remedy)


def _scrapes(
    subject: str, page: Page, remedy: str, *wanted: str, own_names: OwnNames | None = None
) -> tuple[list[Sample], list[Sample]] | Finding:
    """Return the samples of both readings of a metrics page, or a finding if it could not be read."""
    for text in (page.later, page.first):
        if isinstance(text, Unreadable):
            return _unread(subject, "/metrics", text, remedy)
    try:
        own = own_names or {}
        return worker_samples(str(page.first), wanted, own), worker_samples(str(page.later), wanted, own)
    except ObservationError:
        return problem(subject, "/metrics cannot be read as Prometheus text", remedy)


def _router_page(
    router: PodView, page: Page, workers: list[PodView], max_age_s: float, interval_s: float
) -> Iterator[Finding]:
    subject, logs = f"router {router.namespace}/{router.name}", _logs(router)
    scrapes = _scrapes(
        subject,
        page,
        logs,
        names.ROUTER_WORKER_READY,
        names.ROUTER_WORKER_METRICS_AGE,
        _KV_TRANSFERS,
        _ESTIMATES,
        *_ADMISSION_SERIES,
    )
    if isinstance(scrapes, Finding):
        yield scrapes
        return
    faults = {each: _fault(each.name, *scrapes, max_age_s, interval_s) for each in workers}
    for worker, message in faults.items():
        if message is not None:
            yield problem(subject, f"worker {worker.name}: {message}", f"{_logs(worker)}; {logs}")
    if workers and not any(faults.values()):
        ages_s = _by_worker(scrapes[1], names.ROUTER_WORKER_METRICS_AGE)
        oldest_s = max(ages_s[worker.name] for worker in workers)
        yield ok(subject, f"sends to {len(workers)} workers; their metrics are at most {oldest_s:.1f} s old")
    yield from _rejections(subject, *scrapes, interval_s)
    doubled = _transfers(scrapes[1]).problem()
    if doubled is not None:
        yield problem(subject, doubled, REMEDY)
    yield from _estimates(subject, scrapes[1])


def _estimates(subject: str, samples: list[Sample]) -> Iterator[Finding]:
    """Warn if a router's token estimates are off for most prompts: its queues and thresholds then act on wrong numbers."""
    below = _by_label(samples, "le", _ESTIMATES)
    total = below.get("+Inf", 0.0)
    if total < _ESTIMATES_NEEDED:
        return
    low, high = below.get(f"{_LOW:g}", 0.0), total - below.get(f"{_HIGH:g}", total)
    share, bound = (low, f"{_LOW:g} times or less of") if low > high else (high, f"more than {_HIGH:g} times")
    if share > total / 2:
        message = (
            f"estimates the tokens of {share / total:.0%} of its {total:.0f} prompts at {bound} what workers count, so that "
            "queues and thresholds act too late or too early"
        )
        yield warning(subject, message, "set router.tokenizer to the model's tokenizer.json to count exactly")


def _transfers(samples: list[Sample]) -> KvTransferCounts:
    found = _by_label(samples, "result", _KV_TRANSFERS)
    return KvTransferCounts(**{result.value: int(found.get(result, 0)) for result in TransferResult})


def _fault(
    name: str, first: list[Sample], later: list[Sample], max_age_s: float, interval_s: float
) -> str | None:
    """Return the problem between a router and a ready worker; None if there is none."""
    ready = _by_worker(later, names.ROUTER_WORKER_READY)
    before_s, ages_s = (_by_worker(each, names.ROUTER_WORKER_METRICS_AGE) for each in (first, later))
    age_s = ages_s.get(name)
    if name not in ready:
        return "is ready, but the router does not know it; its EndpointSlice may be missing"
    if ready[name] != 1:
        return "is ready, but the router sends nothing to it"
    if age_s is None:
        return "its metrics have never been read"
    if age_s > max_age_s:
        return f"its metrics are {age_s:.0f} s old, above planner.metrics.maxAgeSeconds {max_age_s:g}"
    # Every scrape resets the age, so an age that grew by the full interval means that there was no scrape.
    grown_s = age_s - before_s.get(name, age_s)
    if grown_s > 0 and grown_s >= 0.9 * interval_s:
        return f"its metrics were not read again within {interval_s:.0f} s"
    return None


def _rejections(
    subject: str, first: list[Sample], later: list[Sample], interval_s: float
) -> Iterator[Finding]:
    """Report the fraction of the requests between the two readings that the router rejected."""
    arrived, *rejections = (_total(later, name) - _total(first, name) for name in _ADMISSION_SERIES[:3])
    rejected = sum(rejections)
    if rejected <= 0:
        return
    waiting = _total(later, names.ROUTER_QUEUE_REQUESTS)
    message = (
        f"rejected {rejected:.0f} of {arrived:.0f} requests within {interval_s:.0f} s; {waiting:.0f} wait"
    )
    remedy = "see why the planner does not grow: kubectl describe gd; raise maxGpuBudget or replicas"
    # Requests that arrived before the first reading may be rejected after it.
    yield (problem if is_overloaded(arrivals=arrived, rejected=rejected) else warning)(
        subject, message, remedy
    )


def _total(samples: list[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


def _by_worker(samples: list[Sample], name: str) -> dict[str, float]:
    return _by_label(samples, "worker", name)


def _by_label(samples: list[Sample], label: str, *wanted: str) -> dict[str, float]:
    """Return the sum of the samples of the ``wanted`` metrics, by the value of ``label``."""
    found: dict[str, float] = {}
    for each in samples:
        if each.name in wanted:
            key = each.labels.get(label, "")
            found[key] = found.get(key, 0.0) + each.value
    return found


def _workers(subject: str, facts: GraphFacts, views: list[PodView]) -> Iterator[Finding]:
    read, own_names = 0, _traits(facts.graph).metric_names
    for view in views:
        page = facts.pages.get(view.name)
        if page is not None and view.role != "router":
            fault = _worker_page(view, page, own_names)
            read += fault is None
            if fault is not None:
                yield fault
    if read:
        yield ok(subject, f"the metrics of {read} workers can be read")


def _worker_page(worker: PodView, page: Page, own_names: OwnNames) -> Finding | None:
    subject, logs = f"worker {worker.namespace}/{worker.name}", _logs(worker)
    scrapes = _scrapes(subject, page, logs, names.VLLM_RUNNING, *_TOKENS, own_names=own_names)
    if isinstance(scrapes, Finding):
        return scrapes
    if all(each.name != names.VLLM_RUNNING for each in scrapes[1]):
        message = (
            f"/metrics holds no {names_on_page(names.VLLM_RUNNING, own_names)[0]}, so its load is unknown"
        )
        remedy = f"a runtime with other names declares them, RuntimeTraits.metric_names; else {logs}"
        return problem(subject, message, remedy)
    running = [_by_label(each, "engine", names.VLLM_RUNNING) for each in scrapes]
    tokens = [_by_label(each, "engine", *_TOKENS) for each in scrapes]
    for rank, requests in running[1].items():
        busy = min(requests, running[0].get(rank, 0.0))
        if busy > 0 and tokens[0].get(rank) == tokens[1].get(rank):
            place = f" in data-parallel rank {rank}" if len(running[1]) > 1 else ""
            message = f"has {busy:.0f} requests in progress{place}, but its token counters do not change"
            return problem(subject, message, logs)
    return None


def _prometheus(subject: str, facts: GraphFacts) -> Iterator[Finding]:
    if facts.prometheus is None:
        return
    url = facts.graph["spec"]["planner"]["metrics"]["prometheusUrl"]
    about = f"Prometheus {url}"
    if isinstance(facts.prometheus, Unreadable):
        report = unknown if facts.prometheus.is_forbidden else warning
        yield report(subject, f"{about}: {facts.prometheus.why}", f"try it from a pod: curl {url}/-/ready")
    elif facts.prometheus == 0:
        remedy = "scrape the graphs: helm upgrade … --set monitoring.podMonitor.enabled=true"
        yield warning(subject, f"{about} holds no series of its workers", remedy)
    else:
        yield ok(subject, f"{about} holds series of {facts.prometheus} workers")
