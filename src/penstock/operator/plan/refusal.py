"""Pods that the API server refuses to create, and the remedy.

Pure. Such a pod never exists, so no pod can be diagnosed: a quota, a pod security level, a limit range or an
admission webhook speaks only through the workload's own condition.

Source: kubernetes/pkg/controller/replicaset/replica_set_utils.go and deployment/util/deployment_util.go: the
ReplicaSet's condition ReplicaFailure is copied to its Deployment. A LeaderWorkerSet has no such condition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.kube.objects.pods import REPLICA_FAILURE
from penstock.operator.plan.diagnose import Category, Diagnosis

_POD: Final = re.compile(r'^(?:[Pp]ods?) "[^"]*" is (?:forbidden|invalid): ')
"""The pod's generated name differs from try to try; the message must not."""

_QUOTA: Final = re.compile(r"exceeded quota: ([^,]+)")
_WEBHOOK: Final = re.compile(r'webhook "([^"]+)"')


def refusal(service: str, workload: Mapping[str, Any]) -> Diagnosis | None:
    """Return why no further pod of ``workload`` can be created; None if none was refused.

    Args:
        service: Service's name.
        workload: A Deployment with its status, as the API returns it.
    """
    conditions = (workload.get("status") or {}).get("conditions") or ()
    held = [
        each for each in conditions if each.get("type") == REPLICA_FAILURE and each.get("status") == "True"
    ]
    if not held:
        return None
    words = _POD.sub("", " ".join(str(held[0].get("message") or "").split()))
    message = f"the API server refuses its pods: {words or held[0].get('reason') or 'it gives no reason'}"
    return Diagnosis(Category.REFUSED, workload["metadata"]["name"], service, message, _remedy(words))


def _remedy(words: str) -> str:
    quota, webhook = _QUOTA.search(words), _WEBHOOK.search(words)
    if quota is not None:
        return f"raise ResourceQuota {quota.group(1)} of the namespace, or lower replicas"
    if "violates PodSecurity" in words:
        return "change podTemplate or cacheMount to what the namespace's pod security level allows"
    if webhook is not None:
        return f"ask who runs admission webhook {webhook.group(1)}, or change podTemplate"
    if "minimum" in words or "maximum" in words:
        return "set resources in podTemplate within the namespace's LimitRange"
    return "see kubectl describe replicaset, and the quotas, limit ranges and webhooks of the namespace"
