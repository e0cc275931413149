"""The table of rules: the same names in code, records and documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.api import Role
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.decision import Reason
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.decide.pipeline import RULES, decide
from penstock_planner.decide.state import PlannerState

PAGE = Path(__file__).parents[3] / "docs/planner.md"
D, P = Role.DECODE, Role.PREFILL


def _documented():
    section = PAGE.read_text().split("## Rules of every mode\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [tuple(tuple(re.findall(r"`(\w+)`", cell)) for cell in row) for row in rows]


def test_the_documentation_lists_the_rules_in_their_order_with_their_reasons():
    """A rule that is added, moved or renamed has its row."""
    code = [((rule.name,), tuple(reason.value for reason in rule.reasons)) for rule in RULES]
    assert _documented() == code


@pytest.mark.parametrize(
    ("config", "kv", "rule", "reason"),
    [
        (DecideConfig(mode=Mode.LOAD), 0.95, "thresholds", Reason.ABOVE_THRESHOLD),
        (DecideConfig(mode=Mode.LOAD, max_gpu_budget=4), 0.95, "gpu_budget", Reason.GPU_BUDGET),
        (
            DecideConfig(mode=Mode.LOAD, max_replicas={D: 2}),
            0.95,
            "max_replicas",
            Reason.AT_MAX_REPLICAS,
        ),
        (DecideConfig(mode=Mode.LOAD, external=(D,)), 0.95, "owner", Reason.SCALED_BY_OTHER),
        (DecideConfig(mode=Mode.LOAD), 0.7, "", Reason.WITHIN_THRESHOLDS),
    ],
)
def test_a_decision_names_the_rule_that_decided_by_its_step(make, config, kv, rule, reason):
    """The name is that of a step in the record; it is empty where no rule asked for anything."""
    pool = PoolCounts(2, gpus=1)
    window = make.steady(kv=[kv] * 2, queue=0.3, prefill=pool, decode=pool)
    decision, _ = decide(window, PlannerState(), config)
    decode = next(each for each in decision.roles if each.role is D)
    assert (decode.rule, decode.reason) == (rule, reason)
    assert not rule or rule in {step.name for step in decode.steps}
