"""Ledgers, exports and inputs of versions with other field names are read."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from penstock.api import Role
from penstock_planner.core.older_names import learned_with_present_names, with_present_names
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.decide.objective.shadow_fleets import Growth
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.state import PlannerState, RoleState
from penstock_planner.ledger import read_ledger

OLDER = Path(__file__).parents[2] / "fuzz" / "data" / "ledger.jsonl"
"""A ledger of schema 1, with the names of that version."""


def test_every_record_of_an_older_ledger_is_read():
    """No key is unknown to the classes that the records are parsed with."""
    records = read_ledger(OLDER).records
    assert records[0]["schema"] == 1
    states = [from_plain(PlannerState, record["state"]) for record in records if "state" in record]
    pulls = [from_plain(Pull, record["pull"]) for record in records if record["type"] == "pull"]
    decisions = [from_plain(Decision, record["decision"]) for record in records if "decision" in record]
    assert pulls
    assert decisions
    assert any(state.of(Role.DECODE).last_ready for state in states)
    assert any(sum((pull.demand.unserved or {}).values(), 0.0) >= 0 for pull in pulls if pull.demand)
    learned = AdaptiveMemory.read(states[-1].learned)
    assert learned.seen_s or learned.pulled_s


def test_a_record_of_this_version_stays_as_it_is():
    """Reading is the same whether or not a record has older names."""
    state = to_plain(
        PlannerState(3, {Role.DECODE: RoleState(2, failed_scale_ups=1)}, {"adaptive": AdaptiveMemory()})
    )
    record = {"type": "settled", "state": state}
    assert with_present_names(record) == record
    assert learned_with_present_names(state["learned"]) == state["learned"]


def test_the_state_of_a_role_keeps_its_values():
    """Each older name of a role's state becomes one of this version."""
    older = {"seen": 2, "grace": 1, "asked": 3, "withdrawals": 4, "failed": 5, "backoff": 6, "owed": True}
    read = with_present_names({"state": {"roles": {"decode": older}}})["state"]
    assert from_plain(PlannerState, read).of(Role.DECODE) == RoleState(2, 1, 3, 4, 5, 6, True)


@pytest.mark.parametrize(("older", "growth"), [("prompt", Growth.IMMEDIATE), ("recurring", Growth.SCHEDULED)])
def test_learned_state_keeps_its_values(older, growth):
    """Names, and the values that say how a fleet grows."""
    fleet = {"started_s": [1.0], "backlogs": [0.0], "late": [0.0], "replica_s": [1.0]}
    plain = {
        "adaptive": {
            "work": {"shared": 0.5},
            "roles": {"prefill": {"ready": 1, "begun_s": [7.0]}},
            "hindsight": {
                "prefill": {
                    "growth": older,
                    "since_s": [1.0],
                    "fleets": dict.fromkeys(("prompt", "patient", "recurring"), fleet),
                }
            },
            "served": {"first": 9.0, "calm": 8.0},
            "trials": {"prefill": {"first": 5.0, "helped": True, "vain": 2}},
            "week": {"place": 4, "came": 3.0, "day": {"told": 1.0, "told_squares": 2.0, "together": 3.0}},
        }
    }
    read = AdaptiveMemory.read(learned_with_present_names(orjson.loads(orjson.dumps(plain))))
    assert read.work.contended_fraction == 0.5
    assert read.of(Role.PREFILL).start_times_s == (7.0,)
    assert read.hindsight[Role.PREFILL].growth is growth
    assert read.hindsight[Role.PREFILL].fleets.keys() == set(Growth)
    assert (read.served.requests, read.served.calm_requests) == (9.0, 8.0)
    trial = read.trials[Role.PREFILL]
    assert (trial.requests, trial.outcome, trial.failed_trials) == (5.0, True, 2)
    assert (read.week.slot, read.week.observed) == (4, 3.0)
    assert (read.week.day.predicted, read.week.day.sum_xx, read.week.day.sum_xy) == (1.0, 2.0, 3.0)
