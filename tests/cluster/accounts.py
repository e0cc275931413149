"""ServiceAccounts with rights of their own, by which the audit log tells one process from another."""

from __future__ import annotations

from penstock.runtimes import runtime_of
from penstock_operator.rbac import PLANNER_RIGHTS, RULES

EVERYTHING = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
_GROUP = "rbac.authorization.k8s.io"


def account(plane, namespace, name, rules, *, cluster_wide=False):
    """Make a ServiceAccount that may do what ``rules`` say, in its namespace or in all; return its kubeconfig."""
    about = {"name": name, "namespace": namespace}
    kind = "ClusterRole" if cluster_wide else "Role"
    own = {"name": f"{name}-{namespace}"} if cluster_wide else about
    plane.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about},
        {"apiVersion": f"{_GROUP}/v1", "kind": kind, "metadata": own, "rules": rules},
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": f"{kind}Binding",
            "metadata": own,
            "roleRef": {"apiGroup": _GROUP, "kind": kind, "name": own["name"]},
            "subjects": [{"kind": "ServiceAccount", **about}],
        },
    )
    return plane.service_account_kubeconfig(namespace, name)


def let_watch_nodes(plane, namespace, name):
    """Give a ServiceAccount the one right of the operator's that no Role can give: nodes are of no namespace."""
    own = {"name": f"{name}-nodes-{namespace}"}
    plane.apply(
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "ClusterRole",
            "metadata": own,
            "rules": [_rule("", "nodes", *sorted(RULES["", "nodes"]))],
        },
        {
            "apiVersion": f"{_GROUP}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": own,
            "roleRef": {"apiGroup": _GROUP, "kind": "ClusterRole", "name": own["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    )


def operators_rules():
    """Return the rules that the operator's rights make, and those that it grants to Dynamo's processes."""
    rights = {**RULES, **runtime_of("dynamo").cluster.verbs}
    return [_rule(group, resource, *sorted(verbs)) for (group, resource), verbs in rights.items()]


def _rule(group, resource, *verbs):
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


PLANNER = [
    *(_rule(each.group, each.resource, each.verb) for each in PLANNER_RIGHTS),
    _rule("coordination.k8s.io", "leases", "create", "get", "patch", "update"),
]
"""What the doctor asks for, and the Lease."""
