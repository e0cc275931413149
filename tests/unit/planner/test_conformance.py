"""The planner's own modes in every situation of the conformance suite, and the plant behind it."""

import pytest
from autoscaler_conformance.plant import DECODE_SLOTS, Plant, Situation, steady
from autoscaler_conformance.run import play
from autoscaler_conformance.scenarios import SCENARIOS

from penstock.api import Role
from penstock.planner.decide.config import Mode
from penstock.simulator.faults import Fault, FaultPeriod, Faults

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


def test_names_are_unique():
    """A row of the table each."""
    names = [scenario.name for scenario in SCENARIOS]

    assert len(names) == len(set(names))
    assert len(names) >= 50
    assert frozenset().union(*MISSED.values()) <= set(names)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_policy_that_does_nothing_is_found_out():
    """A suite that a fixed fleet passes asks for nothing."""
    held = sum(scenario.holds(play("static", scenario.situation)) for scenario in SCENARIOS)

    assert held < 0.65 * len(SCENARIOS)


def plant_at(seconds, situation, *actions):
    """A plant after some seconds; ``actions`` are (second, role, replicas)."""
    plant = Plant(situation)
    for second in range(1, seconds + 1):
        plant.step(float(second))
        for at_s, role, replicas in actions:
            if at_s == second:
                plant.scale(role, replicas)
    return plant


def test_the_plant_serves_two_prompts_a_second_and_holds_answers():
    """2.5/s on one prefill worker: the queue grows by half a request a second; 20 s of answers fill 40 of 100 slots."""
    plant = plant_at(400, Situation({Role.PREFILL: 1, Role.DECODE: 2}, steady(2.5), hold_s=20.0))
    seen = plant.observe(400.0)

    assert plant.queue == pytest.approx(200.0)
    assert seen.kv["decode-0"] == pytest.approx(2 * 20 / (2 * DECODE_SLOTS), rel=0.02)
    assert seen.demand.arrivals == pytest.approx(1000.0)
    assert seen.demand.prefilled_tokens == pytest.approx(800 * 8000)


def test_the_plant_starts_drains_and_refuses():
    """A join serves after its start; a leave holds its GPU for ten seconds; beyond its bound the queue refuses."""
    situation = Situation({Role.AGGREGATED: 2}, steady(9.0), start_s=30.0, max_queue=5.0)
    up = (10, Role.AGGREGATED, 3)

    assert plant_at(39, situation, up).counts(Role.AGGREGATED).starting == 1
    assert plant_at(40, situation, up).counts(Role.AGGREGATED).ready == 3
    down = plant_at(55, situation, up, (50, Role.AGGREGATED, 2))
    assert (down.counts(Role.AGGREGATED).draining, down.gpus()) == (1, 3)
    assert plant_at(61, situation, up, (50, Role.AGGREGATED, 2)).gpus() == 2
    assert plant_at(20, situation).queue == 5.0
    assert plant_at(20, situation).refused == pytest.approx(9 * 20 - 4 * 20 - 5)


def test_the_plant_says_why_a_replica_is_never_ready():
    """No node after 15 s; one that is only silent is the planner's deadline's to judge."""
    fleet = {Role.PREFILL: 1, Role.DECODE: 1}
    full = Situation(fleet, steady(0.0), faults=Faults(node_gpus=2))
    silent = Situation(fleet, steady(0.0), faults=Faults((FaultPeriod(Fault.NEVER_READY, 0, 100),)))
    up = (10, Role.PREFILL, 2)

    assert "unschedulable" in plant_at(25, full, up).observe(25.0).never_ready[Role.PREFILL]
    assert plant_at(24, full, up).observe(24.0).never_ready == {}
    assert plant_at(611, silent, up).observe(611.0).never_ready == {}
