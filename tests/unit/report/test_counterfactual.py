"""What other fleets would have done: figures and words."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.report.analysis import GpuUse
from penstock.report.counterfactual import Counterfactual, FleetKind, outcome, sentences, served_outcome
from penstock.workload.record import RequestStatus


def _use(end_s=100.0):
    return GpuUse(0.0, end_s, 2.0, 4.0, 1.0, 3, 4)


def _served(results, use=None):
    return served_outcome(results, use, name="adaptive", slo_s=5.0, duration_s=100.0)


def test_what_was_served_counts_lost_requests_as_late(result_of):
    """A rejected request, and one that failed after its first token, were not served in time."""
    results = [
        result_of(ttft_s=1.0),
        result_of(ttft_s=6.0),
        result_of(ttft_s=None, status=RequestStatus.REJECTED),
    ]
    results.append(result_of(ttft_s=1.0, status=RequestStatus.FAILED))

    served = _served(results, _use())

    assert (served.in_time, served.lost, served.gpu_hours) == (0.25, 2, 2.0)
    assert served.ttft_p99_s == 6.0
    assert served.source == "measured"


@pytest.mark.parametrize("use", [None, _use(end_s=98.0)])
def test_a_ledger_that_saw_part_of_the_run_gives_no_cost(result_of, use):
    """Unknown is never zero, and half of a run is not passed off as the whole."""
    assert _served([result_of()], use).gpu_hours is None


def test_the_sentences_say_what_a_fixed_fleet_would_have_cost(result_of):
    """Cost and attainment, each beside what was served, and the planner's own row as the simulation's error."""
    served = _served([result_of(ttft_s=1.0), result_of(ttft_s=9.0)], _use())
    planner = outcome(
        np.array([1.0, 9.0]),
        name="adaptive",
        kind=FleetKind.PLANNER,
        requests=2,
        slo_s=5.0,
        gpu_hours=2.2,
    )
    fixed = replace(
        planner, name="3P+1D", kind=FleetKind.FIXED, in_time=0.75, gpu_hours=3.0, remark="cheapest"
    )

    lines = sentences(Counterfactual(5.0, (served, planner, fixed), (fixed,), ()))

    assert lines[0].startswith(
        "adaptive itself, simulated: cost 2.200 GPU-hours (+10%) and kept 50.0% in time"
    )
    assert "the simulation's error" in lines[0]
    assert lines[1] == (
        "a fixed 3P+1D would have cost 3.000 GPU-hours (+50%) and kept 75.0% in time (+25.0 points) (cheapest)"
    )
