"""Samples a simulation at regular times, and collects the data of a finished run for its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.api import Role
from penstock.simulator.fleet import State
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.planning import DecisionSummary
from penstock.simulator.state import SimulationState
from penstock_planner.decide.decision import Action
from penstock_planner.served_shares import ShareWindow, share_windows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Requests:
    """Arrays over the jobs (requests) of a run, in order of arrival.

    Times are simulated seconds. A duration is NaN if the job did not end OK or did not reach that stage.

    Attributes:
        arrival_s: Arrival time, seconds from the start of the simulation.
        ttft_s: Time to first token, seconds.
        e2e_s: Time from arrival to the last token, seconds.
        wait_s: Time in the router's queue, from arrival to dispatch, seconds.
        prompt_tokens, output_tokens: Length of prompt and output, as requested.
        cached_tokens: Prompt tokens found in the worker's cache.
        is_ok, is_rejected: Whether the job was served, and whether it was rejected; a job for which both are False failed.
        is_continued: Whether its stream was continued on another worker at least once.
    """

    arrival_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    wait_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    is_ok: NDArray[np.bool_]
    is_rejected: NDArray[np.bool_]
    is_continued: NDArray[np.bool_]

    @property
    def tpot_s(self) -> Floats:
        """Mean time per output token after the first, in simulated seconds, for each request; NaN if its output has only one token."""
        outputs = self.output_tokens
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(outputs > 1, (self.e2e_s - self.ttft_s) / (outputs - 1), np.nan)


@dataclass(frozen=True, slots=True)
class RunSample:
    """State of the simulation at one moment.

    Attributes:
        at_s: Time of the sample, simulated seconds.
        pending_tokens: Prompt tokens still to be computed, for each ready prefill (or aggregated) worker in order of joining; tokens of
            requests that wait in the router's queue for that worker are included.
        replicas: Numbers of (ready, starting, draining) replicas by role.
        gpus: Number of GPUs that workers hold on nodes.
    """

    at_s: float
    pending_tokens: tuple[int, ...]
    replicas: dict[Role, tuple[int, int, int]]
    gpus: int

    @property
    def imbalance(self) -> float | None:
        """Coefficient of variation, over the workers, of the prompt tokens still to be computed; None if no worker has any."""
        pending = np.array(self.pending_tokens, dtype=np.float64)
        if not pending.size or pending.mean() == 0:
            return None
        return float(pending.std() / pending.mean())


@dataclass(frozen=True, slots=True)
class SimulatedChange:
    """A replica change of one role that the planner decided on.

    Attributes:
        at_s: Time of the decision, simulated seconds.
        role: Role that is scaled.
        current: Number of replicas before the change.
        desired: Number of replicas requested.
        sentence: The planner's explanation.
    """

    at_s: float
    role: Role
    current: int
    desired: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that was recorded of a finished run.

    Attributes:
        requests: Times and outcome of every request.
        samples: Periodic samples in order of time.
        end_s: Time at which the last request ended, simulated seconds from the start.
        events: Number of events simulated.
        computed_tokens: Prompt tokens computed by each prefill (or aggregated) worker that still exists at the end, by name.
        itl_s: Percentiles (``p50``, ``p90``, ``p99``) of the gaps between tokens, seconds; None if there were no gaps.
        changes: The planner's replica changes.
        decisions: Number of decisions that the planner took, those without a change included.
        refused_joins: Number of workers that the GPU budget refused.
        gpu_s: GPU-seconds that workers held on nodes.
        share_windows: Fraction of requests on time in each window of ten minutes, observed and as predicted by the latency model of the
            planner; empty if the planner predicts no fractions.
    """

    requests: Requests
    samples: tuple[RunSample, ...]
    end_s: float
    events: int
    computed_tokens: dict[str, int]
    itl_s: dict[str, float | None]
    changes: tuple[SimulatedChange, ...]
    decisions: int
    refused_joins: int
    gpu_s: float
    share_windows: tuple[ShareWindow, ...] = ()


def sample(state: SimulationState) -> RunSample:
    """Return a sample of the simulation's current state: prompt tokens still to be computed, replicas by role, and GPUs held."""
    fleet = state.fleet
    replicas = {}
    for pool in state.scenario.pools:
        counts = fleet.counts(pool.role)
        replicas[pool.role] = (counts.ready, counts.starting, counts.draining)
    return RunSample(
        state.kernel.now_s,
        tuple(
            worker.pending_tokens + state.queued_tokens(worker)
            for worker in fleet.of(state.scenario.entry_role, State.READY)
        ),
        replicas,
        fleet.placed_gpus,
    )


def recorded(state: SimulationState, samples: Sequence[RunSample], taken: DecisionSummary) -> Recording:
    """Return everything that was recorded of a run that has ended: requests, samples, decisions and GPU-seconds.

    Args:
        state: State of the run.
        samples: Its periodic samples.
        taken: What was stored of the planner's decisions; an empty `DecisionSummary` if there was no planner.
    """
    end_s = max((job.ended_s for job in state.jobs if job.ended_s is not None), default=0.0)
    return Recording(
        requests=_requests(state.jobs),
        samples=tuple(samples),
        end_s=end_s,
        events=state.kernel.events,
        computed_tokens={
            worker.name: worker.computed_tokens
            for worker in state.fleet
            if worker.role is state.scenario.entry_role
        },
        itl_s={name: state.gaps.percentile(share) for name, share in _RANKS},
        changes=tuple(
            SimulatedChange(decision.at_s, role.role, role.current, role.desired, role.sentence)
            for decision in taken.changed
            for role in decision.roles
            if role.action is not Action.HOLD
        ),
        decisions=taken.count,
        refused_joins=state.fleet.refused,
        gpu_s=_gpu_seconds(samples, end_s),
        share_windows=share_windows(taken.shares),
    )


_RANKS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def _gpu_seconds(samples: Sequence[RunSample], end_s: float) -> float:
    times = [*(sample.at_s for sample in samples), end_s]
    return sum(
        sample.gpus * max(0.0, min(times[index + 1], end_s) - sample.at_s)
        for index, sample in enumerate(samples)
    )


def _requests(jobs: Sequence[Job]) -> Requests:
    nan = float("nan")

    def since(job: Job, at_s: float | None) -> float:
        return nan if at_s is None or job.outcome is not JobOutcome.OK else at_s - job.request.arrival_s

    return Requests(
        arrival_s=np.array([job.request.arrival_s for job in jobs], dtype=np.float64),
        ttft_s=np.array([since(job, job.first_token_s) for job in jobs], dtype=np.float64),
        e2e_s=np.array([since(job, job.ended_s) for job in jobs], dtype=np.float64),
        wait_s=np.array([since(job, job.dispatched_s) for job in jobs], dtype=np.float64),
        prompt_tokens=np.array([job.request.input_tokens for job in jobs], dtype=np.float64),
        output_tokens=np.array([job.request.output_tokens for job in jobs], dtype=np.float64),
        cached_tokens=np.array(
            [min(job.cached_tokens, job.request.input_tokens) for job in jobs], dtype=np.float64
        ),
        is_ok=np.array([job.outcome is JobOutcome.OK for job in jobs], dtype=bool),
        is_rejected=np.array([job.outcome is JobOutcome.REJECTED for job in jobs], dtype=bool),
        is_continued=np.array([job.continuations > 0 for job in jobs], dtype=bool),
    )
