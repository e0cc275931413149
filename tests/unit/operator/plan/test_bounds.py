"""Desired replicas and bounds."""

import pytest

from penstock.api import ServiceSpec
from penstock.operator.plan.drain import Bounded, bounded

SCALED = ServiceSpec.model_validate(
    {"role": "decode", "replicas": 2, "gpusPerReplica": 2, "scaling": {"minReplicas": 1, "maxReplicas": 6}}
)
TOO_MANY = Bounded(6, "TooManyReplicas", "9 replicas were asked for; scaling.maxReplicas is 6")
FIXED = ServiceSpec.model_validate({"role": "router", "replicas": 2, "gpusPerReplica": 1})


@pytest.mark.parametrize(
    ("desired", "budget", "expected"),
    [
        (None, None, Bounded(2)),
        (1, 8, Bounded(1)),
        (4, 8, Bounded(4)),
        (6, None, Bounded(6)),
        (0, 8, Bounded(1, "TooFewReplicas", "0 replicas were asked for; scaling.minReplicas is 1")),
        (9, None, TOO_MANY),
        (9, 12, TOO_MANY),
        (5, 8, Bounded(4, "OverBudget", "5 replicas of 2 GPUs exceed planner.maxGpuBudget 8; 4 are kept")),
        (9, 1, Bounded(1, "OverBudget", "9 replicas of 2 GPUs exceed planner.maxGpuBudget 1; 1 are kept")),
    ],
)
def test_a_desired_number_is_kept_within_the_bounds(desired, budget, expected):
    """minReplicas, maxReplicas and what the complete budget can hold; each says so."""
    assert bounded(desired, SCALED, max_gpu_budget=budget) == expected


def test_a_service_without_scaling_keeps_its_number():
    """A desired number from outside is refused in words."""
    assert bounded(None, FIXED, max_gpu_budget=1) == Bounded(2)
    assert bounded(2, FIXED, max_gpu_budget=1) == Bounded(2)
    assert bounded(5, FIXED, max_gpu_budget=1) == Bounded(
        2, "NotScalable", "5 replicas were asked for; the service has no scaling, so it keeps 2"
    )
