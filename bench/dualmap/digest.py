"""Turns runs into the figures that are alongside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any]]

PAPERS = ("cache-affinity", "least-pending", "min-ttft", "preble")
"""The paper's four baselines by our names; least-pending is its Least Loaded."""
COMPARED = {
    "server.conversation": "comparison.conversation-7b",
    "server.toolagent": "comparison.toolagent-7b",
    "engines.conversation": "engines.a100-conversation-7b.arrival",
    "engines.toolagent": "engines.a100-toolagent-7b.arrival",
}
"""Parts whose figures are alongside the paper's comparison, by the beginning of their keys."""
HELD = 0.9
"""Share in time at which a rate counts as served: the paper's goodput."""


def claims(parts: Parts) -> dict[str, str]:
    """Return our figures by ``server.`` or ``engines.`` and the claim's key, of the parts that were run."""
    found = {}
    for key, name in COMPARED.items():
        if name in parts:
            found |= comparison_claims(key, parts[name])
    if "ablation" in parts:
        found |= ablation_claims(parts["ablation"])
    if "elasticity" in parts:
        found |= elastic_claims(parts["elasticity"])
    if "scaling" in parts:
        ratios = scaling_ratio(parts["scaling"], "dualmap")
        if 8 in ratios and 32 in ratios:
            found["server.scaling.ratio"] = f"{ratios[32] / 32 / (ratios[8] / 8):.2f}"
    return found


def rows_at(summary: Sequence[Row], qps: float | None) -> dict[str, Row]:
    """Return the rows of one rate by label."""
    return {row["label"]: row for row in summary if row["qps"] == qps}


def rates_of(summary: Sequence[Row]) -> list[float]:
    """Return the rates that were tried, rising."""
    return sorted({row["qps"] for row in summary})


def best_gain(
    summary: Sequence[Row], policy: str, baselines: Sequence[str]
) -> tuple[float | None, float | None]:
    """Return the largest relative gain in capacity over the best baseline of a rate, and that rate.

    Rates where everybody is below 10% say nothing and are left out.
    """
    best: tuple[float | None, float | None] = (None, None)
    for qps in rates_of(summary):
        rows = rows_at(summary, qps)
        baseline = max(rows[name]["on_time"] for name in baselines)
        if baseline < 0.1:
            continue
        gain = rows[policy]["on_time"] / baseline - 1
        if best[0] is None or gain > best[0]:
            best = (gain, qps)
    return best


def change(new: float | None, old: float | None) -> float | None:
    """Return the relative change, or None when unknown."""
    return None if new is None or not old else new / old - 1


def overloaded_rate(summary: Sequence[Row], baselines: Sequence[str]) -> float:
    """Return the first rate at which no baseline serves 90% in time: the paper's high QPS."""
    rates = rates_of(summary)
    for qps in rates:
        rows = rows_at(summary, qps)
        if max(rows[name]["on_time"] for name in baselines) < HELD:
            return qps
    return rates[-1]


def comparison_claims(key: str, part: Mapping[str, Any]) -> dict[str, str]:
    """Return our figures for the paper's claims on one workload, against its baselines and without Preble."""
    summary = part["summary"]
    found = against(key, part, PAPERS, "")
    found |= against(key, part, [name for name in PAPERS if name != "preble"], ".but_preble")
    calm, high = rows_at(summary, rates_of(summary)[0]), overloaded_rate(summary, PAPERS)
    affinity, load = calm["cache-affinity"], calm["least-pending"]
    found[f"{key}.affinity_over_load"] = " ".join(
        f"{affinity[name] / load[name]:.2f} by {unit}"
        for name, unit in (("hit_rate", "token,"), ("hit_rate_per_request", "request"))
    )
    shares = [rows["dualmap"]["hit_share_of_bound"] for rows in (calm, rows_at(summary, high))]
    found[f"{key}.bound_share"] = f"{shares[0]:.1%} calm, {shares[1]:.1%} at QPS {high:g}"
    return found


def against(key: str, part: Mapping[str, Any], baselines: Sequence[str], suffix: str) -> dict[str, str]:
    """Return DualMap's changes against the best of some baselines; keys end in ``suffix``."""
    summary = part["summary"]
    goodput = {row["label"]: row["goodput_rps"] for row in part["goodput"]}
    held = [goodput[name] for name in baselines if goodput[name] is not None]
    high = overloaded_rate(summary, baselines)
    rows = rows_at(summary, high)
    found = {}
    for metric in ("p50", "p90"):
        best = min(rows[name]["ttft_s"][metric] for name in baselines)
        changed = percent(change(rows["dualmap"]["ttft_s"][metric], best))
        found[f"{key}.{metric}_change{suffix}"] = f"{changed} (QPS {high:g})"
    gain, rate = best_gain(summary, "dualmap", baselines)
    found[f"{key}.capacity_gain{suffix}"] = percent(gain) + ("" if rate is None else f" (QPS {rate:g})")
    found[f"{key}.goodput_gain{suffix}"] = goodput_gain(goodput["dualmap"], held, rates_of(summary)[0])
    return found


def goodput_gain(dualmap_rps: float | None, baselines_rps: Sequence[float], lowest_rps: float) -> str:
    """Return DualMap's gain in goodput; where no baseline holds 90% at the lowest rate tried, what is known of it."""
    if dualmap_rps is None:
        return "-"
    if not baselines_rps:
        return f"above {percent(change(dualmap_rps, lowest_rps))}"
    return percent(change(dualmap_rps, max(baselines_rps)))


def ablation_claims(part: Mapping[str, Any]) -> dict[str, str]:
    """Return our ablation at each rate, the knee's among them: the last at which all of DualMap serves 90% in time."""
    found: dict[str, list[str]] = {}
    for rate in rates_of(part["summary"]):
        rows = rows_at(part["summary"], rate)
        slo, pair = rows["- rebalancing"]["ttft_s"], rows["- SLO-aware: pair min-TTFT"]["ttft_s"]
        changes = {
            "slo_p50": change(slo["p50"], pair["p50"]),
            "slo_p90": change(slo["p90"], pair["p90"]),
            "rebalance_p90": change(rows["dualmap"]["ttft_s"]["p90"], slo["p90"]),
        }
        for name, value in changes.items():
            found.setdefault(f"server.ablation.{name}", []).append(f"{percent(value)} (QPS {rate:g})")
    return {key: ", ".join(texts) for key, texts in found.items()}


def elastic_claims(part: Mapping[str, Any]) -> dict[str, str]:
    """Return DualMap's share in time after the joins and from the first leave on."""
    window_s = part["window_s"]

    def after(label: str, since_s: float) -> str:
        shares = [
            share
            for run in part["runs"]
            if run["label"] == label
            for until_s, share in zip(run["attainment"]["until_s"], run["attainment"]["share"], strict=True)
            if until_s > since_s + window_s
        ]
        return f"{sum(shares) / len(shares):.1%}" if shares else "-"

    return {
        "server.elasticity.up": after("dualmap, 4 to 8", 74.0 + 2 * window_s),
        "server.elasticity.down": after("dualmap, 8 to 4", 1809.0),
    }


def by_routers(summary: Iterable[Row]) -> list[tuple[str, str, dict[int, Row]]]:
    """Return (policy, way of working together, row by number of routers), in the order given; one router has no way."""
    single: dict[str, Row] = {}
    several: dict[tuple[str, str], dict[int, Row]] = {}
    for row in summary:
        policy, count, way = row["label"].split("|")
        if count == "1":
            single[policy] = row
        else:
            several.setdefault((policy, way), {})[int(count)] = row
    return [(policy, way, {1: single[policy], **rows}) for (policy, way), rows in several.items()]


def scaling_ratio(part: Mapping[str, Any], label: str) -> dict[int, float]:
    """Return a policy's goodput by number of instances."""
    return {
        int(row["label"].rsplit(" x", 1)[1]): row["goodput_rps"]
        for row in part["goodput"]
        if row["label"].rsplit(" x", 1)[0] == label and row["goodput_rps"] is not None
    }


def percent(value: float | None) -> str:
    """Return a signed percentage, ``-`` when unknown."""
    return "-" if value is None else f"{value:+.1%}"
