"""How TensorBoard arranges the dashboard's scalars: categories of charts, each a list of exact tags."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.api import Role
from penstock.planner.decide.config import Mode

Charts = dict[str, list[Any]]


def layout_of(roles: Collection[Role], mode: str) -> dict[str, Charts]:
    """Return the custom-scalars layout: categories of charts, each scalar in exactly one of them.

    What the mode decides by comes first; thresholds are there in the one mode that compares with them.
    """
    kinds = [role.value for role in (Role.PREFILL, Role.DECODE, Role.AGGREGATED) if role in roles]
    thresholds = ("scale_up", "scale_down") if mode == Mode.LOAD else ()
    load = {"KV usage": _lines("kv/mean", *(f"kv/{each}" for each in thresholds))}
    if Role.PREFILL in roles:
        queue = (f"prefill_queue/{each}" for each in ("compared", *thresholds))
        load["Prefill queue"] = _lines(*queue)
    return {
        **({"Load and thresholds": load} if thresholds else {}),
        **({"Targets and profile": _targets()} if mode == Mode.SLA else {}),
        "Demand and supply": _demand(kinds),
        **({} if thresholds else {"Load": load}),
        "Replicas": {f"{kind} replicas": _replicas(kind) for kind in kinds},
        "GPUs": {
            "In use and budget": _lines("gpus/in_use", "gpus/budget"),
            "GPU-hours": _lines("gpu_hours/cumulative"),
        },
        "Latency": {name.upper(): _latency(name) for name in ("ttft", "itl")},
        "Planner": {"Lag": _lines("lag/p99_seconds")},
    }


def _targets() -> Charts:
    return {
        "Share within the targets": _lines("attainment/ttft", "attainment/itl", "attainment/goal"),
        "Observed over profile": _lines("correction/prefill", "correction/ttft", "correction/itl"),
    }


def _demand(kinds: Sequence[str]) -> Charts:
    return {
        "Requests per second": _lines(
            "demand/arrivals_per_second", "demand/completed_per_second", "demand/rejected_per_second"
        ),
        "Prefill tokens per second": _lines(
            "prefill/uncached_tokens_per_second",
            "prefill/computed_tokens_per_second",
            "prefill/forecast_tokens_per_second",
            "prefill/supply_tokens_per_second",
        ),
        "Oldest wait and SLO": _lines("wait/oldest_seconds", "wait/slo_seconds"),
        "Waiting requests": _lines("wait/requests"),
        "Start-up": _lines(*(f"startup/{kind}_seconds" for kind in kinds)),
    }


def _replicas(kind: str) -> list[Any]:
    states = ("ready", "desired", "needed", "starting", "draining")
    return _lines(*(f"replicas/{kind}_{state}" for state in states))


def _latency(name: str) -> list[Any]:
    return _lines(*(f"{name}/{kind}_seconds" for kind in ("mean", "p50", "p99", "target")))


def _lines(*tags: str) -> list[Any]:
    # TensorBoard matches tags as regular expressions; without anchors kv/mean would also match a longer tag.
    return ["Multiline", [f"^{tag}$" for tag in tags]]
