"""Writes what was recommended into the graph that was profiled: sizes, bounds and targets, ready to apply. Pure."""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, PlannerMode, Role
from penstock.core.errors import ConfigError
from penstock.performance.recommend import Recommendation
from penstock.profiler.candidates import family, measured_services


def graph_back(graph: GraphDeployment, recommendation: Recommendation, profile: str) -> dict[str, Any]:
    """Return the manifest of the recommended graph.

    Args:
        graph: As profiled.
        recommendation: Without misses.
        profile: What ``planner.sla.profile`` names: the path of the profile's file.

    Raises:
        ConfigError: one replica per role exceeds the graph's GPU budget.
    """
    sizes = {Role.PREFILL: recommendation.prefill.gpus, Role.DECODE: recommendation.decode.gpus}
    services = measured_services(graph)
    _check_budget(graph, {services[phase][0]: size for phase, size in sizes.items()})
    manifest = graph.to_manifest()
    manifest.pop("status", None)
    spec = manifest["spec"]
    for phase, size in sizes.items():
        name, service = services[phase]
        written = spec["services"][name]
        written["gpusPerReplica"] = size
        if graph.spec.traits.is_simulated:
            written["profile"] = family(service.profile or graph.spec.engine.profile)[size]
    spec["planner"] = {**spec.get("planner", {}), **_planner(graph, recommendation, profile)}
    return manifest


def _planner(graph: GraphDeployment, recommendation: Recommendation, profile: str) -> dict[str, Any]:
    targets, sla = recommendation.targets, graph.spec.planner.sla.to_manifest()
    written: dict[str, Any] = {
        "mode": PlannerMode.SLA.value,
        "decodeKvScaleUpThreshold": recommendation.kv.upper,
        "decodeKvScaleDownThreshold": recommendation.kv.lower,
        "sla": {**sla, "ttftSeconds": targets.ttft_s, "itlSeconds": targets.itl_s, "profile": profile},
    }
    if graph.spec.is_disaggregated:
        written["prefillQueueScaleUpThreshold"] = recommendation.queue.upper
        written["prefillQueueScaleDownThreshold"] = recommendation.queue.lower
    sizes = (
        ("prefillEngineNumGpu", recommendation.prefill.gpus, graph.spec.planner.prefill_engine_num_gpu),
        ("decodeEngineNumGpu", recommendation.decode.gpus, graph.spec.planner.decode_engine_num_gpu),
    )
    return {**written, **{key: size for key, size, stated in sizes if stated is not None}}


def _check_budget(graph: GraphDeployment, sizes: dict[str, int]) -> None:
    budget, needed = graph.spec.planner.max_gpu_budget, sum(sizes.values())
    if budget is not None and needed > budget:
        shown = " and ".join(f"{size} for {name}" for name, size in sizes.items())
        raise ConfigError(
            f"spec.planner.maxGpuBudget: {budget}, but one replica each takes {needed} GPUs ({shown}); raise it, or"
            " profile smaller engines with --tp"
        )
