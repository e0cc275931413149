"""The policies by mode: one registry for the planner, replay and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.planner.decide.adaptive.policy import adaptive
from penstock.planner.decide.baselines.dynamo import dynamo_load
from penstock.planner.decide.baselines.dynamo_throughput import dynamo_throughput
from penstock.planner.decide.baselines.hpa import hpa
from penstock.planner.decide.baselines.keda import keda
from penstock.planner.decide.baselines.kpa import kpa
from penstock.planner.decide.baselines.oracle import oracle
from penstock.planner.decide.baselines.static import static
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.load import load
from penstock.planner.decide.observation import Window
from penstock.planner.decide.proposal import Proposal
from penstock.planner.decide.sla.policy import sla
from penstock.planner.decide.state import PlannerState

Policy = Callable[[Window, PlannerState, DecideConfig], Proposal]
"""A pure function. The window holds one pull at least; replica counts are taken from the newest. What it asks
for passes through the same bounds, budget and rebalancing whatever the policy."""

POLICIES: Mapping[Mode, Policy] = {
    Mode.LOAD: load,
    Mode.ADAPTIVE: adaptive,
    Mode.SLA: sla,
    Mode.HPA: hpa,
    Mode.KEDA: keda,
    Mode.KPA: kpa,
    Mode.DYNAMO_LOAD: dynamo_load,
    Mode.DYNAMO_THROUGHPUT: dynamo_throughput,
    Mode.STATIC: static,
    Mode.ORACLE: oracle,
    Mode.ORACLE_ONE_STEP: oracle,
}
"""One of every mode."""
