"""Which ResourceQuotas of a namespace allow fewer GPUs than its GpuPool shares out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.kube.objects.quantity import quantity

Object = Mapping[str, Any]


def quota_problems(quotas: Sequence[Object], resource: str, gpus: int) -> list[str]:
    """Return a sentence of each quota that is lower than the pool.

    Args:
        quotas: Of the pool's namespace; one with scopes is for some pods alone and is left out.
        resource: Extended resource of the pool.
        gpus: That its graphs may hold together.
    """
    said = []
    for each in sorted(quotas, key=lambda quota: str(quota["metadata"]["name"])):
        spec = each.get("spec") or {}
        most = quantity((spec.get("hard") or {}).get(f"requests.{resource}"))
        if most is not None and most < gpus and not spec.get("scopes") and not spec.get("scopeSelector"):
            name = each["metadata"]["name"]
            said.append(
                f"ResourceQuota {name} allows {int(most)} {resource}, fewer than the pool's {gpus}, so granted workers are "
                "refused; raise it or lower spec.gpus"
            )
    return said
