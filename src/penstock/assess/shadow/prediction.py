"""Simulates the watched load on the shadow fleet: what would have been served, as a prediction whose error is known.

The engine is the one of `penstock assess`: the nearest latency profile, fitted to what Prometheus observed. The watched fleet is
simulated as well and compared with what it served, so that a reader sees by how much the simulation is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.api import Role
from penstock.assess.assessment import AssessOptions, fitted_engine, setting_of
from penstock.assess.calibration import Calibration, calibrate
from penstock.assess.engine_fit import EngineFit
from penstock.assess.fleets import recorded
from penstock.assess.history import QUERY_TIMEOUT_S, PrometheusHistory
from penstock.assess.load import make_trace
from penstock.assess.observed import Floats, Observed, busiest_window
from penstock.assess.reading import MINUTE_S, Subject, read_history
from penstock.assess.shadow.comparison import Held, ShadowHistory
from penstock.core.errors import ObservationError
from penstock.simulator.observer import Recording
from penstock_planner.sources.prometheus import connect

_FLEET_STEPS = 4
"""Times at which replicas are taken within a step of the load. Chosen: as `penstock assess`, a quarter of a minute."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The watched load on both fleets.

    Attributes:
        window: Simulated part of the history, in simulated seconds.
        fit: Engine that was simulated.
        watched: Comparison of the watched fleet's simulation with what it served.
        shadow: The same of the shadow fleet: its ``simulated`` values are the prediction.
        shadow_run: Simulated run of the shadow fleet.
        requests: Number of simulated requests.
    """

    window: Observed
    fit: EngineFit
    watched: Calibration
    shadow: Calibration
    shadow_run: Recording
    requests: int

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return why the prediction cannot be trusted, one sentence each; empty: the simulation is close enough."""
        return self.watched.refusals


def observed_history(found: ShadowHistory, *, say: Callable[[str], None] = lambda _text: None) -> Observed:
    """Return what Prometheus has of the watched fleet, in simulated seconds, with the replicas that the ledger recorded.

    Args:
        found: The shadow planner's history, of aggregated workers.
        say: Receives progress.

    Raises:
        ConfigError: the server knows no such model.
        ObservationError: the server does not answer, or has too little of the time.
    """
    record = found.record
    client = connect(
        record.prometheus, record.credentials, timeout_s=QUERY_TIMEOUT_S, setting="the ledger's server"
    )
    history = PrometheusHistory(
        client,
        on_query=lambda count: say(f"reading Prometheus, query {count}"),
        setting="the ledger's server",
    )
    subject = Subject(record.model, record.matchers, setting="the ledger's model")
    # A sample of the last step may not have been scraped yet.
    end_s = min(found.end_s, time.time() - record.scrape_s)
    observed = read_history(
        history, subject, end_s=end_s, since_s=end_s - found.start_s, step_s=MINUTE_S / found.speed
    )
    if observed.steps < 2:
        raise ObservationError(
            "prometheus: has less than two minutes of the time; let the planner run longer"
        )
    step_s = observed.step_s * found.speed
    at_speed = replace(
        observed,
        step_s=step_s,
        replica_step_s=step_s / _FLEET_STEPS,
        fine_step_s=observed.fine_step_s * found.speed,
    )
    return replace(at_speed, replicas=_replicas(at_speed, found, found.watched[Role.AGGREGATED]))


def _replicas(observed: Observed, found: ShadowHistory, held: Held) -> Floats:
    """Return a fleet's ready replicas by the history's replica steps."""
    first_s = (observed.start_s - found.start_s) * found.speed
    count = observed.steps * _FLEET_STEPS
    times_s = first_s + np.arange(1, count + 1, dtype=np.float64) * observed.replica_step_s
    return held.at(times_s.astype(np.float64))


def predict(
    found: ShadowHistory,
    observed: Observed,
    options: AssessOptions,
    folder: Path,
    *,
    say: Callable[[str], None] = lambda _text: None,
) -> Prediction:
    """Return what would have been served under the shadow fleet.

    Args:
        found: The shadow planner's history.
        observed: What Prometheus has of it, as `observed_history` returns it.
        options: Targets, GPUs of a replica, and the profile if it is known.
        folder: Exists; a scaled profile is written there.
        say: Receives progress.
    """
    shadow_replicas = _replicas(observed, found, found.shadow[Role.AGGREGATED])
    busiest = busiest_window(observed, options.max_requests)
    window = observed.cut(*busiest)
    own = replace(observed, replicas=shadow_replicas).cut(*busiest)
    say("making the load")
    trace = make_trace(window, seed=0)
    fit = EngineFit(options.profile, kv_tokens=observed.kv_tokens) if options.profile else None
    if fit is None:
        fit = fitted_engine(observed, options, folder, say, lambda part: make_trace(part, seed=0))
    profile = fit.written_to(folder)
    runs = []
    for name, part in (("the watched fleet", window), ("the shadow fleet", own)):
        say(f"simulating {name}")
        runs.append(recorded(setting_of(part, (trace,), profile, options).ran()[0]))
    return Prediction(
        window,
        fit,
        calibrate(window, runs[0], options.slo),
        calibrate(window, runs[1], options.slo),
        runs[1],
        len(trace.requests),
    )
