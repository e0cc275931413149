"""What operator, planner and users must be allowed to do; the doctor asks for it. The operator's are exactly its calls.

Every API group with its resources and their verbs; writing the own Lease is granted apart, by its name. Pure data.
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
    # The routers' secret, which is made once and never read.
    ("", "secrets"): frozenset({"create"}),
    ("", "events"): frozenset({"create", "patch"}),
    # The label by which a profile of podTemplates is chosen, and whether the operator's own is being deleted.
    ("", "namespaces"): frozenset({"get"}),
    # A deleted node is noticed at once.
    ("", "nodes"): frozenset({"list", "watch"}),
    # One that is lower than a GpuPool is reported.
    ("", "resourcequotas"): frozenset({"list"}),
    ("", "pods"): frozenset({"delete", "list", "patch", "watch"}),
    ("apps", "deployments"): _CHILD,
    ("batch", "jobs"): frozenset({"create", "get", "list", "patch", "watch"}),
    # Held only because granting a right (to routers) requires holding it.
    ("discovery.k8s.io", "endpointslices"): frozenset({"get", "list", "watch"}),
    ("inference.networking.k8s.io", "inferencepools"): _CHILD,
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): _CHILD,
    ("networking.k8s.io", "networkpolicies"): _CHILD,
    ("penstock.dev", "gpupools"): frozenset({"list", "watch"}),
    ("penstock.dev", "gpupools/status"): frozenset({"patch"}),
    ("penstock.dev", "graphdeployments"): frozenset({"get", "list", "patch", "watch"}),
    # Where OwnerReferencesPermissionEnforcement is on, blockOwnerDeletion needs it.
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
    # The GPUs that podTemplates claim.
    ("resource.k8s.io", "resourceclaimtemplates"): frozenset({"get"}),
}
"""Verbs by API group and resource, without those that a runtime's processes need, which are its `ClusterNeeds.verbs`."""

CLUSTER_RULES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    # Those that a ClusterGpuPool selects by labels.
    ("", "namespaces"): frozenset({"list", "watch"}),
    ("penstock.dev", "clustergpupools"): frozenset({"list", "watch"}),
    ("penstock.dev", "clustergpupools/status"): frozenset({"patch"}),
}
"""What an operator of the complete cluster needs in addition to `RULES`: on kinds that live in no namespace."""

_OF_OTHERS: Final = ("inference.networking.k8s.io", "leaderworkerset.x-k8s.io")
"""Groups that the chart grants only where the cluster knows them."""

_OF_SETTINGS: Final = (("", "nodes"),)
"""Granted only with the value that needs them: the chart's rbac.nodes."""


@dataclass(frozen=True, slots=True)
class Right:
    """One right that an account must have: a verb such as ``list``, and the plural with its subresource."""

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
CLUSTER_OPERATOR_RIGHTS: Final = (*OPERATOR_RIGHTS, *_rights_in(CLUSTER_RULES))
"""Rights of an operator of the complete cluster."""


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

USER_RIGHTS: Final = (
    *_rights("penstock.dev", ("graphdeployments",), ("create", "delete", "get", "list", "patch")),
    *_rights("penstock.dev", ("profilerequests",), ("create", "delete", "get", "list")),
    *_rights("penstock.dev", ("scalingadapters/scale",), ("patch",)),
    *_rights("", ("pods",), ("get", "list")),
    *_rights("", ("pods/log", "pods/proxy"), ("get",)),
)
"""For `kubectl apply`, `kubectl scale`, `kubectl logs` and this doctor."""
