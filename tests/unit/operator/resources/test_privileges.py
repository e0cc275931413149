"""A podTemplate adds no privilege to a pod unless the operator's owner allows it."""

from dataclasses import replace

import pytest

from penstock.core.errors import InvalidSpecError


def changed(**spec):
    """Return a decode service whose podTemplate has this specification."""
    return {"decode": {"podTemplate": {"spec": spec}}}


def main(**changes):
    """Return a podTemplate's main container."""
    return {"containers": [{"name": "main", **changes}]}


def context_of(**keys):
    """Return a podTemplate whose main container has this security context."""
    return main(securityContext=keys)


def beside(**keys):
    """Return a podTemplate with an init container of this security context."""
    return {"initContainers": [{"name": "tune", "image": "i", "securityContext": keys}]}


def volume(**source):
    """Return a podTemplate with one more volume."""
    return {"volumes": [{"name": "v", **source}]}


IN_MAIN = "spec.containers[main].securityContext"
IN_POD = "spec.securityContext"
IN_INIT = "spec.initContainers[tune].securityContext"
OTHERS_PROFILE = {"type": "Unconfined"}


@pytest.mark.parametrize(
    "hostile",
    [
        ({"hostNetwork": True}, "spec.hostNetwork", "true", "remove it"),
        ({"hostPID": True}, "spec.hostPID", "true", "remove it"),
        ({"hostIPC": True}, "spec.hostIPC", "true", "remove it"),
        # Another account's rights, or a token of the own one
        *(
            ({key: "admin"}, f"spec.{key}", "admin", "leave it at llama-worker")
            for key in ("serviceAccountName", "serviceAccount")
        ),
        ({"serviceAccountName": None}, "spec.serviceAccountName", "none", "leave it at llama-worker"),
        *(
            (
                {"automountServiceAccountToken": value},
                "spec.automountServiceAccountToken",
                "a token of the API",
                "leave it at false",
            )
            for value in (True, None)
        ),
        (
            volume(projected={"sources": [{"serviceAccountToken": {"path": "token"}}]}),
            "spec.volumes[v].projected.sources",
            "serviceAccountToken",
            "remove it",
        ),
        # Secrets of others, the node's files
        (volume(secret={"secretName": "admin"}), "spec.volumes[v].secret", "admin", "remove it"),
        (
            volume(projected={"sources": [{"secret": {"name": "admin"}}]}),
            "spec.volumes[v].projected.sources",
            "secret",
            "remove it",
        ),
        (volume(hostPath={"path": "/"}), "spec.volumes[v].hostPath", "/", "remove it"),
        (volume(nfs={"server": "s", "path": "/x"}), "spec.volumes[v].nfs", "/x", "remove it"),
        (
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/etc"}}]},
            "spec.volumes[tmp].hostPath",
            "/etc",
            "remove it",
        ),
        # Past the scheduler, or before the cluster's own pods
        ({"nodeName": "node-1"}, "spec.nodeName", "node-1", "use nodeSelector or affinity"),
        *(
            ({"priorityClassName": each}, "spec.priorityClassName", each, "use a class of your own")
            for each in ("system-node-critical", "system-cluster-critical")
        ),
        # Root
        (
            context_of(runAsNonRoot=False),
            f"{IN_MAIN}.runAsNonRoot",
            "false",
            "leave it at true",
        ),
        (context_of(runAsUser=0), f"{IN_MAIN}.runAsUser", "0, which is root,", "name another user"),
        (
            {"securityContext": {"runAsUser": 0}},
            f"{IN_POD}.runAsUser",
            "0, which is root,",
            "name another user",
        ),
        ({"securityContext": {"runAsNonRoot": None}}, f"{IN_MAIN}.runAsNonRoot", "none", "leave it at true"),
        (beside(runAsUser=0), f"{IN_INIT}.runAsUser", "0, which is root,", "name another user"),
        # Out of the container
        (context_of(privileged=True), f"{IN_MAIN}.privileged", "true", "remove it"),
        (beside(privileged=True), f"{IN_INIT}.privileged", "true", "remove it"),
        *(
            (
                context_of(allowPrivilegeEscalation=value),
                f"{IN_MAIN}.allowPrivilegeEscalation",
                shown,
                "leave it at false",
            )
            for value, shown in ((True, "true"), (None, "none"))
        ),
        (
            context_of(capabilities={"add": ["SYS_ADMIN"]}),
            f"{IN_MAIN}.capabilities.add",
            "SYS_ADMIN",
            "remove it",
        ),
        (context_of(capabilities=None), f"{IN_MAIN}.capabilities.drop", "none", "leave it at ALL"),
        (
            context_of(capabilities={"drop": ["KILL"]}),
            f"{IN_MAIN}.capabilities.drop",
            "KILL",
            "leave it at ALL",
        ),
        (beside(capabilities={"drop": []}), f"{IN_INIT}.capabilities.drop", "none", "leave it at ALL"),
        (
            context_of(seccompProfile=OTHERS_PROFILE),
            f"{IN_MAIN}.seccompProfile.type",
            "Unconfined",
            "leave it at RuntimeDefault",
        ),
        (
            {"securityContext": {"seccompProfile": None}},
            f"{IN_MAIN}.seccompProfile.type",
            "none",
            "leave it at RuntimeDefault",
        ),
        *(
            (spec, f"{place}.appArmorProfile", "Unconfined", "remove it")
            for spec, place in (
                (context_of(appArmorProfile=OTHERS_PROFILE), IN_MAIN),
                ({"securityContext": {"appArmorProfile": OTHERS_PROFILE}}, IN_POD),
            )
        ),
        *(
            (spec, f"{place}.seLinuxOptions", "spc_t", "remove it")
            for spec, place in (
                (context_of(seLinuxOptions={"type": "spc_t"}), IN_MAIN),
                ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, IN_POD),
            )
        ),
        (context_of(seLinuxOptions={"user": "root"}), f"{IN_MAIN}.seLinuxOptions", "root", "remove it"),
        *(
            (spec, f"{place}.windowsOptions.hostProcess", "true", "remove it")
            for spec, place in (
                (context_of(windowsOptions={"hostProcess": True}), IN_MAIN),
                ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, IN_POD),
            )
        ),
        (
            {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
            f"{IN_POD}.sysctls",
            "kernel.msgmax",
            "remove it",
        ),
        (context_of(procMount="Unmasked"), f"{IN_MAIN}.procMount", "Unmasked", "remove it"),
        # The node's network
        (
            main(ports=[{"containerPort": 9, "hostPort": 9}]),
            "spec.containers[main].ports.hostPort",
            "9",
            "remove it",
        ),
        (
            main(livenessProbe={"httpGet": {"host": "169.254.169.254"}}),
            "spec.containers[main].livenessProbe.httpGet.host",
            "169.254.169.254",
            "remove it",
        ),
        (
            main(lifecycle={"postStart": {"tcpSocket": {"host": "h", "port": 1}}}),
            "spec.containers[main].lifecycle.postStart.tcpSocket.host",
            "h",
            "remove it",
        ),
    ],
)
def test_a_privilege_is_refused_by_name(objects, context, hostile):
    """Added or left when something was removed. The message says which chart value allows it; with that it is built."""
    spec, path, value, remedy = hostile
    with pytest.raises(InvalidSpecError) as refused:
        objects(services=changed(**spec))
    (problem,) = refused.value.problems
    assert problem.path == f"spec.services.decode.podTemplate.{path}"
    assert problem.message == (
        f"{value} is not allowed in a podTemplate; {remedy}, or set the chart's "
        "operator.allowPrivilegedPodTemplates"
    )
    assert objects(services=changed(**spec), context=replace(context, allows_privileges=True))


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (
            main(securityContext={"$patch": "replace"}),
            {f"{IN_MAIN}.allowPrivilegeEscalation", f"{IN_MAIN}.capabilities.drop"},
        ),
        (
            main(securityContext=None),
            {f"{IN_MAIN}.allowPrivilegeEscalation", f"{IN_MAIN}.capabilities.drop"},
        ),
        (
            {"securityContext": {"$patch": "replace"}},
            {f"{IN_MAIN}.runAsNonRoot", f"{IN_MAIN}.seccompProfile.type"},
        ),
        ({"securityContext": None}, {f"{IN_MAIN}.runAsNonRoot", f"{IN_MAIN}.seccompProfile.type"}),
        (
            {"containers": [{"$patch": "replace"}, {"name": "main", "image": "i"}]},
            {f"{IN_MAIN}.allowPrivilegeEscalation", f"{IN_MAIN}.capabilities.drop"},
        ),
        (
            {"$patch": "replace", "containers": [{"name": "main", "image": "i"}]},
            {
                "spec.serviceAccountName",
                "spec.automountServiceAccountToken",
                *(f"{IN_MAIN}.{key}" for key in ("runAsNonRoot", "seccompProfile.type")),
                *(f"{IN_MAIN}.{key}" for key in ("allowPrivilegeEscalation", "capabilities.drop")),
            },
        ),
    ],
)
def test_what_an_overlay_removes_is_missed(objects, spec, paths):
    """The merged pod is judged, so that dropping the security context is refused like adding a privilege."""
    with pytest.raises(InvalidSpecError) as refused:
        objects(services=changed(**spec))
    prefix = "spec.services.decode.podTemplate."
    assert {each.path.removeprefix(prefix) for each in refused.value.problems} == paths


def test_a_profile_outside_the_security_context_is_refused(objects):
    """AppArmor's annotation of Kubernetes before 1.30."""
    key = "container.apparmor.security.beta.kubernetes.io/main"
    services = {"decode": {"podTemplate": {"metadata": {"annotations": {key: "unconfined"}}}}}
    with pytest.raises(
        InvalidSpecError, match=r"metadata\.annotations\[container\.apparmor.*unconfined is not"
    ):
        objects(services=services)


def test_an_added_container_is_confined_as_the_main_one_is(template):
    """What it states of its own is kept; what it leaves out is filled in."""
    spec = {
        "containers": [
            {"name": "log", "image": "i", "securityContext": {"runAsUser": 2000, "capabilities": None}}
        ],
        "initContainers": [{"name": "fetch", "image": "i"}],
    }
    pod = template("decode", services=changed(**spec))["spec"]
    confined = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": False,
    }
    assert pod["containers"][1]["securityContext"] == {**confined, "runAsUser": 2000}
    assert pod["initContainers"][0]["securityContext"] == confined


@pytest.mark.parametrize(
    "spec",
    [
        {"hostNetwork": False, "serviceAccountName": "llama-worker", "automountServiceAccountToken": False},
        context_of(privileged=False, runAsUser=2000, capabilities={"drop": ["ALL"]}),
        context_of(readOnlyRootFilesystem=False, runAsNonRoot=None),
        {"securityContext": {"fsGroup": 3000, "seLinuxOptions": {"level": "s0:c1,c2"}}},
        {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}]}},
        volume(emptyDir={"medium": "Memory"}),
        volume(persistentVolumeClaim={"claimName": "c"}),
        volume(projected={"sources": [{"configMap": {"name": "c"}}, {"downwardAPI": {}}]}),
        {"volumes": None, "priorityClassName": "high"},
        main(livenessProbe={"httpGet": {"path": "/health", "port": 8000}}),
    ],
)
def test_what_adds_nothing_is_built(objects, spec):
    """False values, the pod's own account, other volumes."""
    assert objects(services=changed(**spec))
