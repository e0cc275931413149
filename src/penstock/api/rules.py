"""The rules within one section: services, node pools, variables, planner, tiers, profiles, ProfileRequests. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, Final

from penstock.api.base import give_rules
from penstock.api.engine import PROFILE_SUFFIX, PROFILES, EngineConfig
from penstock.api.enums import MetricsSource, PlannerMode, Tier
from penstock.api.lease_rules import SERVICE_LEASE_RULES
from penstock.api.planner import PlannerConfig, PlannerMetricsConfig
from penstock.api.profile_request import ProfileRequest, ProfileRequestSpec
from penstock.api.router import RouterConfig, TiersConfig
from penstock.api.rule import Breach, Rule
from penstock.api.service import EnvFrom, EnvVar, NodePool, ServiceSpec
from penstock.kube.objects.names import SIDE_CHANNEL_PORT, WORKER_PORT
from penstock.kube.objects.pod_template import unknown_fields

_ROUNDING = 1e-9
"""Above the error of adding three fractions."""


def immutable(key: str, what: str) -> Rule[Any]:
    """Return the rule that a key keeps its value; only an API server sees both versions."""
    return Rule(
        key=key,
        must=f"the {what} is immutable",
        cel="self == oldSelf",
        text="%s was %s and is immutable",
        values=("self", "oldSelf"),
        remedy="keep it, or make a new graph",
    )


def _unknown_profile(section: ServiceSpec | EngineConfig) -> Iterator[Breach]:
    name = section.profile
    if name is None or name in PROFILES or name.endswith(PROFILE_SUFFIX):
        return
    close = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.75)
    yield Breach(remedy=f"did you mean {close[0]}?" if close else None)


_PROFILE_RULE: Rule[Any] = Rule(
    key="profile",
    must=f"a profile is one that comes with Penstock, or the name of a file ending in {PROFILE_SUFFIX}",
    cel=f"self.endsWith('{PROFILE_SUFFIX}') || self in [{', '.join(map(repr, PROFILES))}]",
    find=_unknown_profile,
    text="%s is no latency profile",
    values=("self",),
    remedy=f"choose one of {', '.join(PROFILES)}",
)

give_rules(EngineConfig, _PROFILE_RULE)


def _unknown_pod_keys(section: ServiceSpec | ProfileRequestSpec) -> Iterator[Breach]:
    for each in unknown_fields(section.pod_template):
        remedy = f"did you mean {each.meant}?" if each.meant else None
        yield Breach(values=(each.kind,), path=("podTemplate", *each.path), remedy=remedy)


_POD_TEMPLATE_RULE: Rule[Any] = Rule(
    path="podTemplate",
    must="podTemplate has only keys of Kubernetes' PodTemplateSpec",
    cel=None,
    find=_unknown_pod_keys,
    text="unknown key of Kubernetes' %s",
    remedy="remove it",
)

give_rules(
    ServiceSpec,
    Rule(
        path="scaling.minReplicas",
        must="minReplicas is at most maxReplicas",
        cel="!has(self.scaling) || self.scaling.minReplicas <= self.scaling.maxReplicas",
        holds=lambda s: s.scaling is None or s.scaling.min_replicas <= s.scaling.max_replicas,
        text="%d exceeds maxReplicas %d",
        values=("self.scaling.minReplicas", "self.scaling.maxReplicas"),
        remedy="lower it or raise maxReplicas",
    ),
    Rule(
        path="replicas",
        must="replicas lie within scaling's minReplicas to maxReplicas",
        cel=(
            "!has(self.scaling) || self.scaling.minReplicas > self.scaling.maxReplicas || "
            "(self.scaling.minReplicas <= self.replicas && self.replicas <= self.scaling.maxReplicas)"
        ),
        holds=lambda s: (
            s.scaling is None
            or s.scaling.min_replicas > s.scaling.max_replicas
            or s.scaling.min_replicas <= s.replicas <= s.scaling.max_replicas
        ),
        text="%d lies outside scaling's %d to %d",
        values=("self.replicas", "self.scaling.minReplicas", "self.scaling.maxReplicas"),
        remedy="move it or widen the bounds",
    ),
    Rule(
        path="gpusPerReplica",
        must="gpusPerReplica is a multiple of nodesPerReplica",
        cel="self.nodesPerReplica < 1 || self.gpusPerReplica % self.nodesPerReplica == 0",
        holds=lambda s: s.gpus_per_replica % s.nodes_per_replica == 0,
        text="%d GPUs do not divide over %d nodes",
        values=("self.gpusPerReplica", "self.nodesPerReplica"),
        remedy="make gpusPerReplica a multiple of nodesPerReplica",
    ),
    _POD_TEMPLATE_RULE,
    *SERVICE_LEASE_RULES,
    _PROFILE_RULE,
    immutable("role", "role of a service that stays"),
)

give_rules(
    NodePool,
    Rule(
        path="cacheClaim",
        must="cacheClaim needs cacheMount",
        cel="!has(self.cacheClaim) || has(self.cacheMount)",
        holds=lambda pool: pool.cache_claim is None or pool.cache_mount is not None,
        text="%s is given, but no cacheMount",
        values=("self.cacheClaim",),
        remedy="say where to mount it",
    ),
)

give_rules(
    EnvVar,
    Rule(
        path="valueFrom",
        must="a variable has value or valueFrom, not both",
        cel="!has(self.value) || !has(self.valueFrom)",
        holds=lambda variable: variable.value is None or variable.value_from is None,
        text="value is set too",
        remedy="keep one of value and valueFrom",
    ),
)

give_rules(
    EnvFrom,
    Rule(
        must="envFrom has one of secretRef and configMapRef",
        cel="has(self.secretRef) != has(self.configMapRef)",
        holds=lambda source: (source.secret_ref is None) != (source.config_map_ref is None),
        text="both or neither of secretRef and configMapRef",
        remedy="give exactly one of secretRef and configMapRef",
    ),
)


def _below(pool: str, holds: Callable[[PlannerConfig], bool]) -> Rule[PlannerConfig]:
    down, up = f"{pool}ScaleDownThreshold", f"{pool}ScaleUpThreshold"
    return Rule(
        path=down,
        must=f"{down} is below {up}",
        cel=f"self.{down} < self.{up}",
        holds=holds,
        text=f"%s is not below {up} %s",
        values=(f"self.{down}", f"self.{up}"),
        remedy="lower it, or the pool would flap",
    )


def _within_budget(key: str, least: Callable[[PlannerConfig], int]) -> Rule[PlannerConfig]:
    return Rule(
        path=key,
        must=f"{key} is at most maxGpuBudget",
        cel=f"!has(self.maxGpuBudget) || self.{key} <= self.maxGpuBudget",
        holds=lambda p: p.max_gpu_budget is None or least(p) <= p.max_gpu_budget,
        text="%d exceeds maxGpuBudget %d",
        values=(f"self.{key}", "self.maxGpuBudget"),
        remedy="lower it or raise maxGpuBudget",
    )


give_rules(
    PlannerConfig,
    _below("decodeKv", lambda p: p.decode_kv_scale_down_threshold < p.decode_kv_scale_up_threshold),
    _below(
        "prefillQueue", lambda p: p.prefill_queue_scale_down_threshold < p.prefill_queue_scale_up_threshold
    ),
    Rule(
        path="metricPullingIntervalSeconds",
        must="metricPullingIntervalSeconds is at most adjustmentIntervalSeconds",
        cel="self.metricPullingIntervalSeconds <= self.adjustmentIntervalSeconds",
        holds=lambda p: p.metric_pulling_interval_seconds <= p.adjustment_interval_seconds,
        text="%s s exceeds adjustmentIntervalSeconds %s s",
        values=("self.metricPullingIntervalSeconds", "self.adjustmentIntervalSeconds"),
        remedy="pull at least once per adjustment",
    ),
    _within_budget("minGpuBudget", lambda p: p.min_gpu_budget),
    _within_budget("minTotalGpus", lambda p: p.min_total_gpus),
    Rule(
        path="scaleToZeroAfterSeconds",
        must="scaleToZeroAfterSeconds needs mode adaptive or sla",
        cel="!has(self.scaleToZeroAfterSeconds) || self.mode != 'load'",
        holds=lambda p: p.scale_to_zero_after_seconds is None or p.mode != PlannerMode.LOAD,
        text="%s s, but mode %s has no signal to come back on without a worker",
        values=("self.scaleToZeroAfterSeconds", "self.mode"),
        remedy="choose mode adaptive or sla, or remove it",
    ),
    Rule(
        path="minGpuBudget",
        must="scaleToZeroAfterSeconds needs minGpuBudget 0",
        cel="!has(self.scaleToZeroAfterSeconds) || self.minGpuBudget == 0",
        holds=lambda p: p.scale_to_zero_after_seconds is None or p.min_gpu_budget == 0,
        text="%d GPUs of each role stay, so scaleToZeroAfterSeconds %s s has no effect",
        values=("self.minGpuBudget", "self.scaleToZeroAfterSeconds"),
        remedy="set it to 0",
    ),
    Rule(
        path="minTotalGpus",
        must="scaleToZeroAfterSeconds needs minTotalGpus 0",
        cel="!has(self.scaleToZeroAfterSeconds) || self.minTotalGpus == 0",
        holds=lambda p: p.scale_to_zero_after_seconds is None or p.min_total_gpus == 0,
        text="%d GPUs stay, so scaleToZeroAfterSeconds %s s has no effect",
        values=("self.minTotalGpus", "self.scaleToZeroAfterSeconds"),
        remedy="set it to 0",
    ),
)

give_rules(
    PlannerMetricsConfig,
    Rule(
        path="prometheusUrl",
        must="source prometheus needs prometheusUrl",
        cel="self.source != 'prometheus' || has(self.prometheusUrl)",
        holds=lambda m: m.source is not MetricsSource.PROMETHEUS or m.prometheus_url is not None,
        text="null, yet source is prometheus",
        remedy="give its URL or choose router or scrape",
    ),
)


def _incomplete_shares(tiers: TiersConfig) -> Iterator[Breach]:
    total = tiers.shares.premium + tiers.shares.standard + tiers.shares.background
    if abs(total - 1) > _ROUNDING:
        yield Breach(values=(total,))


_SHARES = "self.shares.premium + self.shares.standard + self.shares.background"

give_rules(
    TiersConfig,
    Rule(
        path="shares",
        must="the tiers' shares add up to 1",
        cel=f"{_SHARES} <= {1 + _ROUNDING} && {_SHARES} >= {1 - _ROUNDING}",
        find=_incomplete_shares,
        text="sum %s is not 1",
        values=(_SHARES,),
        remedy="change one of the shares",
    ),
    Rule(
        path="default",
        must="the default tier is not system",
        cel=f"self.default != '{Tier.SYSTEM}'",
        holds=lambda tiers: tiers.default is not Tier.SYSTEM,
        text="%s goes before all others and is for keys alone",
        values=("self.default",),
        remedy="choose premium, standard or background",
    ),
)

_TAKEN = (SIDE_CHANNEL_PORT, WORKER_PORT)
_KV_EVENTS_CLASHES = sorted({port - below for port in _TAKEN for below in (0, 1)})

give_rules(
    RouterConfig,
    Rule(
        key="kvEventsPort",
        must=f"kvEventsPort and the port after it are none of {SIDE_CHANNEL_PORT} and {WORKER_PORT}",
        cel=f"!(self in {_KV_EVENTS_CLASHES})",
        holds=lambda router: router.kv_events_port not in _KV_EVENTS_CLASHES,
        text=f"%d, or the port after it for replays, is one of {SIDE_CHANNEL_PORT} and {WORKER_PORT}, which workers have",
        values=("self",),
        remedy="choose another, such as 5557",
    ),
    Rule(
        path="gateway.port",
        must=f"gateway.port is not {WORKER_PORT}",
        cel=f"self.gateway.port != {WORKER_PORT}",
        holds=lambda router: router.gateway.port != WORKER_PORT,
        text="%d is the router's HTTP port in its pods",
        values=("self.gateway.port",),
        remedy="choose another, such as 9002",
    ),
)


MAX_REQUEST_NAME: Final = 52
"""The Job appends ``-profile``, and its name is a label's value of 63 characters on its pods; as for graphs."""


def _long_name(request: ProfileRequest) -> Iterator[Breach]:
    name = request.metadata.name
    if len(name) > MAX_REQUEST_NAME:
        yield Breach((name, len(name)))


def _too_large(spec: ProfileRequestSpec) -> Iterator[Breach]:
    above = [size for size in spec.tensor_parallel if size > spec.max_gpus]
    if above:
        yield Breach((above[0], spec.max_gpus))


give_rules(
    ProfileRequest,
    Rule(
        path="metadata.name",
        must=f"a ProfileRequest's name has at most {MAX_REQUEST_NAME} characters",
        cel=f"size(self.metadata.name) <= {MAX_REQUEST_NAME}",
        find=_long_name,
        text="%s has %d characters, which is too long for its Job's",
        values=("self.metadata.name", "size(self.metadata.name)"),
        remedy=f"use at most {MAX_REQUEST_NAME}",
    ),
    Rule(
        path="spec",
        must="the spec of a ProfileRequest is immutable",
        cel="self.spec == oldSelf.spec",
        text="a request is measured once",
        remedy="delete it and apply it again, or give it another name",
    ),
)

give_rules(
    ProfileRequestSpec,
    Rule(
        path="graph",
        must="a ProfileRequest has graph or template, not both",
        cel="has(self.graph) != has(self.template)",
        holds=lambda spec: (spec.graph is None) == bool(spec.template),
        text="both or neither of graph and template",
        remedy="name a GraphDeployment of the namespace, or write the specification of one",
    ),
    Rule(
        path="tensorParallel",
        must="tensorParallel is at most maxGpus",
        cel="!has(self.tensorParallel) || self.tensorParallel.all(n, n <= self.maxGpus)",
        find=_too_large,
        text="%d exceeds maxGpus %d",
        values=("self.tensorParallel.filter(n, n > self.maxGpus)[0]", "self.maxGpus"),
        remedy="leave the size out or raise maxGpus",
    ),
    _POD_TEMPLATE_RULE,
)
