"""What each tier of a run's requests got, against its own targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.api import Tier
from penstock.router.policy.tiers import SloTarget, tier_settings
from penstock.simulator.figures import known, mean, ratio, rounded
from penstock.simulator.observer import Recording
from penstock.simulator.scenario import Scenario
from penstock.simulator.workload import Workload
from penstock.workload.statistics import describe


def tier_scores(recording: Recording, workload: Workload, scenario: Scenario) -> dict[str, dict[str, Any]]:
    """Return figures by tier, highest first; empty where requests ask for none. The warm-up is left out.

    ``compliance`` is the share of the admitted requests that kept all targets of their tier, ``attainment`` that of all
    that asked: a rejected or shed request has attained nothing.
    """
    asked = np.array([request.tier for request in workload.requests], dtype=object)
    targets = tier_settings(scenario.router.tiers).targets
    judged = np.arange(asked.size) >= workload.warmup
    return {
        tier.value: _figures(recording, judged & (asked == tier), targets.get(tier, SloTarget()))
        for tier in Tier
        if (asked == tier).any()
    }


def _figures(recording: Recording, own: Any, target: SloTarget) -> dict[str, Any]:
    requests = recording.requests
    is_ok, is_rejected = requests.is_ok[own], requests.is_rejected[own]
    ttft, tpot, e2e = requests.ttft_s[own], requests.tpot_s[own], requests.e2e_s[own]
    is_met = is_ok.copy()
    for values, bound in ((ttft, target.ttft_s), (tpot, target.tpot_s), (e2e, target.e2e_s)):
        if bound is not None:
            is_met &= ~(values > bound)
    admitted = int((~is_rejected).sum())
    return {
        "requests": int(is_ok.size),
        "ok": int(is_ok.sum()),
        "rejected": int(is_rejected.sum()),
        "failed": int((~is_ok & ~is_rejected).sum()),
        "ttft_s": describe(known(ttft)),
        "tpot_s": describe(known(tpot)),
        "e2e_s": describe(known(e2e)),
        "compliance": rounded(ratio(int(is_met.sum()), admitted)),
        "attainment": rounded(ratio(int(is_met.sum()), is_ok.size)),
    }


def mean_tiers(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each tier's figures as means over runs of one kind; counts are summed."""
    found: dict[str, dict[str, Any]] = {}
    for name in runs[0]["tiers"]:
        rows = [run["tiers"][name] for run in runs if name in run["tiers"]]
        row: dict[str, Any] = {
            key: sum(each[key] for each in rows) for key in ("requests", "ok", "rejected", "failed")
        }
        for key in ("ttft_s", "tpot_s", "e2e_s"):
            row[key] = {rank: mean(each[key][rank] for each in rows) for rank in ("p50", "p99")}
        row |= {key: mean(each[key] for each in rows) for key in ("compliance", "attainment")}
        found[name] = row
    return found
