"""The policies by mode: one registry for the planner, replay and the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock_planner.decide.adaptive.policy import adaptive
from penstock_planner.decide.baselines.dynamo import dynamo_load
from penstock_planner.decide.baselines.dynamo_throughput import dynamo_throughput
from penstock_planner.decide.baselines.hpa import hpa
from penstock_planner.decide.baselines.keda import keda
from penstock_planner.decide.baselines.kpa import kpa
from penstock_planner.decide.baselines.oracle import oracle
from penstock_planner.decide.baselines.static import static
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.load import load
from penstock_planner.decide.observation import Window
from penstock_planner.decide.proposal import Proposal
from penstock_planner.decide.sla.policy import sla
from penstock_planner.decide.state import PlannerState

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
