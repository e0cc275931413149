"""The order in which a graph goes."""

from penstock.kube.objects.names import ROLE_LABEL, SERVICE_LABEL
from penstock_operator.plan.deletion import DeletionStep, next_step
from penstock_operator.plan.pods import PodView
from penstock_operator.workloads import WORKLOADS


def child(kind, name, service="", role=""):
    """Return an object of the graph; without labels, one that the graph has once."""
    labels = {SERVICE_LABEL: service, ROLE_LABEL: role} if service else {}
    return {"kind": kind, "metadata": {"name": name, "labels": labels}}


ROUTER = child("Deployment", "llama-frontend", "frontend", "router")
DECODE = child("Deployment", "llama-decode", "decode", "decode")
PREFILL = child("LeaderWorkerSet", "llama-prefill", "prefill", "prefill")
SERVICE = child("Service", "llama-decode", "decode", "decode")
CONFIG = child("ConfigMap", "llama-router")


def pod(name, role, **more):
    """Return a pod of the service named like its role."""
    return PodView(name, role=role, service="frontend" if role == "router" else role, **more)


def test_an_idle_router_is_waited_for_only_by_what_it_needs():
    """Workers go alongside it; Services and the rest behind it."""
    ending = pod("r", "router", terminating=True)
    step = next_step([DECODE, CONFIG], [ending, pod("d", "decode")], idle={"r"})
    assert (step.delete, step.drain) == ((), ("decode",))
    assert next_step([CONFIG], [ending], idle={"r"}).delete == ()


def test_then_workers_are_drained_and_deleted():
    """A service with living pods drains; one without loses its workload."""
    step = next_step([PREFILL, DECODE, CONFIG], [pod("d", "decode"), pod("p", "prefill", terminating=True)])
    message = "waiting for worker pods to finish their requests: d, p"
    assert step == DeletionStep(message, (PREFILL,), ("decode",), waits_for_idleness=True)
    ended = pod("r", "router", phase="Failed")
    assert next_step([DECODE], [ended]) == DeletionStep("deleting the workers", (DECODE,))


def test_every_deletion_ends():
    """Whatever is there, doing what each step says leads to the finalizer's removal, routers before workers."""
    children = [ROUTER, DECODE, PREFILL, SERVICE, CONFIG]
    pods = {"r": pod("r", "router"), "d": pod("d", "decode"), "p": pod("p", "prefill")}
    deleted = []
    for _ in range(10):
        step = next_step(children, list(pods.values()))
        if step.release:
            break
        deleted.append(sorted(each["kind"] for each in step.delete))
        children = [each for each in children if each not in step.delete]
        workloads = [each for each in step.delete if each["kind"] in WORKLOADS]
        gone = {each["metadata"]["labels"][SERVICE_LABEL] for each in workloads} | set(step.drain)
        pods = {name: each for name, each in pods.items() if each.service not in gone}
    assert deleted == [["Deployment"], [], ["Deployment", "LeaderWorkerSet"], ["ConfigMap", "Service"]]
    assert step == DeletionStep("everything is deleted", release=True)
