"""RBAC rights that the operator, the planner and users need; penstock doctor checks them. The operator's match its calls exactly.

The tables list resources and verbs by API group. Writing the operator's own Lease is granted separately, by the
Lease's name. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_CHILD: Final = frozenset({"create", "delete", "get", "list", "patch", "watch"})

RULES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("", "configmaps"): _CHILD,
    ("", "serviceaccounts"): _CHILD,
    ("", "services"): _CHILD,
    # The routers' Secret, which is created once and never read.
    ("", "secrets"): frozenset({"create"}),
    ("", "events"): frozenset({"create", "patch"}),
    # To read the label that selects a podTemplate profile, and whether the operator's own namespace is being deleted.
    ("", "namespaces"): frozenset({"get"}),
    # To detect deleted and cordoned nodes immediately.
    ("", "nodes"): frozenset({"list", "watch"}),
    # To report a quota that is lower than a GpuPool.
    ("", "resourcequotas"): frozenset({"list"}),
    ("", "pods"): frozenset({"delete", "list", "patch", "watch"}),
    ("apps", "deployments"): _CHILD,
    ("batch", "jobs"): frozenset({"create", "get", "list", "patch", "watch"}),
    # Needed only because the operator must have every right that it grants to routers.
    ("discovery.k8s.io", "endpointslices"): frozenset({"get", "list", "watch"}),
    ("inference.networking.k8s.io", "inferencepools"): _CHILD,
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): _CHILD,
    ("networking.k8s.io", "networkpolicies"): _CHILD,
    ("penstock.dev", "gpupools"): frozenset({"list", "watch"}),
    ("penstock.dev", "gpupools/status"): frozenset({"patch"}),
    ("penstock.dev", "graphdeployments"): frozenset({"get", "list", "patch", "watch"}),
    # blockOwnerDeletion needs it if the admission plugin OwnerReferencesPermissionEnforcement is enabled.
    ("penstock.dev", "graphdeployments/finalizers"): frozenset({"update"}),
    ("penstock.dev", "graphdeployments/status"): frozenset({"patch"}),
    ("penstock.dev", "profilerequests"): frozenset({"list", "watch"}),
    ("penstock.dev", "profilerequests/finalizers"): frozenset({"update"}),
    ("penstock.dev", "profilerequests/status"): frozenset({"patch"}),
    ("penstock.dev", "scalingadapters"): _CHILD,
    ("penstock.dev", "scalingadapters/status"): frozenset({"patch"}),
    ("policy", "poddisruptionbudgets"): _CHILD,
    ("rbac.authorization.k8s.io", "rolebindings"): _CHILD,
    ("rbac.authorization.k8s.io", "roles"): _CHILD,
    # To count the GPUs that podTemplates claim (DRA).
    ("resource.k8s.io", "resourceclaimtemplates"): frozenset({"get"}),
}
"""Verbs that the operator needs, by API group and resource. The verbs that an inference runtime's processes need are
not included; they are in the runtime's `ClusterNeeds.verbs`."""

CLUSTER_RULES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    # To find the namespaces that a ClusterGpuPool selects by labels.
    ("", "namespaces"): frozenset({"list", "watch"}),
    ("penstock.dev", "clustergpupools"): frozenset({"list", "watch"}),
    ("penstock.dev", "clustergpupools/status"): frozenset({"patch"}),
}
"""Verbs on cluster-scoped kinds that an operator of the entire cluster needs in addition to `RULES`."""

_OF_OTHERS: Final = ("inference.networking.k8s.io", "leaderworkerset.x-k8s.io")
"""API groups whose rights the chart grants only if the cluster serves them."""

_OF_SETTINGS: Final = (("", "nodes"),)
"""Resources whose rights the chart grants only if a value (rbac.nodes) enables them."""


@dataclass(frozen=True, slots=True)
class Right:
    """One RBAC right.

    Attributes:
        group: API group; empty for the core group.
        resource: Plural name, with the subresource if there is one, such as ``scalingadapters/scale``.
        verb: Verb such as ``list``.
    """

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        resource, _, sub = self.resource.partition("/")
        full = f"{resource}.{self.group}" if self.group else resource
        return f"{self.verb} {full}{'/' if sub else ''}{sub}"


def _rights_in(
    rules: Mapping[tuple[str, str], frozenset[str]], left_out: tuple[tuple[str, str], ...] = ()
) -> tuple[Right, ...]:
    return tuple(
        Right(group, resource, verb)
        for (group, resource), verbs in rules.items()
        if group not in _OF_OTHERS and (group, resource) not in left_out
        for verb in sorted(verbs)
    )


OPERATOR_RIGHTS: Final = _rights_in(RULES, _OF_SETTINGS)
"""Rights that an operator of one namespace needs."""
CLUSTER_OPERATOR_RIGHTS: Final = (*OPERATOR_RIGHTS, *_rights_in(CLUSTER_RULES))
"""Rights that an operator of the entire cluster needs."""


def _rights(group: str, resources: tuple[str, ...], verbs: tuple[str, ...]) -> tuple[Right, ...]:
    return tuple(Right(group, resource, verb) for resource in resources for verb in verbs)


PLANNER_RIGHTS: Final = (
    *_rights("", ("configmaps",), ("get",)),
    *_rights("", ("events",), ("create", "patch")),
    *_rights("", ("pods",), ("list", "watch")),
    *_rights("penstock.dev", ("graphdeployments",), ("list", "watch")),
    *_rights("penstock.dev", ("scalingadapters",), ("get", "list", "watch")),
    *_rights("penstock.dev", ("graphdeployments/status", "scalingadapters/scale"), ("patch",)),
)
"""Rights that the planner needs."""

USER_RIGHTS: Final = (
    *_rights("penstock.dev", ("graphdeployments",), ("create", "delete", "get", "list", "patch")),
    *_rights("penstock.dev", ("profilerequests",), ("create", "delete", "get", "list")),
    *_rights("penstock.dev", ("scalingadapters/scale",), ("patch",)),
    *_rights("", ("pods",), ("get", "list")),
    *_rights("", ("pods/log", "pods/proxy"), ("get",)),
)
"""Rights that a user needs for `kubectl apply`, `kubectl scale`, `kubectl logs` and `penstock doctor`."""
