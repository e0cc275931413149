"""The models' cross-field rules in CEL, so that the API server itself refuses what `penstock validate` does.

Each rule stands at the smallest part of the schema that holds all that it reads, because the API server
puts that part's path before the message; where a map's key is to blame the message spells the whole path,
for a schema cannot name it. A message names value, bound and remedy, in the models' words where one fits.

Written for the CEL of Kubernetes 1.29: ``[x].map(v, …)[0]`` binds a name, since that version has no
``cel.bind``. A null or absent key makes ``has()`` false; keys with a default are always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock_graph.models.base import DNS_LABEL_PATTERN
from penstock_graph.models.engine import SHORTEST_SAFE_LEASE_S
from penstock_graph.models.enums import WORKER_ROLES, Role
from penstock_graph.rules import DYNAMO_POLICIES, MAX_CHILD_NAME, PLANNER_SERVICE


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        rule: CEL that is true for a valid object; ``self`` is the part that the rule stands at.
        message: CEL that gives the message; the values that it names are the object's.
        short: What is said if the message cannot be computed.
        field: Path below the part to blame, such as ``.maxGpuBudget``; empty: the part itself.
    """

    rule: str
    message: str
    short: str
    field: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Return the entry as the CustomResourceDefinition holds it."""
        entry = {"rule": self.rule, "message": self.short, "messageExpression": self.message}
        return {**entry, "fieldPath": self.field} if self.field else entry


_LABEL_REMEDY = (
    "use at most 63 lower-case letters, digits and hyphens, beginning and ending with a letter or digit"
)


def _immutable(what: str) -> Rule:
    return Rule(
        rule="self == oldSelf",
        message='"%s was %s and is immutable; keep it, or make a new graph".format([self, oldSelf])',
        short=f"the {what} is immutable; keep it, or make a new graph",
    )


_ROLES = "[" + ", ".join(f"'{role}'" for role in WORKER_ROLES) + "]"
_WORKERS = f"{_ROLES}.map(r, self.services.filter(k, self.services[k].role == r))"
_FLOOR = (
    "(!has(self.services[k].scaling) ? self.services[k].replicas * self.services[k].gpusPerReplica : "
    "[self.services[k].gpusPerReplica > 0 ? (self.planner.minGpuBudget + self.services[k].gpusPerReplica - 1) / "
    "self.services[k].gpusPerReplica : 0].map(n, n > self.services[k].scaling.minReplicas ? n : self.services[k].scaling.minReplicas)[0]"
    " * self.services[k].gpusPerReplica)"
)
_START = "self.services[k].replicas * self.services[k].gpusPerReplica"


def _sum(gpus: str) -> str:
    return f"self.services.filter(k, self.services[k].role != 'router').map(k, {gpus}).sum()"


def _named(role: str) -> str:
    """CEL for the name of the only service of a role; an error if there is none."""
    return f"self.services.filter(k, self.services[k].role == '{role}')[0]"


def _sum_message(bound: str, gpus: str, remedy: str) -> str:
    """CEL text such as ``5 GPUs are fewer than …: prefill 2 + decode 4 = 6; …``.

    One ``format`` and nothing appended to it: the API server takes the length of a number's text as unbounded.
    """
    values = {role: f"{_named(role)}, [{_named(role)}].map(k, {gpus})[0]" for role in WORKER_ROLES}
    budget, total = "self.planner.maxGpuBudget", _sum(gpus)
    return (
        f"{_count(Role.AGGREGATED)} ? '%d {bound}: %s %d = %d; {remedy}'"
        f".format([{budget}, {values[Role.AGGREGATED]}, {total}]) : '%d {bound}: %s %d + %s %d = %d; {remedy}'"
        f".format([{budget}, {values[Role.PREFILL]}, {values[Role.DECODE]}, {total}])"
    )


def _count(role: str) -> str:
    return f"self.services.exists(k, self.services[k].role == '{role}')"


_GRAPH = (
    Rule(
        rule=f"self.metadata.name.matches('{DNS_LABEL_PATTERN}')",
        message=f"'%s is not a DNS label; {_LABEL_REMEDY}'.format([self.metadata.name])",
        short=f"not a DNS label; {_LABEL_REMEDY}",
        field=".metadata.name",
    ),
    Rule(
        rule=f"self.spec.services.all(k, size(self.metadata.name) + size(k) < {MAX_CHILD_NAME})",
        message=(
            f"[self.spec.services.filter(k, size(self.metadata.name) + size(k) >= {MAX_CHILD_NAME})[0]].map(k, "
            f"'spec.services.%s: %s-%s has %d characters, at most {MAX_CHILD_NAME} fit a child\\'s name; shorten the "
            "graph\\'s or the service\\'s name'.format([k, self.metadata.name, k, "
            "size(self.metadata.name) + size(k) + 1]))[0]"
        ),
        short=f"GRAPH-SERVICE has more than {MAX_CHILD_NAME} characters; shorten the graph's or the service's name",
        field=".spec.services",
    ),
)

_ROLE_RULES = (
    Rule(
        rule=f"{_WORKERS}.all(names, size(names) <= 1)",
        message=(
            f"{_WORKERS}.filter(names, size(names) > 1).map(names, 'spec.services.%s.role and "
            "spec.services.%s.role are both %s; keep one service per worker role'"
            ".format([names[0], names[1], self.services[names[0]].role]))[0]"
        ),
        short="several services have one worker role; keep one service per worker role",
        field=".services",
    ),
    Rule(
        rule=f"!{_count(Role.AGGREGATED)} || !({_count(Role.PREFILL)} || {_count(Role.DECODE)})",
        message="'aggregated workers stand beside prefill or decode; keep either kind'",
        short="aggregated workers stand beside prefill or decode; keep either kind",
        field=".services",
    ),
    Rule(
        rule=f"{_count(Role.AGGREGATED)} || ({_count(Role.PREFILL)} && {_count(Role.DECODE)})",
        message=(
            "'no %s service; declare prefill and decode, or one aggregated service'"
            f".format([{_count(Role.DECODE)} ? 'prefill' : {_count(Role.PREFILL)} ? 'decode' : 'prefill and decode'])"
        ),
        short="workers are missing; declare prefill and decode, or one aggregated service",
        field=".services",
    ),
)

_NAME_RULES = (
    Rule(
        rule=f"!('{PLANNER_SERVICE}' in self.services)",
        message=f"'spec.services.{PLANNER_SERVICE}: the planner\\'s process has this name; rename the service'",
        short="the planner's process has this name; rename the service",
        field=".services",
    ),
    *(
        Rule(
            rule=f"{guard}self.{key}.all(k, size(k) <= 63 && k.matches('{DNS_LABEL_PATTERN}'))",
            message=(
                f"'spec.{key}.%s: not a DNS label; {_LABEL_REMEDY}'"
                f".format([self.{key}.filter(k, size(k) > 63 || !k.matches('{DNS_LABEL_PATTERN}'))[0]])"
            ),
            short=f"a name is not a DNS label; {_LABEL_REMEDY}",
            field=f".{key}",
        )
        for key, guard in (("services", ""), ("nodePools", "!has(self.nodePools) || "))
    ),
    Rule(
        rule=(
            "self.services.all(k, !has(self.services[k].nodePool) || "
            "(has(self.nodePools) && self.services[k].nodePool in self.nodePools))"
        ),
        message=(
            "[self.services.filter(k, has(self.services[k].nodePool) && "
            "!(has(self.nodePools) && self.services[k].nodePool in self.nodePools))[0]].map(k, "
            "'spec.services.%s.nodePool: \"%s\" is not in nodePools %s; declare it or choose a declared one'"
            ".format([k, self.services[k].nodePool, has(self.nodePools) ? self.nodePools.map(p, p) : []]))[0]"
        ),
        short="a nodePool is not in nodePools; declare it or choose a declared one",
        field=".services",
    ),
)


def _engine_gpus(key: str, roles: str) -> Rule:
    judged = f"self.services[k].role in {roles} && self.services[k].gpusPerReplica != self.planner.{key}"
    return Rule(
        rule=f"!has(self.planner.{key}) || !self.services.exists(k, {judged})",
        message=(
            f"[self.services.filter(k, {judged})[0]].map(k, '%d contradicts services.%s.gpusPerReplica %d; "
            f"drop {key} or make them equal'.format([self.planner.{key}, k, self.services[k].gpusPerReplica]))[0]"
        ),
        short=f"{key} contradicts gpusPerReplica; drop it or make them equal",
        field=f".planner.{key}",
    )


_NO_BUDGET = "!self.planner.enabled || !has(self.planner.maxGpuBudget)"

_BUDGET_RULES = (
    _engine_gpus("prefillEngineNumGpu", "['prefill']"),
    _engine_gpus("decodeEngineNumGpu", "['decode', 'aggregated']"),
    Rule(
        rule=f"{_NO_BUDGET} || {_sum(_FLOOR)} <= self.planner.maxGpuBudget",
        message=_sum_message(
            "GPUs are fewer than the floors need",
            _FLOOR,
            "raise it, or lower minReplicas, gpusPerReplica or minGpuBudget",
        ),
        short="fewer GPUs than the floors need; raise it, or lower minReplicas, gpusPerReplica or minGpuBudget",
        field=".planner.maxGpuBudget",
    ),
    Rule(
        rule=f"{_NO_BUDGET} || {_sum(_START)} <= self.planner.maxGpuBudget",
        message=_sum_message(
            "GPUs are fewer than the graph starts with", _START, "raise it or lower replicas"
        ),
        short="fewer GPUs than the graph starts with; raise it or lower replicas",
        field=".planner.maxGpuBudget",
    ),
)

_KNOWN_POLICIES = ", ".join(DYNAMO_POLICIES)
_RUNTIME_RULES = (
    Rule(
        rule="!self.engine.mocker || self.runtime == 'dynamo'",
        message=(
            "'true, but runtime %s has no mocker; set runtime: dynamo or remove it'.format([self.runtime])"
        ),
        short="this runtime has no mocker; set runtime: dynamo or remove it",
        field=".engine.mocker",
    ),
    Rule(
        rule="!has(self.engine.requestLimit) || self.runtime == 'dynamo'",
        message=(
            "'%d, but workers of runtime %s refuse nothing by number; remove it and bound the load with "
            "router.prefillQueue and engine.maxRunningRequests'.format([self.engine.requestLimit, self.runtime])"
        ),
        short="workers of this runtime refuse nothing by number; remove it",
        field=".engine.requestLimit",
    ),
    Rule(
        rule=(
            "self.runtime != 'dynamo' || self.router.policy in ["
            + ", ".join(f"'{policy}'" for policy in DYNAMO_POLICIES)
            + "]"
        ),
        message=(
            "'%s is not known to Dynamo\\'s frontend, which routes here; "
            f"choose {_KNOWN_POLICIES}'.format([self.router.policy])"
        ),
        short=f"not known to Dynamo's frontend, which routes here; choose {_KNOWN_POLICIES}",
        field=".router.policy",
    ),
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
    "GraphDeployment": _GRAPH,
    "GraphSpec": (*_ROLE_RULES, *_NAME_RULES, *_BUDGET_RULES, *_RUNTIME_RULES),
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
