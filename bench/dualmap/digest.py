"""Turns runs into the figures that stand beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

OURS = ("prefix-cost", "pair-cost")
"""Not in the paper, and so not among its baselines."""
PAPERS = ("cache-affinity", "least-pending", "min-ttft", "preble")
"""The paper's four baselines by our names; least-pending is its Least Loaded."""


def rows_at(summary: Sequence[Row], qps: float | None) -> dict[str, Row]:
    """Return the rows of one rate by label."""
    return {row["policy"]: row for row in summary if row["qps"] == qps}


def best_gain(
    summary: Sequence[Row], policy: str, rivals: Sequence[str]
) -> tuple[float | None, float | None]:
    """Return the largest relative gain in capacity over the best rival of a rate, and that rate.

    Rates where everybody is below 10% say nothing and are left out.
    """
    best: tuple[float | None, float | None] = (None, None)
    for qps in sorted({row["qps"] for row in summary}):
        rows = rows_at(summary, qps)
        rival = max(rows[name]["capacity"] for name in rivals)
        if rival < 0.1:
            continue
        gain = rows[policy]["capacity"] / rival - 1
        if best[0] is None or gain > best[0]:
            best = (gain, qps)
    return best


def change(new: float | None, old: float | None) -> float | None:
    """Return the relative change, or None when unknown."""
    return None if new is None or not old else new / old - 1


def overloaded_rate(summary: Sequence[Row], rivals: Sequence[str]) -> float:
    """Return the first rate at which no rival serves 90% in time: the paper's high QPS."""
    rates = sorted({row["qps"] for row in summary})
    for qps in rates:
        rows = rows_at(summary, qps)
        if max(rows[name]["capacity"] for name in rivals) < 0.9:
            return qps
    return rates[-1]


def comparison_claims(key: str, part: Mapping[str, Any]) -> dict[str, str]:
    """Return our figures for the paper's claims on one workload."""
    summary = part["summary"]
    goodput = {row["policy"]: row["goodput_rps"] for row in part["goodput"]}
    rivals = [goodput[name] for name in PAPERS if goodput[name] is not None]
    high = overloaded_rate(summary, PAPERS)
    rows = rows_at(summary, high)
    found = {}
    for metric in ("p50", "p90"):
        best = min(rows[name]["ttft_s"][metric] for name in PAPERS)
        found[f"{key}.{metric}_change"] = (
            f"{percent(change(rows['dualmap']['ttft_s'][metric], best))} (QPS {high:g})"
        )
    gain, rate = best_gain(summary, "dualmap", PAPERS)
    found[f"{key}.capacity_gain"] = f"{percent(gain)}" + ("" if rate is None else f" (QPS {rate:g})")
    found[f"{key}.goodput_gain"] = (
        percent(change(goodput["dualmap"], max(rivals))) if rivals and goodput["dualmap"] else "-"
    )
    calm = rows_at(summary, min(row["qps"] for row in summary))
    found[f"{key}.affinity_over_load"] = (
        f"{calm['cache-affinity']['hit_rate'] / calm['least-pending']['hit_rate']:.2f}"
    )
    found[f"{key}.bound_share"] = (
        f"{calm['dualmap']['hit_share_of_bound']:.1%} calm, {rows['dualmap']['hit_share_of_bound']:.1%} at QPS {high:g}"
    )
    return found


def ablation_claims(part: Mapping[str, Any]) -> dict[str, str]:
    """Return our ablation at the highest rate that was tried."""
    rows = rows_at(part["summary"], max(row["qps"] for row in part["summary"]))
    slo, pair = rows["- rebalancing"]["ttft_s"], rows["- SLO-aware: pair min-TTFT"]["ttft_s"]
    return {
        "ablation.slo_p50": percent(change(slo["p50"], pair["p50"])),
        "ablation.slo_p90": percent(change(slo["p90"], pair["p90"])),
        "ablation.rebalance_p90": percent(change(rows["dualmap"]["ttft_s"]["p90"], slo["p90"])),
    }


def crossovers(part: Mapping[str, Any], rate: float) -> dict[str, str]:
    """Return from how many routers on two candidates serve more in time than all instances do, at one rate."""
    shares: dict[tuple[str, str], dict[int, float]] = {}
    for row in part["summary"]:
        policy, count, delay = row["policy"].split("|")
        # One router has nobody to hear of.
        for each in ("0", "2") if count in {"1", "2"} else (delay,):
            shares.setdefault((policy, each), {})[int(count)] = row["capacity"]
    found = {}
    for pair, whole in (("dualmap", "min-ttft"), ("pair-cost", "prefix-cost"), ("pair-cost", "preble")):
        for delay in ("0", "2"):
            one, other = shares[pair, delay], shares[whole, delay]
            ahead = [count for count in sorted(one) if one[count] >= other[count]]
            found[f"staleness.QPS {rate:g}: {pair} over {whole}, news {delay} s old"] = (
                f"with {', '.join(map(str, ahead))} routers" if ahead else "never"
            )
    return found


def scaling_ratio(part: Mapping[str, Any], label: str) -> dict[int, float]:
    """Return a policy's goodput by number of instances."""
    return {
        int(row["policy"].rsplit(" x", 1)[1]): row["goodput_rps"]
        for row in part["goodput"]
        if row["policy"].rsplit(" x", 1)[0] == label and row["goodput_rps"] is not None
    }


def percent(value: float | None) -> str:
    """Return a signed percentage, ``-`` when unknown."""
    return "-" if value is None else f"{value:+.1%}"
