"""Which ResourceQuotas of a namespace allow fewer GPUs than a pool shares out there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.kube.objects.quantity import quantity

Object = Mapping[str, Any]


def quota_problems(
    quotas: Sequence[Object], resource: str, gpus: int, *, namespace: str | None = None
) -> list[str]:
    """Return a sentence of each quota that is lower than the pool.

    Args:
        quotas: Of one namespace; one with scopes is for some pods alone and is left out.
        resource: Extended resource of the pool.
        gpus: That its graphs may hold together; of a ClusterGpuPool, what is guaranteed to those of the namespace.
        namespace: Of the quotas, in a ClusterGpuPool; None: the pool's own.
    """
    said = []
    for each in sorted(quotas, key=lambda quota: str(quota["metadata"]["name"])):
        spec = each.get("spec") or {}
        most = quantity((spec.get("hard") or {}).get(f"requests.{resource}"))
        if most is not None and most < gpus and not spec.get("scopes") and not spec.get("scopeSelector"):
            name = each["metadata"]["name"]
            what, key = f"the pool's {gpus}", "spec.gpus"
            if namespace is not None:
                name = f"{namespace}/{name}"
                what, key = f"the {gpus} guaranteed to graphs there", "guaranteedGpus"
            said.append(
                f"ResourceQuota {name} allows {int(most)} {resource}, fewer than {what}, so granted workers are refused; "
                f"raise it or lower {key}"
            )
    return said
