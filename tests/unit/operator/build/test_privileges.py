"""A podTemplate adds no privilege to a pod unless the operator's owner allows it."""

from dataclasses import replace

import pytest

from penstock_core.errors import InvalidSpecError

MAIN = "spec.services.decode.podTemplate.spec.containers[main]"


def changed(**spec):
    """Return a decode service whose podTemplate has this specification."""
    return {"decode": {"podTemplate": {"spec": spec}}}


def main(**changes):
    """Return a podTemplate's main container."""
    return {"containers": [{"name": "main", **changes}]}


@pytest.mark.parametrize(
    ("spec", "path", "value"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork", "true"),
        ({"hostPID": True}, "spec.hostPID", "true"),
        ({"hostIPC": True}, "spec.hostIPC", "true"),
        ({"serviceAccountName": "admin"}, "spec.serviceAccountName", "admin"),
        ({"serviceAccount": "admin"}, "spec.serviceAccount", "admin"),
        ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "spec.volumes[root].hostPath", "/"),
        (main(securityContext={"privileged": True}), f"{MAIN}.securityContext.privileged", "true"),
        (
            main(securityContext={"allowPrivilegeEscalation": True}),
            f"{MAIN}.securityContext.allowPrivilegeEscalation",
            "true",
        ),
        (
            main(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
            f"{MAIN}.securityContext.capabilities.add",
            "SYS_ADMIN",
        ),
        (main(securityContext={"procMount": "Unmasked"}), f"{MAIN}.securityContext.procMount", "Unmasked"),
        (main(ports=[{"containerPort": 9, "hostPort": 9}]), f"{MAIN}.ports.hostPort", "9"),
        (
            {"initContainers": [{"name": "tune", "image": "i", "securityContext": {"privileged": True}}]},
            "spec.initContainers[tune].securityContext.privileged",
            "true",
        ),
    ],
)
def test_an_added_privilege_is_refused_by_name(objects, context, spec, path, value):
    """The message says which chart value allows it; and with that it is built."""
    with pytest.raises(InvalidSpecError) as refused:
        objects(services=changed(**spec))
    (problem,) = refused.value.problems
    assert problem.path.endswith(path)
    assert problem.message == (
        f"{value} is not allowed in a podTemplate; remove it, or set the chart's "
        "operator.allowPrivilegedPodTemplates"
    )
    assert objects(services=changed(**spec), context=replace(context, allows_privileges=True))


@pytest.mark.parametrize(
    "spec",
    [
        {"hostNetwork": False, "serviceAccountName": "llama-worker"},
        main(securityContext={"privileged": False, "runAsUser": 2000, "capabilities": {"drop": ["ALL"]}}),
        {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
        {"volumes": None, "containers": [{"name": "main", "securityContext": None}]},
    ],
)
def test_what_adds_nothing_is_built(objects, spec):
    """False values, the pod's own account, other volumes."""
    assert objects(services=changed(**spec))


def test_a_node_pools_folder_is_no_privilege_of_the_template(objects):
    """Its cacheMount makes a hostPath of its own, which the namespace's pod security level judges."""
    services = {"decode": {"nodePool": "a100", "podTemplate": {"spec": {"priorityClassName": "high"}}}}
    found = objects(services=services, runtime="vllm", nodePools={"a100": {"cacheMount": "/models"}})
    volumes = found["Deployment", "llama-decode"]["spec"]["template"]["spec"]["volumes"]
    assert any("hostPath" in each for each in volumes)
