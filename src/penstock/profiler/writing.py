"""Writes what a profile found: the profile, the arrays in Dynamo's format, and the graph to apply, sizes and bounds in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from rich.table import Table

from penstock.api import GraphDeployment, PlannerMode, Role
from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.performance.dynamo import decode_arrays, prefill_arrays
from penstock.performance.profile import PROFILE_FILE
from penstock.performance.recommend import Recommendation, Targets, decode_choices, prefill_choice
from penstock.performance.sweep import Sweep
from penstock.profiler.plan import family, measured_services
from penstock.profiler.reading import ARRAYS_FILE

SCHEMA: Final = 1
GRAPH_FILE: Final = "graph.yaml"


def plain_result(sweep: Sweep, recommendation: Recommendation, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the profile file: tables of the recommended sizes, every point, and the recommendation."""
    profile = sweep.profile(prefill_gpus=recommendation.prefill.gpus, decode_gpus=recommendation.decode.gpus)
    return {
        "schema": SCHEMA,
        **asdict(profile),
        "recommendation": asdict(recommendation),
        "warnings": list(warnings),
        "sweep": asdict(sweep),
    }


def write_result(
    directory: Path,
    sweep: Sweep,
    recommendation: Recommendation,
    *,
    warnings: Sequence[str],
    graph: Mapping[str, Any] | None,
) -> list[Path]:
    """Write profile, arrays and graph, and return their paths.

    Args:
        directory: Made if it is not there.
        sweep: Every point.
        recommendation: Names the sizes whose arrays are written.
        warnings: Kept in the profile.
        graph: Manifest to write; None: none.

    Raises:
        PenstockError: the disk is full or gone.
    """
    prefill, decode = recommendation.prefill.gpus, recommendation.decode.gpus
    arrays = {
        f"prefill_tp{prefill}_interpolation": prefill_arrays(sweep.engine(prefill)),
        f"decode_tp{decode}_interpolation": decode_arrays(sweep.engine(decode)),
    }
    written = [directory / PROFILE_FILE]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain_result(sweep, recommendation, warnings), indent=1)
        _replace(written[0], text + "\n")
        for name, columns in arrays.items():
            folder = directory / name
            folder.mkdir(exist_ok=True)
            values: dict[str, Any] = {key: np.array(value) for key, value in columns.items()}
            np.savez(folder / ARRAYS_FILE, **values)
            written.append(folder / ARRAYS_FILE)
        if graph is not None:
            written.append(directory / GRAPH_FILE)
            _replace(written[-1], yaml.safe_dump(dict(graph), sort_keys=False))
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return written


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


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


def prefill_table(sweep: Sweep, targets: Targets) -> Table:
    """Return TTFT and throughput per GPU at the target's prompt length, by engine size."""
    table = Table(title=f"Prefill, {targets.isl:,} prompt tokens", title_justify="left", box=None)
    for heading in ("TP", "TTFT ms", "tokens/s/GPU", "in target"):
        table.add_column(heading, justify="right")
    for engine in sweep.engines:
        if engine.prefill:
            choice = prefill_choice(engine, targets)
            table.add_row(
                str(choice.gpus),
                f"{choice.ttft_s * 1000:.1f}",
                f"{choice.tokens_per_s_per_gpu:,.0f}",
                "yes" if choice.meets else "no",
            )
    return table


def decode_table(sweep: Sweep, targets: Targets) -> Table:
    """Return ITL and throughput per GPU at the target's context, by engine size and requests in flight."""
    table = Table(title=f"Decode, {targets.context:,.0f} tokens of context", title_justify="left", box=None)
    for heading in ("TP", "in flight", "KV", "ITL ms", "tokens/s/GPU", "in target"):
        table.add_column(heading, justify="right")
    for engine in sweep.engines:
        for choice in decode_choices(engine, targets) if engine.decode else ():
            table.add_row(
                str(choice.gpus),
                f"{choice.concurrency:,.0f}",
                f"{choice.kv_usage:.0%}",
                f"{choice.itl_s * 1000:.1f}",
                f"{choice.tokens_per_s_per_gpu:,.0f}",
                "yes" if choice.meets else "no",
            )
    return table
