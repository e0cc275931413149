"""What the operator may do: exactly the calls that this package makes, for the chart to grant and tests to compare.

Every API group with its resources and their verbs; writing the own Lease is granted apart, by its name. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_CHILD: Final = frozenset({"create", "delete", "get", "list", "patch", "watch"})

RULES: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("", "configmaps"): _CHILD,
    ("", "serviceaccounts"): _CHILD,
    ("", "services"): _CHILD,
    # The routers' secret, which is made once and never read.
    ("", "secrets"): frozenset({"create"}),
    ("", "events"): frozenset({"create", "patch"}),
    ("", "pods"): frozenset({"delete", "list", "patch", "watch"}),
    ("apps", "deployments"): _CHILD,
    ("batch", "jobs"): frozenset({"create", "get", "list", "patch", "watch"}),
    # Held only because nobody may grant (to routers) what they do not hold.
    ("discovery.k8s.io", "endpointslices"): frozenset({"get", "list", "watch"}),
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): _CHILD,
    ("networking.k8s.io", "networkpolicies"): _CHILD,
    # So too: Dynamo's workers register themselves there.
    ("nvidia.com", "dynamoworkermetadatas"): frozenset({"create", "get", "list", "patch", "watch"}),
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
}
"""Verbs by API group and resource."""
