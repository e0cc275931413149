"""The models' cross-field rules in CEL, so that the API server itself refuses what `penstock validate` does.

Each rule stands at the smallest part of the schema that holds all that it reads, because the API server
puts that part's path before the message; where a map's key is to blame the message spells the whole path,
for a schema cannot name it. A message names value, bound and remedy, in the models' words where one fits.

Written for the CEL of Kubernetes 1.29: ``[x].map(v, …)[0]`` binds a name, since that version has no
``cel.bind``. A null or absent key makes ``has()`` false; keys with a default are always there.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock_graph.crd.graph_rules import GRAPH_RULES, SPEC_RULES
from penstock_graph.crd.rule import Rule
from penstock_graph.models.engine import SHORTEST_SAFE_LEASE_S


def _immutable(what: str) -> Rule:
    return Rule(
        rule="self == oldSelf",
        message='"%s was %s and is immutable; keep it, or make a new graph".format([self, oldSelf])',
        short=f"the {what} is immutable; keep it, or make a new graph",
    )


_SERVICE = (
    Rule(
        rule="!has(self.scaling) || self.scaling.minReplicas <= self.scaling.maxReplicas",
        message=(
            "'%d exceeds maxReplicas %d; lower it or raise maxReplicas'"
            ".format([self.scaling.minReplicas, self.scaling.maxReplicas])"
        ),
        short="minReplicas exceeds maxReplicas; lower it or raise maxReplicas",
        field=".scaling.minReplicas",
    ),
    Rule(
        rule=(
            "!has(self.scaling) || self.scaling.minReplicas > self.scaling.maxReplicas || "
            "(self.scaling.minReplicas <= self.replicas && self.replicas <= self.scaling.maxReplicas)"
        ),
        message=(
            "'%d lies outside scaling\\'s %d to %d; move it or widen the bounds'"
            ".format([self.replicas, self.scaling.minReplicas, self.scaling.maxReplicas])"
        ),
        short="replicas lie outside scaling's bounds; move them or widen the bounds",
        field=".replicas",
    ),
    Rule(
        rule="self.nodesPerReplica < 1 || self.gpusPerReplica % self.nodesPerReplica == 0",
        message=(
            "'%d GPUs do not divide over %d nodes; make gpusPerReplica a multiple of nodesPerReplica'"
            ".format([self.gpusPerReplica, self.nodesPerReplica])"
        ),
        short="GPUs do not divide over the nodes; make gpusPerReplica a multiple of nodesPerReplica",
        field=".gpusPerReplica",
    ),
)


def _thresholds(prefix: str) -> Rule:
    down, up = f"{prefix}ScaleDownThreshold", f"{prefix}ScaleUpThreshold"
    return Rule(
        rule=f"self.{down} < self.{up}",
        message=(
            f"'%s is not below {up} %s; lower it, or the pool would flap'.format([self.{down}, self.{up}])"
        ),
        short=f"not below {up}; lower it, or the pool would flap",
        field=f".{down}",
    )


_PLANNER = (
    _thresholds("decodeKv"),
    _thresholds("prefillQueue"),
    Rule(
        rule="self.metricPullingIntervalSeconds <= self.adjustmentIntervalSeconds",
        message=(
            "'%s s exceeds adjustmentIntervalSeconds %s s; pull at least once per adjustment'"
            ".format([self.metricPullingIntervalSeconds, self.adjustmentIntervalSeconds])"
        ),
        short="exceeds adjustmentIntervalSeconds; pull at least once per adjustment",
        field=".metricPullingIntervalSeconds",
    ),
    Rule(
        rule="!has(self.maxGpuBudget) || self.minGpuBudget <= self.maxGpuBudget",
        message=(
            "'%d exceeds maxGpuBudget %d; lower it or raise maxGpuBudget'"
            ".format([self.minGpuBudget, self.maxGpuBudget])"
        ),
        short="exceeds maxGpuBudget; lower it or raise maxGpuBudget",
        field=".minGpuBudget",
    ),
)

_METRICS = (
    Rule(
        rule="self.source != 'prometheus' || has(self.prometheusUrl)",
        message="'null, yet source is prometheus; give its URL or choose router or scrape'",
        short="null, yet source is prometheus; give its URL or choose router or scrape",
        field=".prometheusUrl",
    ),
)

_LEASE = (
    Rule(
        rule=f"self.durationSeconds >= {SHORTEST_SAFE_LEASE_S} || self.acknowledgeShortLease",
        message=(
            f"'%d s is below {SHORTEST_SAFE_LEASE_S} s, so heartbeats would go out in every step; "
            "raise it or set acknowledgeShortLease: true'.format([self.durationSeconds])"
        ),
        short=f"below {SHORTEST_SAFE_LEASE_S} s; raise it or set acknowledgeShortLease: true",
        field=".durationSeconds",
    ),
)

_NODE_POOL = (
    Rule(
        rule="!has(self.cacheClaim) || has(self.cacheMount)",
        message="'%s is given, but no cacheMount; say where to mount it'.format([self.cacheClaim])",
        short="given, but no cacheMount; say where to mount it",
        field=".cacheClaim",
    ),
)

_SHARES = "self.shares.premium + self.shares.standard + self.shares.background"
_TIERS = (
    Rule(
        rule=f"{_SHARES} <= 1.000000001",
        message=f"'sum %s exceeds 1; lower one of the shares'.format([{_SHARES}])",
        short="the sum exceeds 1; lower one of the shares",
        field=".shares",
    ),
)

_ENV_VAR = (
    Rule(
        rule="!has(self.value) || !has(self.valueFrom)",
        message="'%s: value is set too; keep one of value and valueFrom'.format([self.name])",
        short="value is set too; keep one of value and valueFrom",
        field=".valueFrom",
    ),
)

_ENV_FROM = (
    Rule(
        rule="has(self.secretRef) != has(self.configMapRef)",
        message="'needs exactly one of secretRef and configMapRef'",
        short="needs exactly one of secretRef and configMapRef",
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "GraphDeployment": GRAPH_RULES,
    "GraphSpec": SPEC_RULES,
    "GraphSpec.runtime": (_immutable("runtime"),),
    "ModelSpec.name": (_immutable("model"),),
    "ServiceSpec": _SERVICE,
    "ServiceSpec.role": (_immutable("role of a service that stays"),),
    "NodePool": _NODE_POOL,
    "PlannerConfig": _PLANNER,
    "PlannerMetricsConfig": _METRICS,
    "LeaseConfig": _LEASE,
    "TiersConfig": _TIERS,
    "EnvVar": _ENV_VAR,
    "EnvFrom": _ENV_FROM,
}
"""Rules by the model that they judge, or by ``Model.key``."""
