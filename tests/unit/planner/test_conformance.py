"""The planner's own modes in every situation of the conformance suite, and the plant behind it."""

import pytest
from autoscaler_conformance.run import play
from autoscaler_conformance.scenarios import SCENARIOS

from penstock_planner.decide.config import Mode

MISSED = {
    Mode.LOAD: frozenset(
        {
            *("metrics-zero", "router-outage-aggregated", "after-a-flash", "noise"),
            *("n-minus-one", "n-minus-one-decode", "n-minus-one-aggregated"),
            *(f"prefill-flap-{share}" for share in ("0.5", "0.9", "0.99")),
            *("other-role-starts", "backlog-grows", "restart-busy"),
        }
    ),
}
"""What a mode is known not to do. ``load`` is the planner document's rule, which looks at the queue and KV alone and
waits for every change: it may learn, and must not forget."""

OWN = (Mode.LOAD, Mode.ADAPTIVE, Mode.SLA)
FIRST = {each.group: each for each in reversed(SCENARIOS)}
HOUR = ("decode-flap", "prefill-flap")
"""Scenarios that last for an hour of decisions."""


def _cases():
    """Each scenario in every mode; by day in mode adaptive, without those of an hour, and one of each group in mode sla."""
    for scenario in SCENARIOS:
        for mode in OWN:
            is_short = not scenario.name.startswith(HOUR)
            by_day = is_short if mode is Mode.ADAPTIVE else mode is Mode.SLA and scenario in FIRST.values()
            marks = () if by_day else pytest.mark.nightly
            yield pytest.param(scenario, mode, id=f"{scenario.name}-{mode}", marks=marks)


@pytest.mark.no_cover  # the tracer would double a tenth of the suite's time, for lines that other tests reach
@pytest.mark.parametrize(("scenario", "mode"), list(_cases()))
def test_own_modes_do_what_is_expected(scenario, mode):
    """Except where the mode's own document has it otherwise."""
    if scenario.name in MISSED.get(mode, ()):
        pytest.skip("known, see MISSED")

    assert scenario.holds(play(mode, scenario.situation)), f"{scenario.what}: {scenario.expected}"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_policy_that_does_nothing_is_found_out():
    """A suite that a fixed fleet passes asks for nothing."""
    held = sum(scenario.holds(play("static", scenario.situation)) for scenario in SCENARIOS)

    assert held < 0.65 * len(SCENARIOS)
