"""What operator, planner and users must be allowed to do. Pure.

A test compares the first two with the chart's rules: the doctor asks for nothing that the chart does not give.
"""

from __future__ import annotations

from typing import Final

from penstock.operator.doctor.facts import Right

_OWNED: Final = ("create", "delete", "get", "list", "patch", "watch")
_READ: Final = ("get", "list", "watch")
_LOOK: Final = ("list", "watch")


def _rights(group: str, resources: tuple[str, ...], verbs: tuple[str, ...]) -> tuple[Right, ...]:
    return tuple(Right(group, resource, verb) for resource in resources for verb in verbs)


OPERATOR_RIGHTS: Final = (
    *_rights("", ("configmaps", "serviceaccounts", "services"), _OWNED),
    *_rights("", ("events",), ("create", "patch")),
    *_rights("", ("pods",), ("list", "patch", "watch")),
    *_rights("apps", ("deployments",), _OWNED),
    *_rights("batch", ("jobs",), ("create", "get", "list", "patch", "watch")),
    *_rights("discovery.k8s.io", ("endpointslices",), _READ),
    *_rights("networking.k8s.io", ("networkpolicies",), _OWNED),
    *_rights("penstock.dev", ("graphdeployments",), ("list", "patch", "watch")),
    *_rights(
        "penstock.dev",
        ("graphdeployments/status", "profilerequests/status", "scalingadapters/status"),
        ("patch",),
    ),
    *_rights("penstock.dev", ("profilerequests",), _LOOK),
    *_rights("penstock.dev", ("scalingadapters",), _OWNED),
    *_rights("policy", ("poddisruptionbudgets",), _OWNED),
    *_rights("rbac.authorization.k8s.io", ("rolebindings", "roles"), _OWNED),
)

PLANNER_RIGHTS: Final = (
    *_rights("", ("configmaps",), ("get",)),
    *_rights("", ("events",), ("create", "patch")),
    *_rights("", ("pods",), _LOOK),
    *_rights("penstock.dev", ("graphdeployments",), _LOOK),
    *_rights("penstock.dev", ("scalingadapters",), _READ),
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
