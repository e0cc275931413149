"""Computes from latency profiles what a profiler would measure on simulated engines; used by planner and capacity estimates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.api import GraphSpec, Role, ServiceSpec
from penstock.api.engine import PROFILE_SUFFIX
from penstock.core.errors import ConfigError
from penstock.core.files import read_bytes
from penstock.engine.core.latency import LatencyModel
from penstock.engine.profiles.schema import load, names
from penstock.performance.profile import (
    PROFILE_FILE,
    DecodeTable,
    PerformanceProfile,
    PrefillTable,
    read_profile,
)
from penstock.performance.quality import check_fits

BLOCK_TOKENS, RUNNING_REQUESTS, BATCH_TOKENS = 16, 256, 8192
"""Defaults of the simulated runtime if a manifest sets none: tokens per KV block, requests in a batch, and tokens per step.
See `penstock engine serve`."""

_PROMPTS = tuple(100.0 * 1.5**power for power in range(19))
"""Prompt lengths: 100 to 148,000 tokens."""
_CONTEXTS = tuple(250.0 * 2**power for power in range(10))
"""Context lengths: 250 to 128,000 tokens."""
_KV_USAGE = tuple(percent / 100 for percent in range(2, 101, 2))


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Properties of one simulated engine that determine its speed.

    Attributes:
        profile: Name or path of its latency profile.
        kv_tokens: Capacity of its KV cache in tokens; None uses the capacity in the latency profile.
        max_running: Maximum number of requests in a batch.
        gpus: Number of GPUs of one replica.
    """

    profile: str
    kv_tokens: int | None = None
    max_running: int = RUNNING_REQUESTS
    gpus: int = 1


def performance_of(entry: EngineSpeed, holder: EngineSpeed) -> PerformanceProfile:
    """Return the performance profile that a profiler would measure on two simulated engines, which can be the same one.

    Args:
        entry: Engine of the prefill (or aggregated) workers, which computes prompts.
        holder: Engine of the decode (or aggregated) workers, which holds the KV of decoding requests.
    """
    prefill = load(entry.profile).latency().prefill
    table = PrefillTable(_PROMPTS, tuple(prefill.ttft_s(round(tokens)) for tokens in _PROMPTS))
    return PerformanceProfile(table, _decode_table(holder), entry.gpus, holder.gpus)


def graph_performance(spec: GraphSpec) -> PerformanceProfile:
    """Return the performance profile of a graph of runtime ``simulated``, with its workers as `penstock engine serve` starts them.

    Raises:
        ConfigError: The graph has no worker service.
    """
    entry = spec.service(Role.PREFILL) or spec.service(Role.AGGREGATED)
    holder = spec.service(Role.DECODE) or spec.service(Role.AGGREGATED)
    if entry is None or holder is None:
        raise ConfigError(
            "spec.services: no worker service to read a profile off; declare prefill and decode"
        )
    return performance_of(_engine(spec, entry[1]), _engine(spec, holder[1]))


def planning_profile(spec: GraphSpec | None, named: str | None) -> PerformanceProfile:
    """Return the performance profile that a planner on this machine uses.

    Args:
        spec: Specification of the graph; None if no graph is known.
        named: File or folder that `penstock profile` wrote, or name or ``.yaml`` path of a latency profile; None
            means the simulated engine's own profile, which requires runtime ``simulated``.

    Raises:
        ConfigError: ``named`` is None and the runtime is not ``simulated``, the named profile cannot be read, or it was
            measured with another model or engine size than the graph has.
    """
    if named is None:
        if spec is not None and spec.traits.is_simulated:
            return graph_performance(spec)
        raise ConfigError(
            "planner.sla.profile: null, but mode sla plans by a performance profile; run `penstock profile --config FILE"
            " --output-dir DIR` and name what it writes, or choose mode adaptive"
        )
    if named in names() or named.endswith(PROFILE_SUFFIX):
        engine = EngineSpeed(named)
        return performance_of(engine, engine)
    path = Path(named).expanduser()
    file = path / PROFILE_FILE if path.is_dir() else path
    try:
        text = read_bytes(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(
            f"planner.sla.profile: {named} cannot be read: {why}; name a file or folder that `penstock profile` wrote, or"
            f" one of {', '.join(names())}"
        ) from exc
    profile = read_profile(text, origin=str(file))
    sizes = spec.engine_gpus if spec is not None else None
    if spec is None or sizes is None:
        return profile
    try:
        check_fits(profile, model=spec.model.name, prefill_gpus=sizes[0], decode_gpus=sizes[1])
    except ConfigError as exc:
        raise ConfigError(f"planner.sla.profile: {file}: {exc}") from exc
    return profile


def _engine(spec: GraphSpec, service: ServiceSpec) -> EngineSpeed:
    engine = spec.engine
    blocks = engine.kv_blocks
    return EngineSpeed(
        profile=service.profile or engine.profile,
        kv_tokens=None if blocks is None else blocks * (engine.block_tokens or BLOCK_TOKENS),
        max_running=engine.max_running_requests or RUNNING_REQUESTS,
        gpus=service.gpus,
    )


def _decode_table(engine: EngineSpeed) -> DecodeTable:
    profile = load(engine.profile)
    latency = profile.latency()
    kv_tokens = float(engine.kv_tokens or profile.kv_capacity_tokens)
    rows = [
        [
            _decode_point(latency, context, usage * kv_tokens / context, engine.max_running)
            for usage in _KV_USAGE
        ]
        for context in _CONTEXTS
    ]
    return DecodeTable(
        _CONTEXTS,
        _KV_USAGE,
        tuple(tuple(itl_s for itl_s, _ in row) for row in rows),
        tuple(tuple(rate for _, rate in row) for row in rows),
        kv_tokens,
    )


def _decode_point(
    latency: LatencyModel, context: float, requests: float, max_running: int
) -> tuple[float, float]:
    batch = min(float(max_running), max(1.0, requests))
    itl_s = latency.decode.step_s(batch, batch * context)
    return itl_s, batch / itl_s
