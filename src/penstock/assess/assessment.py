"""Joins the parts of an assessment: window, traces, engine, calibration, fleets, recommendation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from penstock.api import SloConfig
from penstock.assess.calibration import Calibration, calibrate, simulated_speeds
from penstock.assess.engine_fit import EngineFit, Runs, Speeds, nearest, observed_speeds, refined
from penstock.assess.fleets import (
    Fleet,
    FleetKind,
    KnownRuns,
    Setting,
    compare_fleets,
    recorded,
    run_own,
)
from penstock.assess.from_trace import with_prefixes, within
from penstock.assess.load import make_trace
from penstock.assess.manifest import GraphPlan
from penstock.assess.observed import COLD_START_S, Observed, busiest_window, filled, telling_windows
from penstock.assess.proposal import proposed
from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.simulator.baselines import hardware_of
from penstock.simulator.observer import Recording
from penstock.simulator.plan import DEFAULT_PROFILE
from penstock.simulator.sweep import simulate
from penstock.simulator.warm_start import learnt_from_trace
from penstock.workload.traces import Trace
from penstock_planner.learnt import as_json as learnt_json

FIRST_REQUESTS: Final = 700
"""Requests of each window with which each known profile is simulated. Chosen: a second of processor time for each."""
FIT_REQUESTS: Final = 2000
"""Requests of each window with which the nearest profile is scaled. Chosen: means are then within a few percent."""

LEAST_SAVING: Final = 0.01
"""Fraction of the GPU-hours below which nothing is saved. Chosen: two runs of one fleet differ by as much."""

OTHERS: Final = frozenset({FleetKind.HPA, FleetKind.HPA_TUNED, FleetKind.KEDA})
"""Autoscalers of others: the cheapest is named in the sentence if it reaches the target for less than Penstock."""


@dataclass(frozen=True, slots=True)
class AssessOptions:
    """What an assessment is of.

    Attributes:
        gpus: Of one replica.
        profile: The engine's latency profile; None: the nearest one, scaled.
        max_gpus: Ceiling of the scaled fleets; None: twice the most that ran.
        max_requests: Requests that one fleet is simulated with.
        seeds: Traces drawn, and runs of each fleet.
        gpu_price: Of a GPU-hour, in any currency; None: no price is shown.
    """

    slo: SloConfig
    gpus: int = 1
    profile: str | None = None
    cold_start_s: float = COLD_START_S
    max_gpus: int | None = None
    max_requests: int = 20_000
    seeds: int = 3
    with_oracle: bool = False
    gpu_price: float | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to run; None where nothing is recommended."""

    fleet: Fleet | None
    plan: GraphPlan | None
    sentence: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assessment:
    """Everything that came of it.

    Attributes:
        observed: All that was read.
        window: What was simulated of it.
        calibration: None: of a trace, alongside which nothing was observed.
        trace: Of the first seed.
        profile: Of the simulated engines, by name or path.
        ran_run: First run of the fleet that ran; None: its latencies were not observed, and it was not kept.
        recommended_run: First run of the recommended graph; None: nothing is recommended.
        memory: What the recommended planner would have learnt of the load, as JSON; None: nothing is recommended.
    """

    observed: Observed
    window: Observed
    options: AssessOptions
    fit: EngineFit
    profile: str
    trace: Trace
    calibration: Calibration | None
    fleets: tuple[Fleet, ...]
    recommendation: Recommendation
    memory: bytes | None = None
    ran_run: Recording | None = None
    recommended_run: Recording | None = None


Say = Callable[[str], None]
"""Called with what is done next."""


def assess(
    observed: Observed, options: AssessOptions, folder: Path, *, say: Say, trace: Trace | None = None
) -> Assessment:
    """Assess an observed fleet.

    Args:
        observed: All of it; as `reading.read_history` returns it; of a trace as `observed_of_trace` does.
        options: What is compared, and by what targets.
        folder: Exists; a scaled profile is written there.
        say: Progress.
        trace: Of a file, in place of Prometheus: it is the load, with one seed, and where it has no latencies nothing is
            calibrated.
    """
    window = observed.cut(*busiest_window(observed, options.max_requests))
    fit = EngineFit(options.profile or DEFAULT_PROFILE, kv_tokens=observed.kv_tokens)
    say("making the load")
    if trace is not None:
        trace, options = with_prefixes(trace), replace(options, seeds=1)
    has_latencies = observed.ttft is not None or observed.gaps is not None

    def load(part: Observed, seed: int = 0) -> Trace:
        return make_trace(part, seed=seed) if trace is None else within(trace, observed, part)

    traces = tuple(load(window, seed) for seed in range(options.seeds))
    if options.profile is None and (trace is None or has_latencies):
        fit = fitted_engine(observed, options, folder, say, load)
    profile = fit.written_to(folder)
    setting = setting_of(window, traces, profile, options)
    calibration: Calibration | None = None
    ran_run: Recording | None = None
    own_run: Recording | None = None
    done: KnownRuns = {}
    if trace is None or has_latencies:
        say("simulating the fleet that ran")
        first = setting.ran()[0]
        ran_run, _, done[first.label, first.seed] = simulate(first)
        calibration = calibrate(window, ran_run, options.slo)
    fleets = compare_fleets(
        setting,
        processes=options.processes,
        with_oracle=options.with_oracle,
        on_fleet=lambda name: say(f"simulating {name}"),
        done=done,
    )
    recommendation = recommend(fleets, calibration, options)
    if recommendation.plan is not None:
        say("setting bounds")
        plan = _proposed(recommendation.plan, observed, setting)
        bounded, own_run = run_own(setting, plan, processes=options.processes)
        fleets.append(bounded)
        recommendation = recommend(fleets, calibration, options, bounded=bounded)
    return Assessment(
        observed,
        window,
        options,
        fit,
        profile,
        traces[0],
        calibration,
        tuple(fleets),
        recommendation,
        _memory(recommendation, setting, say),
        ran_run,
        own_run,
    )


def _proposed(plan: GraphPlan, observed: Observed, setting: Setting) -> GraphPlan:
    """Return a graph with bounds from a simulation of it with the first seed."""
    spec = setting.own(plan)[0]
    return proposed(
        plan,
        observed,
        recorded(spec).samples,
        rates=np.nan_to_num(setting.observed.arrivals, nan=0.0) / setting.observed.step_s,
        step_s=setting.observed.step_s,
        cold_start_s=setting.cold_start_s,
        prefill_tokens_per_s=hardware_of(spec.scenario.pools).get("prefill_tokens_per_s"),
    )


def _memory(recommendation: Recommendation, setting: Setting, say: Say) -> bytes | None:
    """Return what the recommended planner learns of the load; None without a recommendation."""
    if recommendation.plan is None:
        return None
    say("letting the planner learn the load")
    known = learnt_from_trace(
        recommendation.plan.graph(),
        setting.traces[0],
        rate_rps=None,
        cold_start_s=setting.cold_start_s,
        limit=None,
        profile=setting.profile,
    )
    return learnt_json(known)


def setting_of(window: Observed, traces: tuple[Trace, ...], profile: str, options: AssessOptions) -> Setting:
    """Return what every simulated fleet shares.

    Args:
        window: Simulated part of the history.
        traces: Loads made of it, one for each seed.
        profile: Latency profile, by name or path.
        options: What is compared.

    Raises:
        ConfigError: the ceiling is below the GPUs of one replica.
    """
    most = max(1, round(float(filled(window.replicas).max()))) * options.gpus
    max_gpus = 2 * most if options.max_gpus is None else options.max_gpus
    if max_gpus < options.gpus:
        raise ConfigError(
            f"--max-gpus: {max_gpus} is below the {options.gpus} GPUs of one replica (--gpus-per-replica)"
        )
    return Setting(window, traces, profile, options.slo, options.gpus, options.cold_start_s, max_gpus)


def fitted_engine(
    observed: Observed, options: AssessOptions, folder: Path, say: Say, load: Callable[[Observed], Trace]
) -> EngineFit:
    """Return the nearest profile, scaled until the simulated fleet that ran is as fast as the observed one."""

    def prepared(most_requests: int) -> tuple[list[Speeds], Runs]:
        parts = [observed.cut(*window) for window in telling_windows(observed, most_requests)]
        traces = [load(part) for part in parts]

        def speeds(fit: EngineFit) -> list[Speeds]:
            say(f"looking for the engine's speed: {fit.name}")
            profile = fit.written_to(folder)
            return [
                simulated_speeds(part, recorded(setting_of(part, (trace,), profile, options).ran()[0]))
                for part, trace in zip(parts, traces, strict=True)
            ]

        return [observed_speeds(part) for part in parts], speeds

    known = [EngineFit(name, kv_tokens=observed.kv_tokens) for name in profiles.names()]
    return refined(nearest(known, *prepared(FIRST_REQUESTS)), *prepared(FIT_REQUESTS))


def recommend(
    fleets: list[Fleet],
    calibration: Calibration | None,
    options: AssessOptions,
    *,
    bounded: Fleet | None = None,
) -> Recommendation:
    """Return Penstock's cheapest fleet that serves as the fleet that ran or as the target asks, or why there is none.

    ``bounded`` is that fleet with floors, ceilings and a schedule, one of ``fleets``: it is recommended where it serves as well.
    """
    reasons = () if calibration is None else calibration.refusals
    if reasons:
        return Recommendation(
            None, None, "No recommendation: the model is too far from what was served.", reasons
        )
    ran = next(each for each in fleets if each.kind is FleetKind.RAN)
    needed = min(options.slo.attainment, ran.in_time.mean)
    own = [each for each in fleets if each.kind is FleetKind.PENSTOCK]
    good = [each for each in own if each.in_time.mean >= needed]
    if not good:
        best = max(own, key=lambda each: each.in_time.mean)
        return Recommendation(
            None,
            None,
            f"Penstock would not have helped: at best {best.in_time.mean:.1%} in time, the fleet that ran served"
            f" {ran.in_time.mean:.1%}.",
        )
    best = bounded if bounded in good else min(good, key=lambda each: each.gpu_hours.mean)
    saved = 1 - best.gpu_hours.mean / ran.gpu_hours.mean if ran.gpu_hours.mean else 0.0
    is_useless = saved < LEAST_SAVING and best.in_time.mean <= ran.in_time.mean + 0.005
    if is_useless:
        gain = "Penstock would not have saved anything"
    elif saved >= LEAST_SAVING:
        gain = f"Penstock would have saved {saved:.0%} of the GPU-hours"
    else:
        cost = f"{-saved:.0%} more GPU-hours" if saved <= -LEAST_SAVING else "as many GPU-hours"
        gain = f"Penstock would have served more in time, for {cost}"
    sentence = f"{gain}. {_served(best)}; {_served(ran)}"
    fixed = next(
        (each for each in fleets if each.kind is FleetKind.FIXED and each.in_time.mean >= needed), None
    )
    if fixed is not None:
        sentence += f"; {_served(fixed)}"
    scaled = [each for each in fleets if each.kind in OTHERS and each.in_time.mean >= needed]
    cheapest = min(scaled, key=lambda each: each.gpu_hours.mean, default=None)
    if cheapest is not None and cheapest.gpu_hours.mean < best.gpu_hours.mean:
        sentence += f"; {_served(cheapest)}"
    if options.gpu_price is not None:
        money = (ran.gpu_hours.mean - best.gpu_hours.mean) * options.gpu_price
        sentence += f"; saved by Penstock: {money:,.2f}"
    if is_useless:
        return Recommendation(None, None, f"{sentence}.")
    return Recommendation(best, best.plan, f"{sentence}.")


def _served(fleet: Fleet) -> str:
    """Return a fleet's name with what it served and used."""
    hours = fleet.gpu_hours.mean
    return (
        f"{fleet.name}: {fleet.in_time.mean:.1%} in time with {hours:,.{2 if hours < 10 else 1}f} GPU-hours"
    )
