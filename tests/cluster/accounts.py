"""ServiceAccounts with rights of their own, by which the audit log tells one process from another."""

from __future__ import annotations

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
