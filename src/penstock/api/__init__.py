"""The API: models, enums, profiles and cross-field rules of all kinds. Pure; import the models from here."""

import penstock.api.graph_rules  # noqa: F401  (gives the models their rules)
from penstock.api.base import RULE_ERROR, SpecModel
from penstock.api.engine import DEFAULT_PROFILE, LeaseConfig, PreemptionConfig
from penstock.api.enums import (
    WORKER_ROLES,
    AdmissionMode,
    Environment,
    GatewayFailureMode,
    GraphPhase,
    KvBufferDevice,
    ManagedBy,
    MetricsSource,
    PlannerMode,
    PoolPriority,
    Predictor,
    ProfilePhase,
    QueueOrder,
    ReclaimBy,
    Role,
    Tier,
)
from penstock.api.gpu_pool import ClusterGpuPool, GpuPool, PoolEntry, PoolObject
from penstock.api.graph import API_VERSION, GraphDeployment, GraphSpec, ScalingAdapter
from penstock.api.planner import PlannerConfig
from penstock.api.pool_rules import as_pool_member, pool_entries
from penstock.api.profile_request import ProfileRequest
from penstock.api.router import RouterConfig
from penstock.api.router_queues import AdmissionConfig, PrefillQueueConfig
from penstock.api.router_tiers import SheddingConfig, TiersConfig
from penstock.api.router_workers import BreakerConfig, HealthConfig
from penstock.api.rule import Violation, dotted
from penstock.api.service import EnvFrom, EnvVar, NodePool, ScalingConfig, ServiceSpec, Toleration
from penstock.api.slo import SloConfig
from penstock.api.status import AdapterStatus, Condition, GraphStatus

__all__ = [
    "API_VERSION",
    "DEFAULT_PROFILE",
    "RULE_ERROR",
    "WORKER_ROLES",
    "AdapterStatus",
    "AdmissionConfig",
    "AdmissionMode",
    "BreakerConfig",
    "ClusterGpuPool",
    "Condition",
    "EnvFrom",
    "EnvVar",
    "Environment",
    "GatewayFailureMode",
    "GpuPool",
    "GraphDeployment",
    "GraphPhase",
    "GraphSpec",
    "GraphStatus",
    "HealthConfig",
    "KvBufferDevice",
    "LeaseConfig",
    "ManagedBy",
    "MetricsSource",
    "NodePool",
    "PlannerConfig",
    "PlannerMode",
    "PoolEntry",
    "PoolObject",
    "PoolPriority",
    "Predictor",
    "PreemptionConfig",
    "PrefillQueueConfig",
    "ProfilePhase",
    "ProfileRequest",
    "QueueOrder",
    "ReclaimBy",
    "Role",
    "RouterConfig",
    "ScalingAdapter",
    "ScalingConfig",
    "ServiceSpec",
    "SheddingConfig",
    "SloConfig",
    "SpecModel",
    "Tier",
    "TiersConfig",
    "Toleration",
    "Violation",
    "as_pool_member",
    "dotted",
    "pool_entries",
]
