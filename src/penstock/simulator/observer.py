"""Samples a run periodically, and keeps the data for its final evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.api import Role
from penstock.simulator.fleet import State
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.planning import TakenDecisions
from penstock.simulator.state import SimulationState
from penstock_planner.decide.decision import Action
from penstock_planner.served_shares import ShareWindow, share_windows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Requests:
    """Arrays over the jobs in order of arrival; NaN where something never happened. ``wait_s`` is in the router."""

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
        """Mean seconds between a job's tokens after its first; NaN of one token."""
        outputs = self.output_tokens
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(outputs > 1, (self.e2e_s - self.ttft_s) / (outputs - 1), np.nan)


@dataclass(frozen=True, slots=True)
class RunSample:
    """The simulation at one moment.

    Attributes:
        pending_tokens: Prompt tokens to compute, by ready entry worker in order of joining; those that wait
            for one worker in the router included.
        replicas: (ready, starting, draining) by role.
        gpus: Held on nodes.
    """

    at_s: float
    pending_tokens: tuple[int, ...]
    replicas: dict[Role, tuple[int, int, int]]
    gpus: int

    @property
    def imbalance(self) -> float | None:
        """Coefficient of variation of the pending tokens; None while nothing is pending anywhere."""
        pending = np.array(self.pending_tokens, dtype=np.float64)
        if not pending.size or pending.mean() == 0:
            return None
        return float(pending.std() / pending.mean())


@dataclass(frozen=True, slots=True)
class SimulatedChange:
    """A change that the planner decided on."""

    at_s: float
    role: Role
    current: int
    desired: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A run in full.

    Attributes:
        end_s: When the last job ended, virtual seconds.
        computed_tokens: Prompt tokens computed by each entry worker that is left, by name.
        itl_s: Percentiles of inter-token gaps, by name; None without gaps.
        decisions: How many the planner took, holds included.
        refused_joins: That the GPU budget did not allow.
        gpu_s: GPU-seconds held.
        share_windows: Shares in time by ten minutes, served and as the planner's model predicts them; none where it predicts none.
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
    """Look now."""
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


def recorded(state: SimulationState, samples: Sequence[RunSample], taken: TakenDecisions) -> Recording:
    """Return everything of a run that has ended; ``taken`` are the planner's decisions, none without one."""
    end_s = max((job.ended_s for job in state.jobs if job.ended_s is not None), default=0.0)
    return Recording(
        requests=_requests(state.jobs),
        samples=tuple(samples),
        end_s=end_s,
        events=state.kernel.events,
        computed_tokens={
            worker.name: worker.busy_tokens
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
        wait_s=np.array([since(job, job.handed_s) for job in jobs], dtype=np.float64),
        prompt_tokens=np.array([job.request.input_tokens for job in jobs], dtype=np.float64),
        output_tokens=np.array([job.request.output_tokens for job in jobs], dtype=np.float64),
        cached_tokens=np.array(
            [min(job.cached_tokens, job.request.input_tokens) for job in jobs], dtype=np.float64
        ),
        is_ok=np.array([job.outcome is JobOutcome.OK for job in jobs], dtype=bool),
        is_rejected=np.array([job.outcome is JobOutcome.REJECTED for job in jobs], dtype=bool),
        is_continued=np.array([job.continuations > 0 for job in jobs], dtype=bool),
    )
