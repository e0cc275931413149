from __future__ import annotations

import copy
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doctor_facts import EARLIER, NOW, NOW_S, component, facts, graph_facts, graph_object, lease

from penstock_operator.doctor.check import check
from penstock_operator.doctor.facts import LeaseFact, Right, RightsFact, Unreadable
from penstock_operator.doctor.findings import Severity, counts, is_healthy

FORBIDDEN = Unreadable("403: you may not", is_forbidden=True)


def told(findings, severity):
    """Subjects and messages of one severity."""
    return [(each.subject, each.message) for each in findings if each.severity is severity]


def only(findings):
    """The one finding that is not ok."""
    (found,) = [each for each in findings if each.severity is not Severity.OK]
    return found


def test_a_healthy_cluster_has_only_good_findings():
    """Nothing is said that asks for action."""
    findings = check(facts())
    assert [each for each in findings if each.severity is not Severity.OK] == []
    assert all(not each.remedy for each in findings)
    assert is_healthy(findings)
    assert counts(findings)[Severity.PROBLEM] == 0


def test_an_unreachable_server_is_the_only_finding():
    """Nothing else can be known then."""
    found = only(check(facts(version=Unreadable("no answer within 10 s"))))
    assert found.severity is Severity.PROBLEM
    assert found.message == "https://cluster: no answer within 10 s"
    assert "--kubeconfig" in found.remedy


@pytest.mark.parametrize(
    ("skew_s", "severity", "message"),
    [
        (2.0, Severity.OK, "this machine and the API server agree"),
        (-2.0, Severity.OK, "this machine and the API server agree"),
        (2.1, Severity.WARNING, "this machine's clock is 2 s ahead of the API server's"),
        (-60.0, Severity.WARNING, "this machine's clock is 60 s behind the API server's"),
        (None, Severity.UNKNOWN, "the API server did not report its time"),
    ],
)
def test_clocks(skew_s, severity, message):
    """Up to 2 s cannot be told from the server's whole seconds."""
    findings = check(facts(skew_s=skew_s))
    assert ("clock", message) in told(findings, severity)


NAME = "graphdeployments.penstock.dev"


def spoiled(change):
    """The definition, changed in place."""
    crd = facts().crds[NAME]
    change(crd)
    return crd


def unestablished(crd):
    """Say that the API server refuses it."""
    crd["status"].update(conditions=[{"type": "Established", "status": "False"}])


def without_columns(crd):
    """Drop a column."""
    crd["spec"]["versions"][0]["additionalPrinterColumns"].pop()


def without_schema(crd):
    """Drop a key of the schema."""
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"].pop("spec")


OTHER_VERSION = "differs from this program's, version 0.1.0"


@pytest.mark.parametrize(
    ("crd", "severity", "message"),
    [
        (None, Severity.PROBLEM, "is not installed"),
        (FORBIDDEN, Severity.UNKNOWN, "403: you may not"),
        (spoiled(unestablished), Severity.PROBLEM, "is not established"),
        (spoiled(lambda crd: crd.pop("status")), Severity.PROBLEM, "is not established"),
        (spoiled(without_columns), Severity.WARNING, OTHER_VERSION),
        (spoiled(without_schema), Severity.WARNING, OTHER_VERSION),
    ],
    ids=["absent", "forbidden", "refused", "no status", "columns", "schema"],
)
def test_definitions(crd, severity, message):
    """Absent or not served is a problem; another version's is a warning."""
    found = only(check(facts(crds={**facts().crds, NAME: crd})))
    assert (found.severity, found.subject, found.message) == (severity, f"CRD {NAME}", message)
    assert "kubectl" in found.remedy


def labelled(part, key, value):
    """An operator whose Deployment, or whose pods, have another label."""
    operator = component("operator")
    (operator if part == "own" else operator["spec"]["template"])["metadata"]["labels"][key] = value
    return operator


PLANNER = component("planner")
OPERATOR = "operator penstock-system/penstock-operator"
LOGS = "kubectl logs -n penstock-system deployment/penstock-operator"
START = "kubectl scale -n penstock-system deployment/penstock-operator --replicas=1"
OLD = labelled("own", "app.kubernetes.io/version", "0.2.0")
ELSEWHERE = labelled("pods", "penstock.dev/scope", "other")
NOBODY = "no operator runs, so graphs stay as they are"
PLANNERLESS = "none runs, but planner.enabled is true for llama"
UNASKED = RightsFact("system:x", "planner", "serving", 12, (), FORBIDDEN)


@pytest.mark.parametrize(
    ("deployments", "severity", "subject", "message", "remedy"),
    [
        (({**component("operator"), "status": {"readyReplicas": 0}}, PLANNER),
         Severity.PROBLEM, OPERATOR, "0 of 1 replicas are ready", LOGS),
        (({**component("operator"), "status": {}}, PLANNER),
         Severity.PROBLEM, OPERATOR, "0 of 1 replicas are ready", LOGS),
        ((component("operator", replicas=0), PLANNER), Severity.PROBLEM, OPERATOR, "is scaled to 0", START),
        ((component("operator", replicas=2), PLANNER),
         Severity.WARNING, OPERATOR, "1 of 2 replicas are ready", "kubectl get pods"),
        ((PLANNER,), Severity.PROBLEM, "operator", NOBODY, "helm upgrade --install penstock"),
        ((component("operator"),), Severity.WARNING, "planner", PLANNERLESS, "helm upgrade --install penstock"),
        ((OLD, PLANNER), Severity.WARNING, OPERATOR, "is version 0.2.0, this program 0.1.0", "penstock==0.2.0"),
        ((ELSEWHERE, PLANNER), Severity.PROBLEM, "graph serving/llama",
         "no operator watches namespace serving; its status, Ready, may be out of date", "helm upgrade penstock charts/penstock --namespace penstock-system --reuse-values --set 'watchNamespaces={other,serving}'"),
    ],
)  # fmt: skip
def test_components(deployments, severity, subject, message, remedy):
    """Without an operator nothing happens to graphs; without a planner they serve and do not scale."""
    findings = check(facts(deployments=deployments))
    found = next(each for each in findings if each.severity is not Severity.OK)
    assert (found.severity, found.subject, found.message) == (severity, subject, message)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"deployments": FORBIDDEN}, "operator"),
        ({"graphs": FORBIDDEN}, "graphs"),
        ({"profiles": FORBIDDEN}, "profile requests"),
        ({"rights": (UNASKED,)}, "rights of planner in serving"),
    ],
)
def test_what_cannot_be_listed_or_asked_for_is_unknown(changes, subject):
    """Never absent."""
    found = only(check(facts(**changes)))
    assert (found.severity, found.subject, found.message) == (Severity.UNKNOWN, subject, FORBIDDEN.why)


def elsewhere(deployment, namespace, *, scope):
    """The same Deployment in another namespace, watching ``scope``."""
    made = deepcopy(deployment)
    made["metadata"]["namespace"] = namespace
    made["spec"]["template"]["metadata"]["labels"]["penstock.dev/scope"] = scope
    return made


@pytest.mark.parametrize(
    ("scope", "operator_class", "replicas", "where"),
    [
        ("cluster", "penstock", 1, "every namespace"),
        ("serving", "penstock", 1, "namespace serving"),
        ("cluster", "research", 1, None),
        ("cluster", "penstock", 0, None),
    ],
)
def test_two_operators_that_see_the_same_graphs(scope, operator_class, replicas, where):
    """Of one class both would write; of two classes each has its graphs; a stopped one does not count."""
    operator = component("operator")
    other = elsewhere(operator, "apps", scope=scope)
    other["spec"]["template"]["metadata"]["labels"]["penstock.dev/operator-class"] = operator_class
    other["spec"]["replicas"] = replicas
    findings = check(facts(deployments=(operator, other, component("planner"))))
    found = [each for each in findings if each.subject == "operators"]
    names = "apps/penstock-operator and penstock-system/penstock-operator"
    wanted = [] if where is None else [f"{names} both handle graphs of class penstock in {where}"]
    assert [each.message for each in found] == wanted
    assert all(each.severity is Severity.PROBLEM for each in found)


def test_a_graph_whose_class_no_operator_works_on():
    """It would never become anything."""
    graph = graph_object()
    graph["spec"]["operatorClass"] = "research"
    deployments = (component("operator"), PLANNER)
    found = only(check(facts(deployments=deployments, graphs=(graph_facts(graph=graph),))))
    assert found.message.startswith(
        "no operator of its class research watches it, only of penstock; its status"
    )
    assert found.remedy.endswith("--set operatorClass=research")


def test_no_planner_where_nobody_wants_one():
    """An HPA may own the adapters."""
    graph = graph_object()
    graph["spec"]["planner"] = {"enabled": False}
    findings = check(facts(deployments=(component("operator"),), graphs=(graph_facts(graph=graph),)))
    assert is_healthy(findings)
    assert counts(findings)[Severity.WARNING] == 0


BEHIND = "the clock of penstock-operator-abc is 100 s behind the API server's"
AHEAD = "the clock of penstock-operator-abc is 30 s ahead of the API server's"
LATE = "penstock-operator-abc has not renewed it for 16 s; its duration is 15 s"
HELD = "held by penstock-operator-abc"


@pytest.mark.parametrize(
    ("first", "later", "now_s", "severity", "message"),
    [
        (lease(NOW), lease(NOW), NOW_S + 15, Severity.OK, f"{HELD}, renewed 15 s ago"),
        (lease(NOW), lease(NOW), NOW_S + 16, Severity.PROBLEM, LATE),
        (lease(EARLIER), lease(NOW), None, Severity.OK, f"{HELD}, renewed during the check"),
        (lease(NOW), lease(NOW), None, Severity.UNKNOWN, f"{HELD}, not renewed during the check"),
        (lease(EARLIER), lease(NOW), NOW_S + 100, Severity.WARNING, BEHIND),
        (lease(EARLIER), lease(NOW), NOW_S - 30, Severity.WARNING, AHEAD),
        (None, None, NOW_S, Severity.PROBLEM, "does not exist, so no operator is active"),
        (
            lease(NOW),
            lease(NOW, holder=""),
            NOW_S,
            Severity.PROBLEM,
            "it has no holder, so no operator is active",
        ),
        (FORBIDDEN, FORBIDDEN, NOW_S, Severity.UNKNOWN, "403: you may not"),
    ],
)
def test_leases(first, later, now_s, severity, message):
    """A renewal seen between two looks counts whatever the clocks say."""
    seen = LeaseFact("operator", "penstock-system", "penstock-operator", first, later)
    clock = {"skew_s": None} if now_s is None else {"now_s": now_s}
    findings = check(facts(leases=(seen,), **clock))
    subject = "operator lease penstock-system/penstock-operator"
    assert (subject, message) in told(findings, severity)


LEASE = LeaseFact("operator", "penstock-system", "penstock-cluster-operator", lease(NOW), lease(NOW))
STALE = {"leases": (LEASE,), "now_s": NOW_S + 95}
STOPPED = (component("operator", replicas=0), PLANNER)
NOT_RUNNING = "no operator runs; its status, Ready, may be out of date"
SILENT = (
    "no operator handles it: operator lease penstock-system/penstock-cluster-operator: penstock-operator-abc has not"
    " renewed it for 95 s; its duration is 15 s"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (STALE, f"{SILENT}; its status, Ready, may be out of date"),
        ({"deployments": (PLANNER,)}, NOT_RUNNING),
        ({"deployments": STOPPED}, NOT_RUNNING),
        ({"deployments": FORBIDDEN, **STALE}, None),
        ({**STALE, "now_s": NOW_S + 5}, None),
    ],
)
def test_a_status_that_no_operator_keeps_true(changes, message):
    """Its node is lost, say: nothing in the graph tells, so the Lease's age is the age of the status."""
    found = told(check(facts(**changes)), Severity.PROBLEM)
    assert [said for subject, said in found if subject == "graph serving/llama"] == (
        [message] if message else []
    )


def test_a_graph_that_is_being_deleted():
    """With an operator its progress is told; without one, what holds it, and how to give that up."""
    graph = graph_object()
    graph["metadata"] |= {"deletionTimestamp": NOW, "finalizers": ["penstock.dev/drain"]}
    graph["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "reason": "Deleting"},
        {"type": "Progressing", "status": "True", "message": "waits until router pods have finished"},
    ]
    graphs = (graph_facts(graph=graph),)
    going = only(check(facts(graphs=graphs)))
    assert (going.severity, going.message) == (
        Severity.WARNING,
        "is being deleted: waits until router pods have finished",
    )
    (held,) = [
        each
        for each in check(facts(graphs=graphs, **STALE))
        if each.subject == going.subject and each.severity is Severity.PROBLEM
    ]
    assert held.message == f"is being deleted and keeps its finalizers penstock.dev/drain: {SILENT}"
    assert held.remedy.startswith(
        "abandon the drain: kubectl patch -n serving gd llama --type merge --patch"
        ' \'{"metadata":{"finalizers":null}}\'; or let it drain: '
    )


def test_an_install_command_names_the_release_that_owns_the_definitions():
    """Helm refuses to take them over from another release."""
    live = copy.deepcopy(facts().crds)
    for each in live.values():
        names = {"meta.helm.sh/release-name": "llm", "meta.helm.sh/release-namespace": "serving"}
        each["metadata"]["annotations"] = names
    found = next(each for each in check(facts(crds=live, deployments=())) if each.message == NOBODY)
    assert found.remedy == "helm upgrade --install llm charts/penstock --namespace serving --create-namespace"


LIST_PODS = Right("", "pods", "list")
SCALE = Right("penstock.dev", "scalingadapters/scale", "patch")


def test_missing_rights_of_the_operator():
    """It cannot work; the remedy holds a command that shows one of them."""
    account = "system:serviceaccount:penstock-system:penstock-operator"
    missing = RightsFact(account, "operator", None, 60, (SCALE, LIST_PODS))
    found = only(check(facts(rights=(missing,))))
    assert found.severity is Severity.PROBLEM
    assert found.subject == "rights of operator in all namespaces"
    assert (
        found.message == f"{account} lacks the rights to patch scalingadapters.penstock.dev/scale, list pods"
    )
    assert found.remedy.endswith(
        "kubectl auth can-i patch scalingadapters.penstock.dev --subresource=scale "
        f"--as={account} --all-namespaces"
    )


def test_missing_rights_of_the_caller():
    """Somebody with few rights is not a problem of the cluster."""
    found = only(check(facts(rights=(RightsFact("you", "", "serving", 10, (LIST_PODS,)),))))
    assert (found.severity, found.message) == (Severity.WARNING, "you lack the rights to list pods")
    assert found.remedy.endswith("kubectl auth can-i list pods --namespace serving")


def test_no_graph_is_fine():
    """It says how to make one."""
    findings = check(facts(graphs=()))
    assert is_healthy(findings)
    assert any("kubectl apply" in each.message for each in findings)


def _request(phase, message):
    """A ProfileRequest with its status."""
    conditions = [{"type": "Complete", "message": message}] if message else []
    status = {"phase": phase, "conditions": conditions, "configMap": "kept"} if phase else {}
    return {"metadata": {"name": "fast", "namespace": "serving"}, "spec": {}, "status": status}


@pytest.mark.parametrize(
    ("phase", "message", "severity", "words"),
    [
        ("Succeeded", "done", Severity.OK, "its profile is in ConfigMap kept"),
        ("Profiling", "Job fast-profile measures", Severity.OK, "in progress: Job fast-profile measures"),
        ("Pending", "GraphDeployment g is not there", Severity.WARNING, "GraphDeployment g is not there"),
        ("Failed", "out of memory", Severity.WARNING, "out of memory"),
        ("", "", Severity.WARNING, "no operator has reconciled it"),
    ],
)
def test_profile_requests(phase, message, severity, words):
    """What came to nothing is a warning: graphs serve without it."""
    findings = check(facts(profiles=(_request(phase, message),)))
    [found] = [each for each in findings if each.subject == "profile request serving/fast"]
    assert (found.severity, found.message) == (severity, words)
    assert (found.remedy == "kubectl describe gpr fast") == (severity is Severity.WARNING)


def test_every_finding_that_asks_for_action_says_which():
    """Over all the ways in which the examples go wrong."""
    spoils = [
        replace(facts(), deployments=()),
        replace(facts(), crds=dict.fromkeys(facts().crds)),
        facts(leases=(replace(LEASE, first=None, later=None),)),
        replace(facts(), graphs=(graph_facts(pods=FORBIDDEN), graph_facts(pages={}, ready={}))),
    ]
    for each in (finding for spoil in spoils for finding in check(spoil)):
        assert each.remedy if each.severity is not Severity.OK else not each.remedy, each


def cluster_pool(**spec):
    """A ClusterGpuPool for the graphs of namespace serving."""
    entry = {"match": {"namespaces": ["serving"]}}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ClusterGpuPool",
        "metadata": {"name": "shared"},
        "spec": {"gpus": 8, "graphs": [entry], **spec},
    }


def of_one_namespace():
    """The operator of one namespace alone."""
    made = component("operator")
    made["spec"]["template"]["metadata"]["labels"]["penstock.dev/scope"] = "serving"
    return made


@pytest.mark.parametrize(
    ("made", "operator", "expected"),
    [
        (cluster_pool(), component("operator"), []),
        (
            cluster_pool(),
            of_one_namespace(),
            ["has no effect: no operator of class penstock watches all namespaces; it is meant for serving/llama"],
        ),
        (
            cluster_pool(graphs=[{"match": {"namespaceLabels": {"team": "a"}}}]),
            of_one_namespace(),
            ["has no effect: no operator of class penstock watches all namespaces; it is meant for serving/llama"],
        ),
        (
            cluster_pool(graphs=[]),
            of_one_namespace(),
            ["has no effect: no operator of class penstock watches all namespaces"],
        ),
        (
            cluster_pool(operatorClass="other", graphs="wrong"),
            component("operator"),
            ["has no effect: no operator of class other watches all namespaces"],
        ),
    ],
)  # fmt: skip
def test_a_clusters_pool_that_nobody_shares_out_is_named_with_the_graphs_that_it_is_for(
    made, operator, expected
):
    """An operator of one namespace sees no ClusterGpuPool, and says nothing on the graphs."""
    found = check(facts(cluster_gpu_pools=(made,), deployments=(operator, component("planner"))))
    pools = [each for each in found if each.subject == "ClusterGpuPool shared"]
    assert [each.message for each in pools] == expected
    assert all("--set clusterWide=true" in each.remedy for each in pools)


@pytest.mark.parametrize(
    ("operator", "told_of"), [(component("operator"), []), (of_one_namespace(), [FORBIDDEN.why])]
)
def test_clusters_pools_that_may_not_be_listed_are_unknown_where_nobody_shares_them_out(operator, told_of):
    """A tenant often may not; where an operator of the complete cluster runs, the graphs' status says it."""
    found = check(facts(cluster_gpu_pools=FORBIDDEN, deployments=(operator, component("planner"))))
    assert [each.message for each in found if each.subject == "ClusterGpuPools"] == told_of
