"""Pods as the API returns them, and what the plans make of them."""

import pytest

from penstock.kube.objects.names import (
    DELETION_COST_ANNOTATION,
    DRAIN_ANNOTATION,
    DRAINING,
    GPUS_ANNOTATION,
    GRAPH_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    SERVING,
    SERVING_LABEL,
)
from penstock_operator.plan.pods import ContainerView, Exit, PodCondition, PodView, pod_view

RUNNING = {
    "metadata": {
        "name": "llama-decode-1",
        "namespace": "serving",
        "uid": "u1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {
            GRAPH_LABEL: "llama",
            SERVICE_LABEL: "decode",
            ROLE_LABEL: "decode",
            SERVING_LABEL: DRAINING,
        },
        "annotations": {
            DRAIN_ANNOTATION: "2026-01-01T00:01:00Z",
            DELETION_COST_ANNOTATION: "-5",
            GPUS_ANNOTATION: "2",
        },
    },
    "spec": {
        "nodeName": "node-1",
        "terminationGracePeriodSeconds": 900,
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "containers": [{"name": "worker", "image": "vllm:1"}],
    },
    "status": {
        "phase": "Running",
        "startTime": "2026-01-01T00:00:02Z",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:30Z"},
            {"type": "PodScheduled", "status": "True", "reason": "r", "message": "m"},
        ],
        "initContainerStatuses": [
            {"name": "fetch", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
        ],
        "containerStatuses": [
            {
                "name": "worker",
                "image": "docker.io/vllm:1",
                "ready": True,
                "started": True,
                "restartCount": 2,
                "state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}},
                "lastState": {
                    "terminated": {
                        "exitCode": 137,
                        "reason": "OOMKilled",
                        "message": " gone\n",
                        "finishedAt": "2026-01-01T00:00:09Z",
                    }
                },
            }
        ],
    },
}
T0 = 1767225600.0


def test_a_running_pod_is_read_completely():
    """Every attribute comes from where the API has it."""
    expected = PodView(
        name="llama-decode-1",
        namespace="serving",
        uid="u1",
        graph="llama",
        service="decode",
        role="decode",
        gpus=2,
        node="node-1",
        phase="Running",
        ready=True,
        serving=DRAINING,
        drain_since_s=T0 + 60,
        deletion_cost=-5,
        created_s=T0,
        started_s=T0 + 2,
        grace_s=900.0,
        containers=(
            ContainerView("fetch", "fetch:1", init=True, last_exit=Exit(0, "Completed")),
            ContainerView(
                "worker",
                "docker.io/vllm:1",
                ready=True,
                started=True,
                running_since_s=T0 + 10,
                last_exit=Exit(137, "OOMKilled", "gone", T0 + 9),
            ),
        ),
        conditions=(
            PodCondition("Ready", "True", since_s=T0 + 30),
            PodCondition("PodScheduled", "True", "r", "m"),
        ),
    )
    view = pod_view(RUNNING)
    assert view == expected
    assert (view.draining, view.alive, view.may_hold_requests) == (True, True, True)
    assert not view.takes_requests
    assert view.condition("Ready") == PodCondition("Ready", "True", since_s=T0 + 30)
    assert view.condition("Initialized") is None


@pytest.mark.parametrize(
    ("annotations", "resources", "expected"),
    [
        ({GPUS_ANNOTATION: "4"}, {"limits": {"nvidia.com/gpu": "1"}}, 4),
        ({GPUS_ANNOTATION: "-4"}, {}, 0),
        ({GPUS_ANNOTATION: "many"}, {"limits": {"nvidia.com/gpu": "2"}}, 2),
        ({}, {"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": "2"}}, 2),
        ({}, {"limits": {"amd.com/gpu": "3", "cpu": "64", "rdma/ib": "1"}}, 3),
        ({}, {"limits": {"habana.ai/gaudi": "8"}}, 8),
        ({}, {}, 0),
    ],
)
def test_gpus_are_those_of_the_annotation_or_of_the_resources(annotations, resources, expected):
    """The annotation counts where it is a number; otherwise what containers ask the device plugin for."""
    pod = {
        "metadata": {"annotations": annotations},
        "spec": {"containers": [{"name": "w", "resources": resources}]},
    }
    assert pod_view(pod).gpus == expected


def test_what_a_pods_volumes_need_is_named():
    """Secrets, ConfigMaps and claims that must exist; optional ones and folders need nothing."""
    volumes = [
        {"name": "a", "secret": {"secretName": "keys"}},
        {"name": "b", "secret": {"secretName": "maybe", "optional": True}},
        {"name": "c", "configMap": {"name": "g-router"}},
        {"name": "d", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "e", "emptyDir": {}},
        {"name": "f", "secret": None},
    ]
    found = pod_view({"metadata": {"name": "p"}, "spec": {"volumes": volumes}}).needs
    assert found == ("ConfigMap g-router", "PersistentVolumeClaim models", "Secret keys")


def test_a_group_pod_knows_its_place():
    """LeaderWorkerSet's labels say group, place and size."""
    view = pod_view(
        {
            "metadata": {
                "labels": {
                    "leaderworkerset.sigs.k8s.io/group-key": "k",
                    "leaderworkerset.sigs.k8s.io/group-index": "3",
                    "leaderworkerset.sigs.k8s.io/worker-index": "1",
                    SERVING_LABEL: SERVING,
                },
                "annotations": {"leaderworkerset.sigs.k8s.io/size": "4"},
            }
        }
    )
    assert (view.group, view.group_index, view.worker_index, view.group_size) == ("k", 3, 1, 4)
    assert not view.takes_requests


@pytest.mark.parametrize(
    ("status", "started"),
    [
        ({"state": {"running": {}}, "started": True}, True),
        ({"state": {"running": {}}}, True),
        ({"state": {"running": {}}, "started": False}, False),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "m"}}, "started": False}, False),
        ({}, False),
    ],
)
def test_a_container_has_started_once_its_startup_probe_passed(status, started):
    """A process that still loads holds no requests; a kubelet that says nothing has no such probe."""
    pod = {"spec": {"nodeName": "n"}, "status": {"containerStatuses": [{"name": "w", **status}]}}
    view = pod_view(pod)
    assert view.containers[0].started is started
    assert view.may_hold_requests is started
