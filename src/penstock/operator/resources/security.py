"""Security contexts that the restricted pod security standard accepts.

Source: kubernetes.io/docs/concepts/security/pod-security-standards, profile Restricted.
"""

from __future__ import annotations

from typing import Any

USER_ID = 1000
"""User and group of every process; vLLM's image names none, and any but root will do."""


def pod_security() -> dict[str, Any]:
    """Return the pod's security context; volumes that can be, are made writable for `USER_ID`."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, is_root_read_only: bool) -> dict[str, Any]:
    """Return the container's security context.

    Args:
        is_root_read_only: Whether the image runs without writing outside its volumes; vLLM's does not.
    """
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": is_root_read_only,
    }
