"""Refuses podTemplates that would let a pod escape its container or use another account's rights.

Being allowed to write a GraphDeployment must not imply being allowed to run privileged pods: the operator would lend
out its own right to create them. So the merged pod must conform to the restricted pod security standard, whatever the
overlay added or removed. Volumes that the operator builds itself (a node pool's cacheMount, the routers' keys) are
not checked. Exceptions that the operator's owner allows are in `resources.allowances`. Operator, `penstock validate`
and `penstock render` build the same pods and therefore refuse the same podTemplates.

Source: kubernetes.io/docs/concepts/security/pod-security-standards, profile Restricted of v1.34.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.kube.objects.names import GRAPH_SECRET_VARIABLE
from penstock_operator.resources.allowances import Allowances, chart_entry

USER_ID = 1000
"""User and group ID of every process. vLLM's image names none, and any user except root works."""


RESTRICTED: Final[Mapping[str, Any]] = {
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    # Kubernetes would derive variables such as VLLM_PORT from Service names, and they would configure the process.
    "enableServiceLinks": False,
}
"""Security context of every pod; Kubernetes makes volumes that support it writable for `USER_ID`."""


def container_security(*, is_root_read_only: bool) -> dict[str, Any]:
    """Return the ``securityContext`` of a container: no privilege escalation and no capabilities.

    Args:
        is_root_read_only: Whether the root file system is read-only. False for images that write outside of their
            volumes, such as vLLM's.
    """
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": is_root_read_only,
    }


_REMOVE: Final = "remove it"
HOST_NAMESPACES: Final = ("hostNetwork", "hostPID", "hostIPC")
_CONTAINERS: Final = ("containers", "initContainers", "ephemeralContainers")
_HANDLERS: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS: Final = ("postStart", "preStop")

_VOLUMES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
"""Volume types that the restricted standard allows."""
_PROJECTED: Final = frozenset({"clusterTrustBundle", "configMap", "downwardAPI", "secret"})
"""Sources of projected volumes that are not tokens of the pod's account."""

_SYSCTLS: Final = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_syncookies",
    }
)
_SELINUX_TYPES: Final = frozenset(
    {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
_PROFILES: Final = frozenset({"RuntimeDefault", "Localhost"})
_APPARMOR: Final = "container.apparmor.security.beta.kubernetes.io/"
_SYSTEM: Final = "system-"
"""Prefix of the priority classes that can evict the cluster's own pods."""


class _Found(NamedTuple):
    """A forbidden setting of a pod: its key, its value as text, a remedy, and the chart value that would allow it."""

    key: str
    value: str
    remedy: str = _REMOVE
    allowed_by: str = chart_entry("everything")


def confined(
    built: Mapping[str, Any], template: Mapping[str, Any], path: str, allowed: Allowances
) -> dict[str, Any]:
    """Return a pod template in which added containers have the default security settings; raise if its privileges are not allowed.

    An added container keeps the security settings that the user wrote for it.

    Args:
        built: The template that the operator built.
        template: The built template merged with the user's podTemplate, which can add containers.
        path: Path of the podTemplate in the manifest, for messages.
        allowed: Privileges that the podTemplate can use.

    Raises:
        InvalidSpecError: The template uses privileges that are not allowed; the error lists each with its key.
    """
    own, spec = built["spec"], dict(_map(template.get("spec")))
    for kind in _CONTAINERS:
        known = [each["name"] for each in _maps(own.get(kind))]
        if added := _maps(spec.get(kind)):
            spec[kind] = [each if each.get("name") in known else _with_defaults(each) for each in added]
    annotations = _map(_map(template.get("metadata")).get("annotations"))
    problems = []
    for key, value, remedy, allowed_by in (*_of_annotations(annotations), *_of_pod(own, spec, allowed)):
        message = f"{value} is not allowed in a podTemplate; {remedy}, or set the chart's {allowed_by}"
        problems.append(ManifestProblem(path=f"{path}.{key}", message=message))
    if problems:
        raise InvalidSpecError(problems)
    return {**template, "spec": spec}


def _with_defaults(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return an added container with the default security context, overridden by its own values; its root may be writable."""
    stated = {
        key: value for key, value in _map(container.get("securityContext")).items() if value is not None
    }
    return {**container, "securityContext": container_security(is_root_read_only=False) | stated}


def _of_annotations(annotations: Mapping[str, Any]) -> Iterator[_Found]:
    for key, value in annotations.items():
        if key.startswith(_APPARMOR) and not str(value).startswith(("runtime/default", "localhost/")):
            yield _Found(f"metadata.annotations[{key}]", str(value))


def _of_pod(own: Mapping[str, Any], spec: Mapping[str, Any], allowed: Allowances) -> Iterator[_Found]:
    for key in HOST_NAMESPACES:
        if spec.get(key) and not allowed.has(key):
            yield _Found(f"spec.{key}", "true", allowed_by=chart_entry(key))
    yield from _of_account(own, spec, allowed)
    if spec.get("nodeName"):
        yield _Found("spec.nodeName", str(spec["nodeName"]), "use nodeSelector or affinity")
    if str(spec.get("priorityClassName", "")).startswith(_SYSTEM):
        yield _Found("spec.priorityClassName", str(spec["priorityClassName"]), "use a class of your own")
    for volume in _maps(spec.get("volumes")):
        if volume not in own.get("volumes", ()):
            yield from _of_volume(volume, f"spec.volumes[{volume.get('name')}]", allowed)
    pod = _map(spec.get("securityContext"))
    yield from _of_context(pod, "spec.securityContext")
    for kind in _CONTAINERS:
        for container in _maps(spec.get(kind)):
            place = f"spec.{kind}[{container.get('name')}]"
            yield from _of_container(container, pod, place, allowed)
            yield from _of_variables(container, place, allowed)


def _of_account(own: Mapping[str, Any], spec: Mapping[str, Any], allowed: Allowances) -> Iterator[_Found]:
    account = own["serviceAccountName"]
    for key in ("serviceAccountName", "serviceAccount"):
        given = spec.get(key)
        is_other = given != account and bool(given or key == "serviceAccountName")
        if is_other and not (given and allowed.holds("serviceAccounts", str(given))):
            entry = chart_entry("serviceAccounts", [str(given)]) if given else chart_entry("everything")
            yield _Found(f"spec.{key}", str(given or "none"), f"leave it at {account}", entry)
    mounts = spec.get("automountServiceAccountToken") is not False
    if mounts and not own["automountServiceAccountToken"] and not allowed.everything:
        yield _Found("spec.automountServiceAccountToken", "a token of the API", "leave it at false")


def _of_volume(volume: Mapping[str, Any], place: str, allowed: Allowances) -> Iterator[_Found]:
    for kind, source in volume.items():
        if kind == "name" or source is None:
            continue
        named = _map(source)
        if kind == "secret":
            yield from _of_secret(named.get("secretName"), f"{place}.{kind}", allowed)
        elif kind == "hostPath":
            folder = str(named.get("path"))
            if not allowed.holds("hostPaths", folder):
                yield _Found(f"{place}.{kind}", folder, allowed_by=chart_entry("hostPaths", [folder]))
        elif kind not in _VOLUMES:
            yield _Found(f"{place}.{kind}", str(named.get("path") or kind))
        for projected in _maps(named.get("sources")) if kind == "projected" else ():
            yield from _of_projection(projected, f"{place}.projected.sources", allowed)


def _of_projection(source: Mapping[str, Any], place: str, allowed: Allowances) -> Iterator[_Found]:
    if "secret" in source:
        yield from _of_secret(_map(source["secret"]).get("name"), place, allowed)
    for each in source.keys() - _PROJECTED:
        is_token = each == "serviceAccountToken"
        if not (is_token and allowed.has("projectedTokens")):
            key = "projectedTokens" if is_token else "everything"
            yield _Found(place, each, allowed_by=chart_entry(key))


def _of_variables(container: Mapping[str, Any], place: str, allowed: Allowances) -> Iterator[_Found]:
    """Yield forbidden Secrets that environment variables use; the rule is the same as for volumes."""
    for each in _maps(container.get("env")):
        reference = _map(_map(each.get("valueFrom")).get("secretKeyRef"))
        if each.get("name") != GRAPH_SECRET_VARIABLE and reference:
            yield from _of_secret(reference.get("name"), f"{place}.env[{each.get('name')}]", allowed)
    for each in _maps(container.get("envFrom")):
        if "secretRef" in each:
            yield from _of_secret(_map(each["secretRef"]).get("name"), f"{place}.envFrom", allowed)


def _of_secret(name: object, place: str, allowed: Allowances) -> Iterator[_Found]:
    if not allowed.holds("secrets", str(name)):
        yield _Found(place, f"Secret {name}", allowed_by=chart_entry("secrets", [str(name)]))


def _of_context(context: Mapping[str, Any], place: str) -> Iterator[_Found]:
    """Yield settings that are forbidden in the security context of pods and containers alike."""
    for sysctl in _maps(context.get("sysctls")):
        if sysctl.get("name") not in _SYSCTLS:
            yield _Found(f"{place}.sysctls", str(sysctl.get("name")))
    if context.get("runAsUser") == 0:
        yield _Found(f"{place}.runAsUser", "0, which is root,", "name another user")
    labels = _map(context.get("seLinuxOptions"))
    if (labels.get("type") or "") not in _SELINUX_TYPES or labels.get("user") or labels.get("role"):
        yield _Found(f"{place}.seLinuxOptions", ", ".join(str(each) for each in labels.values()))
    armour = _map(context.get("appArmorProfile")).get("type", "RuntimeDefault")
    if armour not in _PROFILES:
        yield _Found(f"{place}.appArmorProfile", str(armour))
    if _map(context.get("windowsOptions")).get("hostProcess"):
        yield _Found(f"{place}.windowsOptions.hostProcess", "true")


def _of_container(
    container: Mapping[str, Any], pod: Mapping[str, Any], where: str, allowed: Allowances
) -> Iterator[_Found]:
    security = _map(container.get("securityContext"))
    place = f"{where}.securityContext"
    yield from _of_context(security, place)
    # A container's own value overrides the pod's; null counts as absent.
    merged = {**pod, **{key: value for key, value in security.items() if value is not None}}
    if merged.get("runAsNonRoot") is not True:
        yield _Found(f"{place}.runAsNonRoot", _shown(merged.get("runAsNonRoot")), "leave it at true")
    seccomp = _map(merged.get("seccompProfile")).get("type")
    if seccomp not in _PROFILES:
        yield _Found(f"{place}.seccompProfile.type", _shown(seccomp), "leave it at RuntimeDefault")
    if security.get("privileged"):
        yield _Found(f"{place}.privileged", "true")
    if security.get("allowPrivilegeEscalation") is not False:
        escalates = _shown(security.get("allowPrivilegeEscalation"))
        yield _Found(f"{place}.allowPrivilegeEscalation", escalates, "leave it at false")
    yield from _of_capabilities(_map(security.get("capabilities")), f"{place}.capabilities", allowed)
    if security.get("procMount") not in {None, "Default"}:
        yield _Found(f"{place}.procMount", str(security["procMount"]))
    yield from _of_node_network(container, where)


def _of_capabilities(capabilities: Mapping[str, Any], place: str, allowed: Allowances) -> Iterator[_Found]:
    added = [str(each) for each in capabilities.get("add") or ()]
    if refused := [each for each in added if not allowed.holds("capabilities", each)]:
        entry = chart_entry("capabilities", refused)
        yield _Found(f"{place}.add", ", ".join(refused), allowed_by=entry)
    if "ALL" not in (dropped := capabilities.get("drop") or ()):
        yield _Found(f"{place}.drop", ", ".join(map(str, dropped)) or "none", "leave it at ALL")


def _of_node_network(container: Mapping[str, Any], where: str) -> Iterator[_Found]:
    for port in _maps(container.get("ports")):
        if port.get("hostPort"):
            yield _Found(f"{where}.ports.hostPort", str(port["hostPort"]))
    handlers = [(key, _map(container.get(key))) for key in _HANDLERS]
    handlers += [(f"lifecycle.{key}", _map(_map(container.get("lifecycle")).get(key))) for key in _HOOKS]
    for name, handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            if host := _map(handler.get(kind)).get("host"):
                # The kubelet would send the request from the node to that host.
                yield _Found(f"{where}.{name}.{kind}.host", str(host))


def _shown(value: object) -> str:
    """Return a value as it is written in a manifest."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
