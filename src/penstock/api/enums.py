"""The API's closed sets."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a service's replicas do."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"

    @property
    def is_worker(self) -> bool:
        """Whether replicas of this role run the model and hold GPUs."""
        return self is not Role.ROUTER


WORKER_ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)


class QueueOrder(StrEnum):
    """Who is next in a worker's queue in the router."""

    ARRIVAL = "arrival"
    HIT_FIRST = "hit-first"
    IN_TIME_FIRST = "in-time-first"


class GatewayFailureMode(StrEnum):
    """What a Gateway does with requests while the endpoint picker does not answer."""

    CLOSE = "FailClose"
    OPEN = "FailOpen"


class ContinueBy(StrEnum):
    """What a stream that another worker continues is given to it as."""

    TEXT = "text"
    TOKENS = "tokens"


class AdmissionMode(StrEnum):
    """Whether the router refuses requests while all workers are busy."""

    NONE = "none"
    TOKEN_CAPACITY = "token-capacity"  # noqa: S105 - a mode's name, not a secret


class Tier(StrEnum):
    """Priority class of a request, highest first; system is for a cluster's own requests."""

    SYSTEM = "system"
    PREMIUM = "premium"
    STANDARD = "standard"
    BACKGROUND = "background"


class PlannerMode(StrEnum):
    """What the planner scales on."""

    ADAPTIVE = "adaptive"
    LOAD = "load"
    SLA = "sla"


class ManagedBy(StrEnum):
    """Who sets a service's replicas."""

    PLANNER = "planner"
    EXTERNAL = "external"


class Predictor(StrEnum):
    """How the planner's SLA mode forecasts demand."""

    CONSTANT = "constant"
    TREND = "trend"


class MetricsSource(StrEnum):
    """Where the planner reads metrics first; the other sources back it up."""

    ROUTER = "router"
    PROMETHEUS = "prometheus"
    SCRAPE = "scrape"


class Environment(StrEnum):
    """Backend that the planner scales."""

    LOCAL = "local"
    KUBERNETES = "kubernetes"


class KvBufferDevice(StrEnum):
    """Memory through which vLLM transfers KV blocks."""

    CUDA = "cuda"
    CPU = "cpu"


class KvConnector(StrEnum):
    """By which vLLM's prefill workers hand KV to decode workers."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"


class KvStore(StrEnum):
    """Who keeps the KV that a worker's GPUs have no room for."""

    HOST = "host"
    LMCACHE = "lmcache"


class GraphPhase(StrEnum):
    """One word for a graph's state."""

    PENDING = "Pending"
    PROGRESSING = "Progressing"
    READY = "Ready"
    DEGRADED = "Degraded"
    FAILED = "Failed"


class ProfilePhase(StrEnum):
    """One word for a ProfileRequest's state."""

    PENDING = "Pending"
    PROFILING = "Profiling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing follows."""
        return self in {ProfilePhase.SUCCEEDED, ProfilePhase.FAILED}


class ReclaimBy(StrEnum):
    """What makes a graph of a GPU pool give back what it borrows before another one."""

    PRIORITY = "priority"
    """The lower priority; of one priority who borrows most."""
    IDLE = "idle"
    """Fewer workers than were granted, so that GPUs come back without a drain."""
    NEWEST = "newest"
    """The later grant."""


class PoolPriority(StrEnum):
    """Which graphs of a GPU pool borrow first, highest first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """Return a number that is larger for a higher priority."""
        return -list(PoolPriority).index(self)
