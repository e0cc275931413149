"""What a planner remembers holds on every clock: after a reboot, on another node, at another time scale, at any moment."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
from hypothesis import strategies as st
from sla_load import FEW_POINTS

from penstock.api import Role
from penstock_planner.core.effects import BeginLedger
from penstock_planner.core.ledger_history import LedgerHistory
from penstock_planner.core.planner import PlannerCore
from penstock_planner.core.planner_settings import PlannerSettings
from penstock_planner.core.tick_schedule import TickSchedule
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, WorkerSummary
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.state import PlannerState, resumed

D, P = Role.DECODE, Role.PREFILL

EIGHTHS = st.integers(0, 8 * 10**6).map(lambda eighths: eighths / 8)
"""Seconds whose sums and differences are exact, so that two clocks give the same numbers bit for bit."""


def _config(mode):
    sla = {"itl_slo_s": 0.02, "performance": FEW_POINTS}
    return replace(DecideConfig(mode=mode, scale_to_zero_after_s=60.0), **(sla if mode == Mode.SLA else {}))


def _pull(at_s, load):
    rate, prefill, decode = load
    demand = Demand(
        period_s=2.0,
        arrivals=rate,
        prompt_tokens=8000 * rate,
        uncached_tokens=8000 * rate,
        prefilled_tokens=6000 * rate,
        waiting=rate,
        waiting_tokens=8000 * rate,
        oldest_wait_s=rate or None,
        prefilling_workers=min(rate, 1.0),
    )
    return Pull(
        at_s,
        {P: PoolCounts(prefill, gpus=1), D: PoolCounts(decode, gpus=1)},
        WorkerSummary(min(decode, 0.2 * rate), decode, 0, 0.0, "test"),
        None,
        demand,
    )


LOADS = st.tuples(st.integers(0, 8).map(float), st.integers(1, 4), st.integers(1, 4))


def _decided(loads, state, config, from_s):
    """Decide every two seconds after ``from_s``; return the changes and the last state."""
    changes = []
    for number, load in enumerate(loads, start=1):
        at_s = from_s + 2 * number
        decision, state = decide(Window(at_s - 2, at_s, (_pull(at_s, load),)), state, config)
        changes.append([(each.role, each.desired, each.reason, each.sentence) for each in decision.roles])
    return changes, state


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    mode=st.sampled_from([Mode.LOAD, Mode.ADAPTIVE, Mode.SLA]),
    before=st.lists(LOADS, min_size=1, max_size=12),
    after=st.lists(LOADS, min_size=1, max_size=12),
    first_s=EIGHTHS,
    second_s=EIGHTHS,
    gone_s=st.sampled_from([0.0, 2.5, 90.0, 86_400.0]),
)
def test_a_planner_decides_on_any_clock_as_on_its_own(*, mode, before, after, first_s, second_s, gone_s):
    """Whatever the two clocks show, and however long it was away: only durations count."""
    config = _config(mode)
    _, state = _decided(before, PlannerState(), config, first_s)
    left_s = first_s + 2 * len(before)
    stayed, _ = _decided(after, state, config, left_s + gone_s)
    moved = resumed(state, config.policy.states, second_s - left_s - gone_s, second_s)
    assert _decided(after, moved, config, second_s)[0] == stayed


def _times(memory):
    """Return every remembered time of mode adaptive."""
    found = [memory.pulled_s, memory.quiet_since_s, memory.unserved_s]
    for role in memory.roles.values():
        found += [role.grown_s, role.shrunk_s, *role.start_times_s]
    return [at_s for at_s in found if at_s is not None]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    before=st.lists(LOADS, min_size=1, max_size=8),
    starting=st.integers(0, 2),
    first_s=EIGHTHS,
    now_s=EIGHTHS,
    gone_s=st.floats(0.0, 1e6),
    timeline=st.sampled_from(["boot@20", "boot@4", "other@20"]),
)
def test_no_remembered_time_lies_ahead_after_a_resume(*, before, starting, first_s, now_s, gone_s, timeline):
    """Any timeline, any moment, any wall clock: what is remembered lies between the start of time and now."""
    config = _config(Mode.ADAPTIVE)
    _, state = _decided(before, PlannerState(), config, first_s)
    left_s = first_s + 2 * len(before)
    pools = {P: PoolCounts(1, starting, gpus=1), D: PoolCounts(1, starting, gpus=1)}
    pull = replace(_pull(left_s + 2, before[-1]), pools=pools)
    _, state = decide(Window(left_s, pull.at_s, (pull,)), state, config)
    history = LedgerHistory(
        state, "boot@20", 0.0, pull.at_s, None, TickSchedule.of(config, pull.at_s), None, {}, ()
    )
    settings = PlannerSettings(config, 600.0, timeline)
    core = PlannerCore(settings, now_s)
    effects = core.start(now_s, history, gone_s=gone_s)
    assert isinstance(effects[0], BeginLedger)
    memory = AdaptiveMemory.read(core.decided.learned)
    assert all(at_s <= now_s for at_s in _times(memory))
    learnt, was = (
        [(each.ready, len(each.start_times_s), each.startup_s) for each in of.roles.values()]
        for of in (memory, AdaptiveMemory.read(state.learned))
    )
    assert learnt == was
