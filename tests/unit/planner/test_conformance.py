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


@pytest.mark.no_cover  # the tracer would double a tenth of the suite's time, for lines that other tests reach
@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=pytest.mark.nightly if each is Mode.LOAD else ()) for each in OWN]
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
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
