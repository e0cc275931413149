"""What a graph's planner would have learnt from a trace: a start without an earlier ledger. One run in virtual time."""

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
from penstock_planner.learnt import LEARNING, Learnt
from penstock_planner.options import join


def learnt_from_trace(
    graph: GraphDeployment,
    trace: str | Trace,
    *,
    rate_rps: float | None,
    cold_start_s: float,
    limit: int | None,
    profile: str | None = None,
) -> Learnt:
    """Return what the graph's planner knows after it has served a trace.

    Args:
        graph: With its workers' latency profiles; its planner's mode learns.
        trace: As of `penstock simulate --trace`, or the trace itself.
        rate_rps: Mean rate, requests/s; None: the trace's.
        cold_start_s: From asking for a replica until it serves, seconds, > 0.
        limit: Most requests; None: all.
        profile: Latency profile of all workers, by name or path; None: the graph's.

    Raises:
        ConfigError: the mode learns nothing, or nothing was learnt.
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
    return Learnt(
        model=options.served_model_name,
        profile="" if planner.performance is None else planner.performance.model,
        gpus={each.role: planner.engine_gpus(each.role, each.gpus) for each in graph.spec.workers.values()},
        memory=to_plain(memory),
    )
