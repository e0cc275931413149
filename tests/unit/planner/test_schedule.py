"""planner.schedule: floors and ceilings while a period of the calendar holds, live, simulated and replayed alike."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from penstock.api import Role
from penstock.api.manifests import parse_manifests
from penstock.core.cron import Recurring
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import DecideConfig, Mode, config_from
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.pipeline import decide, roll_back
from penstock_planner.decide.schedule import ScheduledBounds
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.options import join

P, D = Role.PREFILL, Role.DECODE
BERLIN = ZoneInfo("Europe/Berlin")
OFFICE = Recurring("0 8 * * 1-5", "Europe/Berlin", 10 * 3600)

MANIFEST = """\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  model: {name: llama}
  runtime: simulated
  services:
    router: {role: router}
    prefill: {role: prefill, gpusPerReplica: 2, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, scaling: {minReplicas: 1, maxReplicas: 4}}
  planner:
    maxGpuBudget: 10
    schedule:
      - {name: office, cron: "0 8 * * 1-5", timeZone: Europe/Berlin, durationSeconds: 36000, %s}
      - {name: night, cron: "0 20 * * *", durationSeconds: 36000, %s}
"""


def _graph(office="prefill: {minReplicas: 3}, decode: {minReplicas: 2}", night="prefill: {gpus: 2}"):
    found, problems = parse_manifests(MANIFEST % (office, night))
    assert not problems
    return found.graphs[0]


def _s(*when, zone=UTC):
    return datetime(*when, tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("at_s", "is_on"),
    [
        (_s(2026, 1, 5, 7, 59, 59, zone=BERLIN), False),
        (_s(2026, 1, 5, 8, zone=BERLIN), True),
        (_s(2026, 1, 5, 17, 59, 59, zone=BERLIN), True),
        (_s(2026, 1, 5, 18, zone=BERLIN), False),
        (_s(2026, 1, 10, 12, zone=BERLIN), False),
        # Summer time: eight o'clock in Berlin is six in UTC.
        (_s(2026, 7, 6, 6), True),
        (_s(2026, 7, 6, 5, 59), False),
    ],
)
def test_a_period_holds_from_its_start_in_its_time_zone_for_its_length(at_s, is_on):
    """Monday to Friday from eight to six, in winter and in summer; the end is open."""
    assert OFFICE.is_on(at_s) is is_on


@pytest.mark.parametrize(
    ("period", "at_s", "words"),
    [
        (OFFICE, _s(2026, 1, 5, 12, zone=BERLIN), "until 2026-01-05 18:00 Europe/Berlin"),
        (OFFICE, _s(2026, 1, 5, 18, zone=BERLIN), ""),
        (Recurring("0 20 * * *", "UTC", 10 * 3600), _s(2026, 1, 5, 23), "until 2026-01-06 06:00 UTC"),
        (Recurring("0 * * * *", "UTC", 7200), _s(2026, 1, 5, 23), ""),
    ],
)
def test_a_period_says_until_when_it_holds(period, at_s, words):
    """In its own time zone; nothing while none holds, nor where the next begins before it ends."""
    assert period.ends_in_words(at_s) == words


def test_an_entry_that_holds_is_said_with_its_bounds_and_its_end():
    """As status and the condition have it."""
    office, _ = _config().schedule
    assert office.in_words(NOON) == (
        "office: prefill at least 3, decode at least 2 until 2026-01-05 18:00 Europe/Berlin"
    )


def test_two_periods_meet_where_one_begins_during_the_other():
    """A night that ends at six in UTC ends before eight in Berlin; one of two hours more does not in summer."""
    assert not OFFICE.meets(Recurring("0 20 * * *", "UTC", 10 * 3600))
    assert OFFICE.meets(Recurring("0 20 * * *", "UTC", 12 * 3600))
    assert not OFFICE.meets(Recurring("0 0 * * 6", "Europe/Berlin", 48 * 3600))
    assert OFFICE.meets(Recurring("30 9 1 * *", "Europe/Berlin", 60))


def _pull(at_s, wall_s, *, prefill=1, decode=1, starting=0, known=True):
    demand = Demand(period_s=1.0) if known else None
    usage = {f"d{i}": assess(0.0, age_s=0, max_age_s=10, source="t", upper=1.0) for i in range(decode)}
    pools = {P: PoolCounts(prefill, starting, gpus=2), D: PoolCounts(decode, gpus=1)}
    queue = assess(0.0, age_s=0, max_age_s=10, source="t")
    made = summarise(at_s, pools, kv=usage if known else {}, queue=queue, demand=demand)
    return replace(made, wall_s=wall_s)


def _decided(config, wall_s, **pools):
    window = Window(0.0, 30.0, (_pull(30.0, wall_s, **pools),))
    decision, _ = decide(window, PlannerState(), config)
    return {role.role: role for role in decision.roles}


def _config(mode=Mode.ADAPTIVE, **changes):
    return replace(join(given={}, graph=_graph()).decide_config(_graph()), mode=mode, **changes)


NOON, NIGHT = _s(2026, 1, 5, 11), _s(2026, 1, 5, 23)


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, Mode.LOAD, Mode.HPA])
def test_a_floor_holds_while_its_entry_does_in_every_mode(mode):
    """At noon both roles grow to the entry's floor, and say which entry; at six in the evening nothing asks for it."""
    at_noon = _decided(_config(mode, max_step=1), NOON)
    for role, current, floor in ((P, 1, 3), (D, 1, 2)):
        assert (at_noon[role].action, at_noon[role].reason) == (Action.UP, Reason.BELOW_FLOOR)
        assert at_noon[role].desired == current + 1
        assert "(schedule: office)" in at_noon[role].sentence
        step = at_noon[role].steps[0]
        assert (step.name, step.inputs["entries"], step.inputs["floor"]) == ("schedule", "office", floor)
    evening = _decided(_config(mode), _s(2026, 1, 5, 18))
    assert all(role.action is Action.HOLD for role in evening.values())
    assert not any(step.name == "schedule" for role in evening.values() for step in role.steps)


@pytest.mark.parametrize("known", [True, False])
def test_a_ceiling_shrinks_like_a_lowered_budget_and_nothing_grows_above_it(known):
    """2 GPUs of prefill at night are one replica: of three two go, one a decision, whatever is known of the load."""
    found = _decided(_config(max_step=1), NIGHT, prefill=3, known=known)[P]
    assert (found.action, found.reason, found.desired) == (Action.DOWN, Reason.ABOVE_SCHEDULE, 2)
    assert "3 exceeds the scheduled maximum of 1 (schedule: night)" in found.sentence
    held = _decided(_config(), NIGHT, prefill=1)[P]
    assert held.desired == 1


def test_entries_that_hold_at_once_add_up_and_the_budget_goes_before_them():
    """The largest floor and the smallest ceiling count; with 4 GPUs the third prefill replica stays out."""
    more = ScheduledBounds("batch", OFFICE, {P: 4}, {D: 1})
    config = _config()
    config = replace(config, schedule=(*config.schedule[:1], more), max_step=8)
    found = _decided(config, NOON, decode=1)
    assert found[P].desired == 4
    assert found[P].steps[0].inputs["entries"] == "office, batch"
    small = _decided(replace(config, max_gpu_budget=4), NOON, prefill=1, decode=2)
    assert small[P].reason is Reason.GPU_BUDGET


def test_below_a_scheduled_floor_nothing_goes_to_zero():
    """Nothing at all for twenty minutes: outside office hours the graph sleeps, within them its floors stay."""
    config = DecideConfig(mode=Mode.ADAPTIVE, scale_to_zero_after_s=600.0, min_gpu_budget=0)
    config = replace(config, schedule=(ScheduledBounds("office", OFFICE, {P: 1, D: 1}),))
    for wall_s, slept in ((NOON, False), (_s(2026, 1, 5, 20), True)):
        state, replicas = PlannerState(), {"prefill": 1, "decode": 1}
        for start in range(0, 1200, 10):
            pulls = tuple(_pull(start + n, wall_s + start + n, **replicas) for n in range(1, 11))
            decision, state = decide(Window(start, start + 10.0, pulls), state, config)
            for role in decision.changes:
                replicas[role.role.value] = role.desired
        assert (replicas == {"prefill": 0, "decode": 0}) is slept


def test_a_start_of_a_scheduled_floor_that_failed_stays_wanted():
    """At its floor a role keeps what it asked for, while the entry holds and not after it."""
    state = PlannerState(0, {P: RoleState(last_ready=1, pending_replicas=3)})
    for wall_s, action in ((NOON, Action.HOLD), (_s(2026, 1, 5, 18), Action.DOWN)):
        pull = _pull(30.0, wall_s, prefill=1, starting=2)
        decision, _ = roll_back(P, "no GPU", pull=pull, state=state, config=_config())
        assert decision.roles[0].action is action


def test_the_ledger_gives_schedule_and_time_back():
    """The configuration and the pull are read as they were written, so that a replay decides the same."""
    config = _config()
    assert config_from(to_plain(config)) == config
    pull = _pull(30.0, NOON)
    assert from_plain(Pull, to_plain(pull)).wall_s == NOON


@pytest.mark.parametrize(
    ("office", "night", "told"),
    [
        ("prefill: {minReplicas: 5}", "prefill: {gpus: 2}", "5 replicas exceed 4 of services.prefill"),
        ("prefill: {gpus: 3}", "prefill: {gpus: 2}", "not a whole number of replicas of 2"),
        ("prefill: {maxReplicas: 0}", "prefill: {gpus: 2}", "0 replicas are below 1"),
        ("aggregated: {minReplicas: 1}", "prefill: {gpus: 2}", "no service has role aggregated"),
        ("prefill: {minReplicas: 4}, decode: {minReplicas: 3}", "prefill: {gpus: 2}", "ask for 11 GPUs"),
        ("prefill: {gpus: 2, minReplicas: 1}", "prefill: {gpus: 2}", "keep one or the other"),
        ("prefill: {minReplicas: 3, maxReplicas: 2}", "prefill: {gpus: 2}", "3 exceeds maxReplicas 2"),
        ("timeZone: Europe/Berlim, prefill: {gpus: 2}", "prefill: {gpus: 2}", "Europe/Berlim"),
        ("timeZone: UTC", "prefill: {gpus: 2}", "office bounds no role"),
    ],
)
def test_what_contradicts_the_graph_is_refused_with_its_remedy(office, night, told):
    """Role, bounds, whole replicas, budget, time zone: each names entry and value."""
    text = MANIFEST % (office, night)
    if "timeZone" in office:
        text = text.replace("timeZone: Europe/Berlin, ", "", 1)
    _, problems = parse_manifests(text)
    assert any(told in str(each) for each in problems), problems


def test_two_entries_that_contradict_are_refused_only_where_they_can_meet():
    """Three prefill replicas by day and one by night: fine until the night is two hours longer."""
    text = MANIFEST % ("prefill: {minReplicas: 3}", "prefill: {gpus: 2}")
    assert not parse_manifests(text)[1]
    before, after = text.rsplit("36000", 1)
    problems = parse_manifests(f"{before}43200{after}")[1]
    assert ["night and office can hold at the same time" in str(each) for each in problems] == [True]
