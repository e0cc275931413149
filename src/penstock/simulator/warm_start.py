"""Simulates a graph on a trace, so that its planner can start with learned state although there is no earlier ledger (decision log)."""

from __future__ import annotations

from dataclasses import replace

from penstock.api import GraphDeployment
from penstock.core.errors import ConfigError
from penstock.simulator.baselines import DEFAULT_PLANNER
from penstock.simulator.plan import SimulateOptions, make_plan
from penstock.simulator.simulation import Simulation
from penstock.simulator.workload import prepare
from penstock.workload.traces import Trace
from penstock_planner.decide.codec import to_plain
from penstock_planner.learnt import LEARNING, LearnedStateExport
from penstock_planner.options import join


def learnt_from_trace(
    graph: GraphDeployment,
    trace: str | Trace,
    *,
    rate_rps: float | None,
    cold_start_s: float,
    limit: int | None,
    profile: str | None = None,
) -> LearnedStateExport:
    """Simulate the graph on a trace, and return the state that its planner has learned, from which a planner on a cluster can start.

    Args:
        graph: Graph whose workers have latency profiles and whose planner's mode learns.
        trace: Trace, or its name or path as for `penstock simulate --trace`.
        rate_rps: Mean rate, requests/s; None keeps the rate of the trace.
        cold_start_s: Simulated seconds from the request for a replica until it serves, > 0.
        limit: Maximum number of requests; None uses all.
        profile: Latency profile of all workers, by name or path; None uses the profile that the graph names.

    Raises:
        ConfigError: the planner's mode does not learn, or the trace ended before the first decision.
    """
    options = join(given={}, graph=graph)
    if options.mode not in LEARNING:
        raise ConfigError(
            f"--manifest: planner.mode {options.mode} does not learn; choose mode {' or '.join(LEARNING)}"
        )
    rates = () if rate_rps is None else (rate_rps,)
    name, given = (trace.name, trace) if isinstance(trace, Trace) else (trace, None)
    chosen = SimulateOptions(
        trace=name,
        profile=profile,
        policy=graph.spec.router.policy,
        planners=(DEFAULT_PLANNER,),
        rate_rps=rates,
        cold_start_s=cold_start_s,
        limit=limit,
    )
    spec = make_plan(chosen, graph=graph, trace=given).runs[0]
    planner = spec.scenario.planner
    assert planner is not None  # noqa: S101 - as asked for
    scenario = replace(spec.scenario, planner=replace(planner, no_operation=False))
    simulation = Simulation(scenario, prepare(spec.workload, seed=spec.seed, qps=spec.qps).requests)
    recording = simulation.run()
    assert simulation.control is not None  # noqa: S101 - as asked for
    memory = simulation.control.planner.learnt(recording.end_s)
    if "adaptive" not in memory:
        raise ConfigError(f"--trace {name}: over before the first decision; give a longer one")
    return LearnedStateExport(
        model=options.served_model_name,
        profile="" if planner.performance is None else planner.performance.model,
        gpus={each.role: planner.engine_gpus(each.role, each.gpus) for each in graph.spec.workers.values()},
        memory=to_plain(memory),
    )
