"""Turns facts into findings about API server, clock, CustomResourceDefinitions, operator, planner and rights. Pure.

Graphs are checked in `check_graph`, node pools in `check_pools`. Something that could not be read counts neither as
healthy nor as broken; it is reported as unknown, together with a way to find out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from penstock.api import ClusterGpuPool, ProfilePhase
from penstock.api.crd import definitions
from penstock.kube.objects.names import (
    CLASS_LABEL,
    OPERATOR,
    OPERATOR_CLASS,
    PLANNER,
    SCOPE_LABEL,
    is_of_class,
    lease_name,
)
from penstock_operator.doctor.check_graph import graph_findings
from penstock_operator.doctor.check_pools import pool_findings
from penstock_operator.doctor.facts import Facts, LeaseFact, Object, RightsFact, Unreadable, full_name
from penstock_operator.doctor.findings import Finding, Severity, ok, problem, unknown, warning

SKEW_S: Final = 2.0
"""Clock difference in seconds above which a warning is reported. Chosen: the server's Date header has whole seconds,
so smaller differences cannot be detected; TLS and tokens tolerate minutes."""

LEASE_S: Final = 15.0
"""Assumed lease duration in seconds of a Lease that does not have one; the default of leader election."""

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
VERSION_LABEL: Final = "app.kubernetes.io/version"
"""Label of the chart with its version. ``COMPONENT_LABEL`` is the chart's label with the component: operator or
planner."""

CLUSTER_SCOPE: Final = "cluster"

INSTALL: Final = (
    "helm upgrade --install penstock charts/penstock --namespace penstock-system --create-namespace"
)
_RELEASE_NAME: Final = "meta.helm.sh/release-name"
_RELEASE_NAMESPACE: Final = "meta.helm.sh/release-namespace"
_INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
APPLY_CRDS: Final = "kubectl apply --server-side --force-conflicts -f crds/"


def check(facts: Facts) -> list[Finding]:
    """Return what `penstock doctor` found wrong or right in a cluster, ordered so that a cause comes before its consequences.

    ``facts`` are what was read from the cluster. If the API server does not answer, the only finding says so.
    """
    if isinstance(facts.version, Unreadable):
        remedy = "check the address and credentials: kubectl version; choose others with --kubeconfig and --context"
        return [problem("API server", f"{facts.url}: {facts.version.why}", remedy)]
    return [finding for each in CHECKS for finding in each(facts)]


def _label(deployment: Object, key: str, default: str) -> str:
    return str(deployment["spec"]["template"]["metadata"].get("labels", {}).get(key, default))


def scope_of(deployment: Object) -> str | None:
    """Return the namespace whose graphs an operator's or planner's Deployment handles; None means all namespaces."""
    scope = _label(deployment, SCOPE_LABEL, deployment["metadata"]["namespace"])
    return None if scope == CLUSTER_SCOPE else scope


def class_of(deployment: Object) -> str:
    """Return the ``spec.operatorClass`` of the graphs that an operator's or planner's Deployment handles."""
    return _label(deployment, CLASS_LABEL, OPERATOR_CLASS)


def component_of(deployment: Object) -> str:
    """Return the component of a Deployment: ``operator``, ``planner`` or another name; empty if it has no such label."""
    return str(deployment["metadata"].get("labels", {}).get(COMPONENT_LABEL, ""))


def lease_of(deployment: Object) -> tuple[str, str] | None:
    """Return namespace and name of the Lease (leader election) of an operator's or planner's Deployment; None for other Deployments."""
    owner = {"operator": OPERATOR, "planner": PLANNER}.get(component_of(deployment))
    if owner is None:
        return None
    scope = scope_of(deployment)
    name = lease_name(owner, cluster_wide=scope is None, operator_class=class_of(deployment))
    return scope or deployment["metadata"]["namespace"], name


def _server(facts: Facts) -> Iterator[Finding]:
    yield ok("API server", f"{facts.url} answers, Kubernetes {facts.version}")
    skew_s = facts.skew_s
    if skew_s is None:
        yield unknown(
            "clock", "the API server did not report its time", "compare it with the output of date -u"
        )
    elif abs(skew_s) > SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        message = f"this machine's clock is {abs(skew_s):.0f} s {side} the API server's"
        yield warning("clock", message, "synchronise it: timedatectl set-ntp true")
    else:
        yield ok("clock", "this machine and the API server agree")


def _definitions(facts: Facts) -> Iterator[Finding]:
    wanted = definitions()
    for name, live in facts.crds.items():
        subject = f"CRD {name}"
        if isinstance(live, Unreadable):
            yield unknown(
                subject, live.why, f"ask a user who has the right to read it: kubectl get crd {name}"
            )
            continue
        conditions = () if live is None else live.get("status", {}).get("conditions", ())
        if live is None:
            yield problem(subject, "is not installed", f"{APPLY_CRDS}, or {INSTALL}")
        elif not any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
            yield problem(subject, "is not established", f"kubectl describe crd {name}")
        elif not _covers(live["spec"], wanted[name]["spec"]):
            message = f"differs from this program's, version {facts.release}"
            yield warning(subject, message, f"{APPLY_CRDS}, or install the release that fits the cluster")
        else:
            yield ok(subject, "is established and current")


def _covers(live: Any, wanted: Any) -> bool:
    """Return whether ``live`` contains everything in ``wanted``; additional keys, such as defaults of the API server, are ignored."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            key in live and _covers(live[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(live, list) and len(live) == len(wanted) and all(map(_covers, live, wanted))
    return bool(live == wanted)


def _components(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.deployments, Unreadable):
        remedy = "check with: kubectl get deployments -A -l app.kubernetes.io/part-of=penstock"
        yield unknown("operator", facts.deployments.why, remedy)
        return
    for component in ("operator", "planner"):
        found = [each for each in facts.deployments if component_of(each) == component]
        if not found:
            yield _not_installed(component, facts)
        for each in found:
            yield from _deployment(component, each, facts.release)
        yield from _overlaps(component, [each for each in found if each["spec"].get("replicas", 1)])


def _overlaps(component: str, found: list[Object]) -> Iterator[Finding]:
    """Report pairs of installations of one operator class that watch the same namespace."""
    for one, other in itertools.combinations(sorted(found, key=full_name), 2):
        scopes, names = {scope_of(one), scope_of(other)}, f"{full_name(one)} and {full_name(other)}"
        if class_of(one) == class_of(other) and (len(scopes) == 1 or None in scopes):
            where = next((f"namespace {each}" for each in sorted(filter(None, scopes))), "every namespace")
            message = f"{names} both handle graphs of class {class_of(one)} in {where}"
            yield problem(f"{component}s", message, "uninstall one, or give it another operatorClass")


def _not_installed(component: str, facts: Facts) -> Finding:
    if component == "operator":
        return problem(component, "no operator runs, so graphs stay as they are", _install(facts))
    graphs = () if isinstance(facts.graphs, Unreadable) else (each.graph for each in facts.graphs)
    planned = [
        each["metadata"]["name"] for each in graphs if each["spec"].get("planner", {}).get("enabled", True)
    ]
    if not planned:
        return ok(component, "none runs, and no graph here needs one")
    message = f"none runs, but planner.enabled is true for {', '.join(planned)}"
    return warning(component, message, f"{INSTALL} --set planner.enabled=true, or set planner.enabled: false")


def _deployment(component: str, deployment: Object, release: str) -> Iterator[Finding]:
    namespace, name = deployment["metadata"]["namespace"], deployment["metadata"]["name"]
    subject = f"{component} {namespace}/{name}"
    wanted = deployment["spec"].get("replicas", 1)
    ready = deployment.get("status", {}).get("readyReplicas", 0)
    state = f"{ready} of {wanted} replicas are ready"
    if wanted == 0:
        yield problem(subject, "is scaled to 0", _start(deployment))
    elif ready == 0:
        remedy = f"kubectl describe -n {namespace} deployment/{name}; kubectl logs -n {namespace} deployment/{name}"
        yield problem(subject, state, remedy)
    elif ready < wanted:
        yield warning(subject, state, f"kubectl get pods -n {namespace} -l {COMPONENT_LABEL}={component}")
    else:
        yield ok(subject, f"{state}, watching {scope_of(deployment) or 'all namespaces'}")
    other = deployment["metadata"].get("labels", {}).get(VERSION_LABEL)
    if other is not None and other != release:
        message = f"is version {other}, this program {release}"
        yield warning(subject, message, f"{INSTALL}, or install penstock=={other} here")


def _install(facts: Facts) -> str:
    """Return the command that installs Penstock with the Helm release that owns the CustomResourceDefinitions; no other release can."""
    for live in facts.crds.values():
        text = {} if live is None or isinstance(live, Unreadable) else live["metadata"].get("annotations", {})
        name, namespace = text.get(_RELEASE_NAME), text.get(_RELEASE_NAMESPACE)
        if name and namespace:
            return f"helm upgrade --install {name} charts/penstock --namespace {namespace} --create-namespace"
    return INSTALL


def _watch_namespace_command(namespace: str, operators: Sequence[Object]) -> str:
    """Return the command that makes the first operator's Helm release watch one more namespace."""
    first = _release_of(operators[0])
    scopes = [scope_of(each) for each in operators if _release_of(each) == first]
    watched = ",".join(sorted({*filter(None, scopes), namespace}))
    name, place = first
    return (
        f"helm upgrade {name} charts/penstock --namespace {place} --reuse-values "
        f"--set 'watchNamespaces={{{watched}}}'"
    )


def _release_of(deployment: Object) -> tuple[str, str]:
    """Return name and namespace of the Helm release that a Deployment belongs to."""
    metadata = deployment["metadata"]
    return metadata.get("labels", {}).get(_INSTANCE_LABEL, "penstock"), metadata["namespace"]


def _start(deployment: Object) -> str:
    namespace, name = deployment["metadata"]["namespace"], deployment["metadata"]["name"]
    return f"kubectl scale -n {namespace} deployment/{name} --replicas=1"


def _lease(fact: LeaseFact, now_s: float | None) -> Finding:
    subject = f"{fact.component} lease {fact.namespace}/{fact.name}"
    logs = f"kubectl logs -n {fact.namespace} -l {COMPONENT_LABEL}={fact.component}"
    if isinstance(fact.later, Unreadable):
        return unknown(subject, fact.later.why, f"kubectl get lease -n {fact.namespace} {fact.name}")
    if fact.later is None:
        return problem(subject, f"does not exist, so no {fact.component} is active", logs)
    spec = fact.later.get("spec", {})
    if not spec.get("holderIdentity") or spec.get("renewTime") is None:
        return problem(subject, f"it has no holder, so no {fact.component} is active", logs)
    return _renewal(fact, now_s, subject, logs)


def _renewal(fact: LeaseFact, now_s: float | None, subject: str, logs: str) -> Finding:
    """Check a Lease that has a holder: a renewal between the two readings proves that the holder is alive, whatever the clocks show."""
    first, spec = (
        each.get("spec", {}) if isinstance(each, dict) else {} for each in (fact.first, fact.later)
    )
    holder, renewed = spec["holderIdentity"], spec["renewTime"]
    is_renewed_now = first.get("renewTime") not in (None, renewed)
    term_s = float(spec.get("leaseDurationSeconds") or LEASE_S)
    age_s = None if now_s is None else now_s - datetime.fromisoformat(renewed).timestamp()
    if is_renewed_now and age_s is not None and not -SKEW_S <= age_s <= term_s:
        side = "behind" if age_s > 0 else "ahead of"
        message = f"the clock of {holder} is {abs(age_s):.0f} s {side} the API server's"
        return warning(subject, message, "synchronise the clock of its node")
    if is_renewed_now:
        return ok(subject, f"held by {holder}, renewed during the check")
    if age_s is None:
        remedy = "check for longer: penstock doctor --interval 20"
        return unknown(subject, f"held by {holder}, not renewed during the check", remedy)
    if age_s <= term_s:
        return ok(subject, f"held by {holder}, renewed {max(age_s, 0.0):.0f} s ago")
    message = f"{holder} has not renewed it for {age_s:.0f} s; its duration is {term_s:.0f} s"
    return problem(subject, message, logs)


def _rights(fact: RightsFact) -> Finding:
    where = "in all namespaces" if fact.namespace is None else f"in {fact.namespace}"
    subject = f"rights of {fact.component or 'you'} {where}"
    if fact.unreadable is not None:
        command = (
            "ask an administrator to run penstock doctor" if fact.component else "kubectl auth can-i --list"
        )
        return unknown(subject, fact.unreadable.why, command)
    if not fact.missing:
        return ok(
            subject,
            f"{fact.who} {'has' if fact.component else 'have'} all {fact.checked} rights that are needed",
        )
    lacks = "lacks" if fact.component else "lack"
    message = f"{fact.who} {lacks} the rights to {', '.join(map(str, fact.missing))}"
    one = fact.missing[0]
    resource, _, sub = one.resource.partition("/")
    flags = f" --subresource={sub}" if sub else ""
    scope = "--all-namespaces" if fact.namespace is None else f"--namespace {fact.namespace}"
    impersonation = f" --as={fact.who}" if fact.component else ""
    ask = f"kubectl auth can-i {one.verb} {resource}{'.' if one.group else ''}{one.group}{flags}{impersonation} {scope}"
    if fact.component:
        return problem(subject, message, f"{INSTALL} --set rbac.create=true; check with {ask}")
    return warning(subject, message, f"ask an administrator for them; check with {ask}")


def _cluster_gpu_pools(facts: Facts) -> Iterator[Finding]:
    """Report ClusterGpuPools that no operator handles: an operator that watches only some namespaces ignores them."""
    pools, deployments = facts.cluster_gpu_pools, facts.deployments
    if isinstance(deployments, Unreadable):
        return
    operators = [each for each in deployments if component_of(each) == "operator"]
    classes = {class_of(each) for each in operators if scope_of(each) is None}
    if isinstance(pools, Unreadable):
        if not classes:
            yield unknown(
                "ClusterGpuPools",
                pools.why,
                "ask a user who has the right to list them: kubectl get clustergpupools",
            )
        return
    for raw in pools:
        if any(is_of_class(raw["spec"], each) for each in classes):
            continue
        name = raw["spec"].get("operatorClass", OPERATOR_CLASS)
        message = f"has no effect: no operator of class {name} watches all namespaces"
        drawing = _graphs_of(raw, facts)
        if drawing:
            message += f"; it is meant for {', '.join(drawing)}"
        remedy = (
            f"{INSTALL} --set clusterWide=true --set operatorClass={name}, or a GpuPool in each namespace"
        )
        yield warning(f"ClusterGpuPool {raw['metadata']['name']}", message, remedy)


def _graphs_of(raw: Object, facts: Facts) -> list[str]:
    """Return the inspected graphs that a ClusterGpuPool's entries match; empty if the pool's manifest is invalid."""
    try:
        pool = ClusterGpuPool.model_validate({**raw, "status": None})
    except ValueError:
        return []
    graphs = () if isinstance(facts.graphs, Unreadable) else (each.graph for each in facts.graphs)
    return [full_name(each) for each in graphs if _matches(pool, each["metadata"])]


def _matches(pool: ClusterGpuPool, metadata: Object) -> bool:
    labels = metadata.get("labels") or {}
    return any(
        each.match.may_cover(metadata["name"], labels, metadata["namespace"]) for each in pool.spec.graphs
    )


def _graphs(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.graphs, Unreadable):
        yield unknown("graphs", facts.graphs.why, "kubectl get graphdeployments -A")
        return
    if not facts.graphs:
        message = "there is none here; kubectl apply -f manifests/samples/disaggregated.yaml makes one"
        yield ok("graphs", message)
    for each in facts.graphs:
        absence = _missing_operator(each.graph, facts)
        yield from graph_findings(each, now_s=facts.now_s, interval_s=facts.interval_s, absence=absence)
        yield from pool_findings(each.graph, facts.nodes, facts.requested)


def _missing_operator(graph: Object, facts: Facts) -> tuple[str, str] | None:
    """Return the reason why no operator updates a graph's status, and a remedy; None if one does or if that is unknown.

    Nothing is written to a graph while nothing changes, so the renewals of the Lease show whether its status is
    current.
    """
    if isinstance(facts.deployments, Unreadable):
        return None
    namespace = graph["metadata"]["namespace"]
    installed = [each for each in facts.deployments if component_of(each) == "operator"]
    operators = [each for each in installed if each["spec"].get("replicas", 1)]
    if not operators:
        return "no operator runs", _start(installed[0]) if installed else _install(facts)
    watching = [each for each in operators if scope_of(each) in {None, namespace}]
    responsible = [each for each in watching if is_of_class(graph["spec"], class_of(each))]
    if not watching:
        return f"no operator watches namespace {namespace}", _watch_namespace_command(namespace, operators)
    if not responsible:
        name, others = graph["spec"]["operatorClass"], sorted(set(map(class_of, watching)))
        why = f"no operator of its class {name} watches it, only of {', '.join(others)}"
        install = f"helm upgrade --install penstock-{name} charts/penstock --namespace {namespace}"
        return why, f"{install} --set crds.install=false --set operatorClass={name}"
    names = {lease_of(each) for each in responsible}
    found = [
        _lease(each, facts.server_now_s) for each in facts.leases if (each.namespace, each.name) in names
    ]
    if found and all(each.severity is Severity.PROBLEM for each in found):
        return f"no operator handles it: {found[0].subject}: {found[0].message}", found[0].remedy
    return None


def _profiles(facts: Facts) -> Iterator[Finding]:
    """Report failed ProfileRequests; effects on graphs are reported with the graphs."""
    if isinstance(facts.profiles, Unreadable):
        yield unknown("profile requests", facts.profiles.why, "check with: kubectl get gpr")
        return
    for each in facts.profiles:
        subject, status = f"profile request {full_name(each)}", each.get("status") or {}
        text = "; ".join(str(found["message"]) for found in status.get("conditions") or ())
        if status.get("phase") == ProfilePhase.SUCCEEDED:
            yield ok(subject, f"its profile is in ConfigMap {status.get('configMap')}")
        elif status.get("phase") == ProfilePhase.PROFILING:
            yield ok(subject, f"in progress: {text}")
        else:
            message = text or "no operator has reconciled it"
            yield warning(subject, message, f"kubectl describe gpr {each['metadata']['name']}")


CHECKS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    _server,
    _definitions,
    _components,
    lambda facts: (_lease(each, facts.server_now_s) for each in facts.leases),
    lambda facts: map(_rights, facts.rights),
    _cluster_gpu_pools,
    _graphs,
    _profiles,
)
"""The checks, ordered so that causes come before consequences."""
