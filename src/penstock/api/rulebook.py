"""Gives each model its cross-field rules; `penstock.api` imports it, so that no model is used without them."""

from __future__ import annotations

from penstock.api.engine import EngineConfig, LeaseConfig
from penstock.api.graph import GraphDeployment, GraphSpec, ModelSpec
from penstock.api.graph_rules import GRAPH_RULES, MODEL_RULES, SPEC_RULES
from penstock.api.lease_rules import LEASE_RULES
from penstock.api.planner import PlannerConfig, PlannerMetricsConfig
from penstock.api.profile_request import ProfileRequest, ProfileRequestSpec
from penstock.api.router import RouterConfig, TiersConfig
from penstock.api.rules import (
    ENV_FROM_RULES,
    ENV_VAR_RULES,
    METRICS_RULES,
    NODE_POOL_RULES,
    PLANNER_RULES,
    PROFILE_RULE,
    REQUEST_RULES,
    REQUEST_SPEC_RULES,
    ROUTER_RULES,
    SERVICE_RULES,
    TIERS_RULES,
)
from penstock.api.service import EnvFrom, EnvVar, NodePool, ServiceSpec

GraphDeployment.rules = GRAPH_RULES
GraphSpec.rules = SPEC_RULES
ModelSpec.rules = MODEL_RULES
ServiceSpec.rules = SERVICE_RULES
EnvVar.rules = ENV_VAR_RULES
EnvFrom.rules = ENV_FROM_RULES
NodePool.rules = NODE_POOL_RULES
RouterConfig.rules = ROUTER_RULES
TiersConfig.rules = TIERS_RULES
LeaseConfig.rules = LEASE_RULES
EngineConfig.rules = (PROFILE_RULE,)
PlannerConfig.rules = PLANNER_RULES
PlannerMetricsConfig.rules = METRICS_RULES
ProfileRequest.rules = REQUEST_RULES
ProfileRequestSpec.rules = REQUEST_SPEC_RULES
