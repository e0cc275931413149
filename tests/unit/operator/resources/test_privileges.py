"""A podTemplate adds no privilege to a pod unless the operator's owner allows it."""

from dataclasses import replace

import pytest

from penstock.core.errors import ConfigError, InvalidSpecError
from penstock_operator.resources.allowances import allowances_of


def changed(**spec):
    """Return a decode service whose podTemplate has this specification."""
    return {"decode": {"podTemplate": {"spec": spec}}}


def main(**changes):
    """Return a podTemplate's main container."""
    return {"containers": [{"name": "main", **changes}]}


def context_of(**keys):
    """Return a podTemplate whose main container has this security context."""
    return main(securityContext=keys)


def pod_context_of(**keys):
    """Return a podTemplate whose pod has this security context."""
    return {"securityContext": keys}


def alongside(**keys):
    """Return a podTemplate with an init container of this security context."""
    return {"initContainers": [{"name": "tune", "image": "i", "securityContext": keys}]}


def volume(**source):
    """Return a podTemplate with one more volume."""
    return {"volumes": [{"name": "v", **source}]}


def priority(name):
    """Return a podTemplate with a priority class."""
    return {"priorityClassName": name}


def projected(**source):
    """Return a podTemplate with a volume of one more source."""
    return volume(projected={"sources": [source]})


MAIN = "spec.containers[main]"
IN_MAIN = f"{MAIN}.securityContext"
IN_POD = "spec.securityContext"
IN_INIT = "spec.initContainers[tune].securityContext"
PRIORITY = "spec.priorityClassName"
OTHERS_PROFILE = {"type": "Unconfined"}
ON_HOST = {"hostProcess": True}
TCP = {"host": "h", "port": 1}


METADATA = "169.254.169.254"
TOKEN = "spec.automountServiceAccountToken"
ROOT = "0, which is root,"
TO_REMOVE = [
    ({"hostNetwork": True}, "spec.hostNetwork", "true"),
    ({"hostPID": True}, "spec.hostPID", "true"),
    ({"hostIPC": True}, "spec.hostIPC", "true"),
    # Secrets of others, the node's files
    (
        projected(serviceAccountToken={"path": "t"}),
        "spec.volumes[v].projected.sources",
        "serviceAccountToken",
    ),
    (volume(hostPath={"path": "/"}), "spec.volumes[v].hostPath", "/"),
    (volume(nfs={"server": "s", "path": "/x"}), "spec.volumes[v].nfs", "/x"),
    ({"volumes": [{"name": "tmp", "hostPath": {"path": "/etc"}}]}, "spec.volumes[tmp].hostPath", "/etc"),
    # Out of the container
    (context_of(privileged=True), f"{IN_MAIN}.privileged", "true"),
    (alongside(privileged=True), f"{IN_INIT}.privileged", "true"),
    (context_of(capabilities={"add": ["SYS_ADMIN"]}), f"{IN_MAIN}.capabilities.add", "SYS_ADMIN"),
    (context_of(appArmorProfile=OTHERS_PROFILE), f"{IN_MAIN}.appArmorProfile", "Unconfined"),
    (pod_context_of(appArmorProfile=OTHERS_PROFILE), f"{IN_POD}.appArmorProfile", "Unconfined"),
    (context_of(seLinuxOptions={"type": "spc_t"}), f"{IN_MAIN}.seLinuxOptions", "spc_t"),
    (pod_context_of(seLinuxOptions={"type": "spc_t"}), f"{IN_POD}.seLinuxOptions", "spc_t"),
    (context_of(seLinuxOptions={"user": "root"}), f"{IN_MAIN}.seLinuxOptions", "root"),
    (context_of(windowsOptions=ON_HOST), f"{IN_MAIN}.windowsOptions.hostProcess", "true"),
    (pod_context_of(windowsOptions=ON_HOST), f"{IN_POD}.windowsOptions.hostProcess", "true"),
    (pod_context_of(sysctls=[{"name": "kernel.msgmax", "value": "1"}]), f"{IN_POD}.sysctls", "kernel.msgmax"),
    (context_of(procMount="Unmasked"), f"{IN_MAIN}.procMount", "Unmasked"),
    # The node's network
    (main(ports=[{"containerPort": 9, "hostPort": 9}]), f"{MAIN}.ports.hostPort", "9"),
    (main(livenessProbe={"httpGet": {"host": METADATA}}), f"{MAIN}.livenessProbe.httpGet.host", METADATA),
    (main(lifecycle={"postStart": {"tcpSocket": TCP}}), f"{MAIN}.lifecycle.postStart.tcpSocket.host", "h"),
]
TO_LEAVE = [
    # Another account's rights, or a token of the own one
    ({"serviceAccountName": "admin"}, "spec.serviceAccountName", "admin", "llama-worker"),
    ({"serviceAccount": "admin"}, "spec.serviceAccount", "admin", "llama-worker"),
    ({"serviceAccountName": None}, "spec.serviceAccountName", "none", "llama-worker"),
    ({"automountServiceAccountToken": True}, TOKEN, "a token of the API", "false"),
    ({"automountServiceAccountToken": None}, TOKEN, "a token of the API", "false"),
    # Root, and out of the container
    (context_of(runAsNonRoot=False), f"{IN_MAIN}.runAsNonRoot", "false", "true"),
    (pod_context_of(runAsNonRoot=None), f"{IN_MAIN}.runAsNonRoot", "none", "true"),
    (context_of(allowPrivilegeEscalation=True), f"{IN_MAIN}.allowPrivilegeEscalation", "true", "false"),
    (context_of(allowPrivilegeEscalation=None), f"{IN_MAIN}.allowPrivilegeEscalation", "none", "false"),
    (context_of(capabilities=None), f"{IN_MAIN}.capabilities.drop", "none", "ALL"),
    (context_of(capabilities={"drop": ["KILL"]}), f"{IN_MAIN}.capabilities.drop", "KILL", "ALL"),
    (alongside(capabilities={"drop": []}), f"{IN_INIT}.capabilities.drop", "none", "ALL"),
    (
        context_of(seccompProfile=OTHERS_PROFILE),
        f"{IN_MAIN}.seccompProfile.type",
        "Unconfined",
        "RuntimeDefault",
    ),
    (pod_context_of(seccompProfile=None), f"{IN_MAIN}.seccompProfile.type", "none", "RuntimeDefault"),
]
TO_CHANGE = [
    # Past the scheduler, or before the cluster's own pods
    ({"nodeName": "node-1"}, "spec.nodeName", "node-1", "use nodeSelector or affinity"),
    (priority("system-node-critical"), PRIORITY, "system-node-critical", "use a class of your own"),
    (priority("system-cluster-critical"), PRIORITY, "system-cluster-critical", "use a class of your own"),
    # Root
    (context_of(runAsUser=0), f"{IN_MAIN}.runAsUser", ROOT, "name another user"),
    (pod_context_of(runAsUser=0), f"{IN_POD}.runAsUser", ROOT, "name another user"),
    (alongside(runAsUser=0), f"{IN_INIT}.runAsUser", ROOT, "name another user"),
]
HOSTILE = [
    *((*row, "remove it") for row in TO_REMOVE),
    *((*row, f"leave it at {value}") for *row, value in TO_LEAVE),
    *TO_CHANGE,
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_privilege_is_refused_by_name(objects, context, hostile):
    """Added or left when something was removed. The message says which chart value allows it; with that it is built."""
    spec, path, value, remedy = hostile
    with pytest.raises(InvalidSpecError) as refused:
        objects(services=changed(**spec))
    (problem,) = refused.value.problems
    assert problem.path == f"spec.services.decode.podTemplate.{path}"
    said = f"{value} is not allowed in a podTemplate; {remedy}, or set the chart's podTemplates.allow."
    assert problem.message.startswith(said)
    key, names = problem.message.removeprefix(said).split(": ")
    entry = key if names == "true" else f"{key}={names.strip('[]')}"
    allowed = allowances_of(entry)
    assert objects(services=changed(**spec), context=replace(context, allowed=allowed))


SECRETS = [
    ({"volumes": [{"name": "v", "secret": {"secretName": "admin"}}]}, "spec.volumes[v].secret"),
    (
        {"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "admin"}}]}}]},
        "spec.volumes[v].projected.sources",
    ),
    (main(envFrom=[{"secretRef": {"name": "admin"}}]), "spec.containers[main].envFrom"),
    (
        main(env=[{"name": "T", "valueFrom": {"secretKeyRef": {"name": "admin", "key": "k"}}}]),
        "spec.containers[main].env[T]",
    ),
]


@pytest.mark.parametrize(("spec", "path"), SECRETS)
def test_secrets_have_one_rule_for_volumes_and_variables(objects, context, spec, path):
    """All are allowed unless the operator's owner names some: then those, by whatever way."""
    assert objects(services=changed(**spec))
    assert objects(services=changed(**spec), context=replace(context, allowed=allowances_of("secrets=adm*")))
    with pytest.raises(InvalidSpecError) as refused:
        objects(services=changed(**spec), context=replace(context, allowed=allowances_of("secrets=")))
    (problem,) = refused.value.problems
    assert problem.path == f"spec.services.decode.podTemplate.{path}"
    assert problem.message.endswith("set the chart's podTemplates.allow.secrets: [admin]")


def test_every_problem_of_every_service_is_named_at_once(objects):
    """Not the first service's alone."""
    bad = {"podTemplate": {"spec": {"hostIPC": True, "hostPID": True}}}
    with pytest.raises(InvalidSpecError) as refused:
        objects(services={"decode": bad, "prefill": bad})
    assert len(refused.value.problems) == 4


@pytest.mark.parametrize("text", ["hostipc", "capabilities", "hostIPC=true", "everything,other=1"])
def test_an_unknown_allowance_is_refused_with_the_known_ones(text):
    """A typing error allows nothing in silence."""
    with pytest.raises(ConfigError, match="hostNetwork"):
        allowances_of(text)


OF_CONTAINER = {f"{IN_MAIN}.allowPrivilegeEscalation", f"{IN_MAIN}.capabilities.drop"}
OF_POD = {f"{IN_MAIN}.runAsNonRoot", f"{IN_MAIN}.seccompProfile.type"}


@pytest.mark.parametrize(
    ("spec", "paths"),
    [
        (main(securityContext={"$patch": "replace"}), OF_CONTAINER),
        (main(securityContext=None), OF_CONTAINER),
        ({"securityContext": {"$patch": "replace"}}, OF_POD),
        ({"securityContext": None}, OF_POD),
        ({"containers": [{"$patch": "replace"}, {"name": "main", "image": "i"}]}, OF_CONTAINER),
        (
            {"$patch": "replace", "containers": [{"name": "main", "image": "i"}]},
            {"spec.serviceAccountName", TOKEN, *OF_POD, *OF_CONTAINER},
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


@pytest.mark.parametrize(
    "resource", ["nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared", "habana.ai/gaudi", "amd.com/gpu"]
)
def test_accelerators_that_the_budget_does_not_count_are_refused(objects, context, resource):
    """Whatever their device plugin calls them; the operator's owner may say which resources are GPUs."""
    spec = main(resources={"limits": {resource: 3}})
    with pytest.raises(InvalidSpecError, match="the budget counts"):
        objects(services=changed(**spec))
    assert objects(services=changed(**spec), context=replace(context, gpu_resources=("x.com/gpu",)))


def test_a_pod_templates_own_grace_is_refused(objects):
    """Drains go by the service's, so that another one would be kept by neither."""
    with pytest.raises(InvalidSpecError, match="set the service's terminationGracePeriodSeconds"):
        objects(services=changed(terminationGracePeriodSeconds=7))


def test_two_spreads_over_one_topology_stand_side_by_side(template):
    """A list map by topologyKey and whenUnsatisfiable, as the API server has it."""

    def spread(when, skew):
        return {
            "maxSkew": skew,
            "topologyKey": "zone",
            "whenUnsatisfiable": when,
            "labelSelector": {"matchLabels": {"a": "b"}},
        }

    both = [spread("DoNotSchedule", 3), spread("ScheduleAnyway", 1)]
    pod = template("decode", services=changed(topologySpreadConstraints=both))["spec"]
    assert [each for each in pod["topologySpreadConstraints"] if each["topologyKey"] == "zone"] == both
