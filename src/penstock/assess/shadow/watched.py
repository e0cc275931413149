"""Names the fleet that a shadow planner watches: Deployments or selections of scraped processes, by role. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.api import WORKER_ROLES, Role
from penstock.core.errors import ConfigError
from penstock_planner.sources.prometheus import escaped

FLAG: Final = "--shadow"
_FORM: Final = re.compile(
    r"(?:(?P<role>prefill|decode|aggregated)=)?"
    r"(?:\{(?P<matchers>[^{}]*)\}|(?:(?P<namespace>[a-z0-9][a-z0-9-]*)/)?(?P<name>[a-z0-9][a-z0-9.-]*))"
)
_AGGREGATED: Final = frozenset({Role.AGGREGATED})
_APART: Final = frozenset({Role.PREFILL, Role.DECODE})


class ReplicaSource(StrEnum):
    """Source of the replica counts of a watched Deployment.

    Attributes:
        PROMETHEUS: kube-state-metrics' series in the same Prometheus.
        SCALE: The Deployment's subresource ``/scale``, read with a kubeconfig.
    """

    PROMETHEUS = "prometheus"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class WatchedPool:
    """Replicas of one role that something else than Penstock scales.

    Attributes:
        role: Role of the replicas.
        deployment: Deployment that owns them; None counts the scraped processes instead.
        namespace: Namespace of the Deployment; None if it was not given.
        matchers: PromQL matchers that select the series of this role's processes.
    """

    role: Role
    deployment: str | None = None
    namespace: str | None = None
    matchers: tuple[str, ...] = ()

    @property
    def kube_matchers(self) -> str:
        """Return the PromQL matchers of kube-state-metrics' series of the Deployment, without braces."""
        named = [f'deployment="{escaped(self.deployment or "")}"']
        if self.namespace is not None:
            named.append(f'namespace="{escaped(self.namespace)}"')
        return ",".join(named)

    def __str__(self) -> str:
        """Return the pool as ``--shadow`` takes it."""
        if self.deployment is None:
            return f"{self.role.value}={{{','.join(self.matchers)}}}"
        place = "" if self.namespace is None else f"{self.namespace}/"
        return f"{self.role.value}={place}{self.deployment}"


def watched_pools(given: Sequence[str]) -> Mapping[Role, WatchedPool]:
    """Return the watched pools by role, from the values of ``--shadow``.

    Args:
        given: Values such as ``vllm``, ``prod/vllm``, ``decode=vllm-decode`` or ``prefill={job="prefill"}``. A value
            without a role is of aggregated workers.

    Raises:
        ConfigError: a value has another form, or the roles are neither aggregated alone nor prefill and decode.
    """
    found: dict[Role, WatchedPool] = {}
    for text in given:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                f'{FLAG} {text}: must be [ROLE=][NAMESPACE/]DEPLOYMENT or [ROLE=]{{MATCHERS}}, such as prod/vllm or decode={{job="decode"}}'
            )
        role = Role(match["role"] or Role.AGGREGATED)
        if role in found:
            raise ConfigError(
                f"{FLAG} {text}: {role.value} is watched already, as {found[role]}; give each role once"
            )
        matchers = tuple(filter(None, re.split(r",(?=\s*\w+\s*[=!])", match["matchers"] or "")))
        found[role] = WatchedPool(role, match["name"], match["namespace"], matchers)
    if set(found) == _AGGREGATED:
        return found
    if set(found) == _APART:
        return {role: _own_series(found[role]) for role in WORKER_ROLES if role in found}
    missing = Role.DECODE if Role.PREFILL in found else Role.PREFILL
    if Role.AGGREGATED in found:
        raise ConfigError(f"{FLAG}: aggregated workers and prefill or decode workers exclude each other")
    raise ConfigError(f"{FLAG}: {missing.value} is missing; give {FLAG} {missing.value}=DEPLOYMENT as well")


def _own_series(pool: WatchedPool) -> WatchedPool:
    """Return a pool of two whose series are told apart by the names of the Deployment's pods."""
    if pool.deployment is None:
        return pool
    pods = f'pod=~"{escaped(re.escape(pool.deployment))}-[a-z0-9]+-[a-z0-9]+"'
    return WatchedPool(pool.role, pool.deployment, pool.namespace, (pods,))
