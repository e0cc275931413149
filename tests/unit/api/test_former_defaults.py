"""What older definitions stored in graphs."""

from __future__ import annotations

import pytest

from penstock.api.manifests.former_defaults import without_former_defaults

STORED = {"maxPerRequest": 3, "premiumReservedFraction": 0.3, "swapGigabytes": 2}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"model": {"name": "m"}}, {"model": {"name": "m"}}),
        ({"planner": {"sla": {"predictor": "holt-winters"}}}, {"planner": {"sla": {}}}),
        ({"planner": {"sla": {"predictor": "trend"}}}, {"planner": {"sla": {"predictor": "trend"}}}),
        ({"planner": None, "engine": 3}, {"planner": None, "engine": 3}),
        ({"engine": {"preemption": STORED}}, {"engine": {"preemption": {"swapGigabytes": 2}}}),
        ({"engine": {"preemption": {"maxPerRequest": 4}}}, {"engine": {"preemption": {"maxPerRequest": 4}}}),
    ],
)
def test_a_stored_default_that_is_refused_now_counts_as_absent(spec, expected):
    """Nothing else is touched, whatever stands there."""
    assert without_former_defaults(spec) == expected


def test_bounds_of_preemption_stay_where_requests_have_tiers():
    """There somebody may have relied on them."""
    spec = {"router": {"tiers": {"enabled": True}}, "engine": {"preemption": STORED}}
    assert without_former_defaults(spec) == spec
