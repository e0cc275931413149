"""Each trouble of a pod, or of pods that the API server refuses, is told in words with a remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.stamps import stamp
from penstock.kube.objects.names import BUDGET_GATE
from penstock_operator.plan.diagnose import Category, Diagnosis, diagnose, refusal, worst
from penstock_operator.plan.pods import on_deleted_node, pod_view

NOW = 10_000.0


def pod(*, spec=None, status=None, metadata=None, container=None):
    """Return a bound, running pod that is not ready; parts as the API has them."""
    names = [{"name": "worker", "image": "vllm:1"}]
    state = [{"name": "worker", "image": "vllm:1", **container}] if container is not None else []
    found = {
        "metadata": {"name": "p", "creationTimestamp": stamp(NOW - 100), **(metadata or {})},
        "spec": {"nodeName": "n1", "containers": names, **(spec or {})},
        "status": {
            "phase": "Running",
            "startTime": stamp(NOW - 100),
            "containerStatuses": state,
            **(status or {}),
        },
    }
    return pod_view(found)


def waiting(reason, message="", **more):
    """Return a container that waits."""
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


def ended(code, reason="Error", message=""):
    """Return how a container ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def unscheduled(message, reason="Unschedulable"):
    """Return a pod that has no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(spec={"nodeName": ""}, status={"phase": "Pending", "conditions": [condition]})


def running(since_s, **more):
    """Return a container that runs since ``since_s`` seconds ago."""
    return {"state": {"running": {"startedAt": stamp(NOW - since_s)}}, **more}


def conditions(*found):
    """Return a status with conditions: type, status, and what else each has."""
    return {"conditions": [{"type": kind, "status": status, **more} for kind, status, more in found]}


PULL = "failed to pull: not found"
BACK_OFF = 'Back-off pulling image "vllm:1"'
CANNOT_PULL = "image vllm:1 cannot be pulled"
CORRECT_IMAGE = "correct the image, or add imagePullSecrets in podTemplate"
NO_SECRET = 'secret "hf-token" not found'
NO_MAP = 'configmap "c" not found'
NO_KEY = "couldn't find key token in Secret serving/hf"
CANNOT_CREATE = "container worker cannot be created"
LAST_LOG = "see kubectl logs --previous -c worker"
REPLACED = "see kubectl describe pod; it will be replaced automatically"
SILENT_NODE = "node n1 does not answer"
CHECK_NODE = "check the node; delete it if it will not return"
FORCE = "check the node and the pod's finalizers, then kubectl delete --force"
FAILS_PROBE = "container worker is running but fails its readiness probe"
LOG = "see kubectl logs p -c worker"
DESCRIBE = "see kubectl describe pod p and its logs"
TAINTED = conditions(("DisruptionTarget", "True", {"reason": "DeletionByTaintManager"}))
CUT_OFF = conditions(("Ready", "False", {}), ("ContainersReady", "True", {}))
JUST_UNREADY = conditions(("Ready", "False", {"lastTransitionTime": stamp(NOW - 5)}))
LONG_UNREADY = conditions(("Ready", "False", {"lastTransitionTime": stamp(NOW - 31)}))
OVERDUE = {"deletionTimestamp": stamp(NOW - 61)}
OUT_OF_MEMORY = waiting("CrashLoopBackOff", lastState=ended(137, "OOMKilled"))
TRACEBACK = waiting("CrashLoopBackOff", lastState=ended(1, message="Traceback\nValueError: no\n"))
RESTARTED = running(5, started=False, lastState=ended(2))
EXITED = {"phase": "Failed", "containerStatuses": [{"name": "w", "state": ended(3)}]}
BUDGET = {"nodeName": "", "schedulingGates": [{"name": BUDGET_GATE}]}
QUOTA = {"nodeName": "", "schedulingGates": [{"name": "quota"}]}
LONG_AGO = {"startTime": stamp(NOW - 301)}
CASES = [
    (pod(container=waiting("ErrImagePull", PULL)), Category.IMAGE_PULL, f"{CANNOT_PULL}: {PULL}", CORRECT_IMAGE),
    (pod(container=waiting("ImagePullBackOff", f"{BACK_OFF}: ErrImagePull: {PULL}")),
     Category.IMAGE_PULL, f"{CANNOT_PULL}: {PULL}", CORRECT_IMAGE),
    (pod(container=waiting("ImagePullBackOff", BACK_OFF)), Category.IMAGE_PULL, CANNOT_PULL, CORRECT_IMAGE),
    (pod(container=waiting("CreateContainerConfigError", NO_SECRET)),
     Category.CONFIG, f"{CANNOT_CREATE}: {NO_SECRET}", "create Secret hf-token in the graph's namespace"),
    (pod(container=waiting("CreateContainerConfigError", NO_MAP)),
     Category.CONFIG, f"{CANNOT_CREATE}: {NO_MAP}", "create ConfigMap c in the graph's namespace"),
    (pod(container=waiting("CreateContainerConfigError", NO_KEY)),
     Category.CONFIG, f"{CANNOT_CREATE}: {NO_KEY}", "add key token to Secret hf"),
    (pod(container=waiting("RunContainerError")), Category.CONFIG,
     f"{CANNOT_CREATE}: RunContainerError", "correct env, envFrom or podTemplate of the service"),
    (pod(container=TRACEBACK), Category.CRASH_LOOP,
     "container worker ended with exit code 1: ValueError: no", LAST_LOG),
    (pod(container=waiting("CrashLoopBackOff")), Category.CRASH_LOOP, "container worker is crash-looping", LAST_LOG),
    (pod(container=RESTARTED), Category.CRASH_LOOP, "container worker ended with exit code 2", LAST_LOG),
    (pod(container=OUT_OF_MEMORY), Category.OUT_OF_MEMORY, "container worker was OOMKilled",
     "raise its memory limit in podTemplate or lower model.contextTokens"),
    (pod(status=EXITED), Category.CRASH_LOOP, "container w ended with exit code 3", "see kubectl logs --previous -c w"),
    (pod(status={"phase": "Failed", "reason": "Evicted", "message": "low on disk"}), Category.EVICTED,
     "was evicted: low on disk", "free that resource on the node or raise the pod's requests"),
    (pod(status={"phase": "Failed", "reason": "UnexpectedAdmissionError"}),
     Category.FAILED, "failed: UnexpectedAdmissionError", REPLACED),
    (pod(status={"phase": "Failed"}), Category.FAILED, "failed: no reason given", REPLACED),
    (pod(status={"reason": "NodeLost"}), Category.NODE_LOST, SILENT_NODE, CHECK_NODE),
    (pod(status=TAINTED), Category.NODE_LOST, SILENT_NODE, CHECK_NODE),
    (pod(status=CUT_OFF), Category.NODE_LOST, "node n1 is not ready",
     "check the node; its pods are replaced after five minutes"),
    (on_deleted_node(pod(status=conditions(("Ready", "True", {})))), Category.NODE_LOST, "node n1 was deleted",
     "its pods are replaced when Kubernetes notices that the node is missing, after about 40 s"),
    (pod(metadata=OVERDUE), Category.TERMINATING_STUCK, "is still terminating on node n1", FORCE),
    (pod(metadata=OVERDUE, spec={"nodeName": ""}), Category.TERMINATING_STUCK, "is still terminating", FORCE),
    (pod(spec=BUDGET), Category.WAITING_FOR_BUDGET, "waits for GPUs of the budget",
     "raise planner.maxGpuBudget, or its pool's GPUs, or scale another service down"),
    (pod(spec=QUOTA), Category.UNSCHEDULABLE, "is blocked by scheduling gate quota",
     "find out who set spec.schedulingGates of the pod"),
    (pod(container=running(100, started=True)), Category.PROBE_FAILING, FAILS_PROBE, LOG),
    (pod(container=running(100, started=True), status=LONG_UNREADY), Category.PROBE_FAILING, FAILS_PROBE, LOG),
    (pod(status=LONG_AGO, container=running(290, started=False)),
     Category.STARTING_SLOWLY, "is still loading its model", DESCRIBE),
    (pod(status=LONG_AGO, container=waiting("ContainerCreating")),
     Category.STARTING_SLOWLY, "still waits for its volumes or init containers", DESCRIBE),
]  # fmt: skip


@pytest.mark.parametrize(("found", "category", "message", "remedy"), CASES)
def test_trouble_is_named_with_its_remedy(found, category, message, remedy):
    """Category, sentence and what to do."""
    assert diagnose(found, now_s=NOW) == Diagnosis(category, "p", "", message, remedy)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("3 Insufficient nvidia.com/gpu", "add GPU nodes to the pool, or lower replicas or gpusPerReplica"),
        ("3 Insufficient cpu", "add nodes, or lower the requests in podTemplate"),
        ("1 node(s) had untolerated taint {gpu: true}", "add the taint to the node pool's tolerations"),
        (
            "3 node(s) didn't match Pod's node affinity/selector",
            "label the nodes as the node pool's nodeSelector says, or correct it",
        ),
        (
            'persistentvolumeclaim "cache" not found',
            "create the claim, or give it a storage class that can bind it",
        ),
        ("something new", "see kubectl describe pod"),
    ],
)
def test_the_schedulers_words_are_passed_on(reason, remedy):
    """Its reason stays, what it says about preemption does not; the remedy follows the reason."""
    message = f"0/3 nodes are available: {reason}. preemption: 0/3 nodes are available: 3 No victims."
    found = diagnose(unscheduled(message), now_s=NOW)
    assert found is not None
    assert found.category is Category.UNSCHEDULABLE
    assert found.message == f"cannot be scheduled: 0/3 nodes are available: {reason}"
    assert found.remedy == remedy


def test_the_budgets_reason_is_told():
    """What `plan_ungating` says appears in the diagnosis, and is not a fault."""
    found = diagnose(pod(spec=BUDGET), now_s=NOW, budget_reason="needs 2")
    assert found is not None
    assert found.message == "waits for GPUs of the budget: needs 2"
    assert [each for each in Category if not each.is_fault] == [found.category]


@pytest.mark.parametrize(
    "fine",
    [
        pod(container=running(5, ready=True, started=True), status=conditions(("Ready", "True", {}))),
        pod(container=running(5, started=True)),
        pod(container=running(100, started=True), status=JUST_UNREADY),
        pod(container=running(100, started=True, ready=True)),
        pod(container=running(50, started=False)),
        pod(container=waiting("ContainerCreating")),
        pod(container={}),
        pod(container=running(50, started=False, lastState=ended(0, "Completed"))),
        pod(metadata={"deletionTimestamp": stamp(NOW - 1)}, container=waiting("ErrImagePull")),
        pod(metadata={"deletionTimestamp": stamp(NOW + 1)}),
        pod(status={"phase": "Succeeded"}),
        pod(spec={"nodeName": "", "containers": []}, status={"phase": "Pending"}),
        unscheduled("", "SchedulingGated"),  # released; the scheduler has not looked again
        pod(status=conditions(("DisruptionTarget", "True", {"reason": "PreemptionByScheduler"}))),
        pod_view({}),
    ],
)
def test_what_is_normal_is_no_trouble(fine):
    """Ready, just started, still loading, on its way out as it should, or done."""
    assert diagnose(fine, now_s=NOW) is None


def test_the_worst_comes_first():
    """By category, then by pod; of none, none."""
    crash = Diagnosis(Category.CRASH_LOOP, "b", "", "m", "r")
    other = Diagnosis(Category.CRASH_LOOP, "a", "", "m", "r")
    slow = Diagnosis(Category.STARTING_SLOWLY, "a", "", "m", "r")
    assert worst([slow, crash, other]) is other
    assert worst([]) is None
    assert str(crash) == "b: m; r"


@given(st.floats(0, 200), st.floats(0, 200))
def test_a_message_does_not_change_with_time_alone(one, other):
    """Two looks at the same trouble say the same, so the status is not written again."""
    for found, *_ in CASES:
        early, late = diagnose(found, now_s=NOW + one), diagnose(found, now_s=NOW + other)
        assert early == late


def workload(message="", *, status="True", kind="ReplicaFailure", reason="FailedCreate"):
    """Return a Deployment with one condition."""
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    return {"metadata": {"name": "g-decode"}, "status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    "found",
    [
        {"metadata": {"name": "g-decode"}},
        {"metadata": {"name": "g-decode"}, "status": {"conditions": None}},
        workload("exceeded quota: q", status="False"),
        workload("exceeded quota: q", kind="Progressing"),
    ],
)
def test_a_workload_whose_pods_are_made_is_in_no_trouble(found):
    """No status yet, no condition, or one that does not hold."""
    assert refusal("decode", found) is None


@pytest.mark.parametrize(
    ("said", "message", "remedy"),
    [
        (
            'pods "g-decode-7f9-x2b" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4',
            "exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4",
            "raise ResourceQuota q of the namespace, or lower replicas",
        ),
        (
            'pods "g-decode-7f9-x2b" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "m")',
            'violates PodSecurity "baseline:latest": hostPath volumes (volume "m")',
            "change podTemplate or cacheMount to what the namespace's pod security level allows",
        ),
        (
            'pods "a" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
            "maximum memory usage per Container is 1Gi, but limit is 2Gi",
            "set resources in podTemplate within the namespace's LimitRange",
        ),
        (
            'admission webhook "images.example.com" denied the request: unsigned\n image',
            'admission webhook "images.example.com" denied the request: unsigned image',
            "ask the owner of admission webhook images.example.com, or change podTemplate",
        ),
        (
            "",
            "FailedCreate",
            "see kubectl describe replicaset, and the quotas, limit ranges and webhooks of the namespace",
        ),
    ],
)
def test_the_servers_words_are_given_without_the_pods_generated_name(said, message, remedy):
    """The name differs from try to try; a status that carried it would be written repeatedly."""
    found = refusal("decode", workload(said))
    assert (found.category, found.service, found.pod) == (Category.REFUSED, "decode", "g-decode")
    assert (found.message, found.remedy) == (f"the API server refuses its pods: {message}", remedy)
