"""The report's figures in words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.report.counterfactual import FleetKind, sentences
from penstock.report.text import latencies

LAG = {"resolution_s": 0.001, "is_itl_unresolved": False}
NONE = dict.fromkeys(("p50", "p90", "p99", "mean", "max"), None) | {"count": 0}


def note_of(itl_s: float, tpot_s: float) -> str:
    """Return the note below the latencies with these medians."""
    latency = dict.fromkeys(("ttft_s", "e2e_s"), NONE)
    latency |= {
        "itl_s": NONE | {"p50": itl_s},
        "tpot_s": NONE | {"p50": tpot_s},
        "percentile_method": "nearest",
    }
    return latencies({"latency": latency, "lag": LAG}).note


@pytest.mark.parametrize(("itl_s", "tpot_s", "is_explained"), [(0.136, 0.028, True), (0.030, 0.028, False)])
def test_medians_of_gaps_that_differ_are_explained(
    itl_s: float, tpot_s: float, *, is_explained: bool
) -> None:
    """136 and 28 ms of one run look like a mistake; close ones need no words."""
    assert ("136.0 ms and 28.0 ms" in note_of(itl_s, tpot_s)) is is_explained


@pytest.mark.parametrize(("hours", "change"), [(0.999, "(+0%)"), (1.1, "(+10%)"), (0.9, "(-10%)")])
def test_no_change_has_no_minus_sign(hours: float, change: str) -> None:
    """A difference that is rounded to nothing has no direction."""
    served = SimpleNamespace(gpu_hours=1.0, in_time=0.9500)
    fixed = SimpleNamespace(gpu_hours=hours, in_time=0.9499, kind=FleetKind.FIXED, name="fleet", remark="")

    (line,) = sentences(SimpleNamespace(outcomes=[served, fixed], served=served, notes=()))  # type: ignore[arg-type]

    assert change in line
    assert "(+0.0 points)" in line
