"""Tiers, rejection, preemption, shedding and a request limit, alone and together: the simulator with the live router's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from worker import KV_BLOCKS, PROFILE
from workload import TIERS

from penstock.api import Role, RouterConfig, Tier
from penstock.core.durations import duration_text
from penstock.engine.serve.settings import PreemptionFlag
from penstock.simulator.jobs import Job, JobOutcome
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario
from penstock.simulator.simulation import Simulation
from penstock.workload.traces import TraceRequest

PROMPT_TOKENS, OUTPUT_TOKENS = 700, 300
RATE: Final = 4.5
"""Requests/s of one worker that count as 1x, chosen: a little more than it serves with all KV blocks in use."""
PARTS: Final = (0.4, 0.3)
"""Premium and standard as parts of `RATE`, whatever the load: inside their shares. The rest is background."""

LOADS: Final = (1, 2, 3, 5)
MODE_WORKERS: Final = 2
"""Workers of the runs of all modes."""
WORKERS: Final = (1, MODE_WORKERS, 4)
"""Workers of the runs with and without rejection."""
REQUEST_LIMIT: Final = 64
"""Chosen: more than the KV blocks hold, so that both limits act."""
PREMIUM_TTFT_S: Final = 0.5
"""The target by which the monitor sheds, chosen: three times the time without load."""

MOST_P99: Final = 1.2
"""Times premium's p99 TTFT without rejection that it may be with it."""
LEAST_TOKENS: Final = 0.97
"""Of the output tokens/s that the lower of tiers alone and rejection alone has."""


@dataclass(frozen=True, slots=True)
class Mode:
    """What is enabled."""

    name: str
    tiers: bool = True
    rejects: bool = True
    sheds: bool = False
    request_limit: int | None = None


MODES: Final = (
    Mode("tiers", rejects=False),
    Mode("rejection", tiers=False),
    Mode("tiers + rejection"),
    Mode("+ shedding", sheds=True),
    Mode("+ shedding + request limit", sheds=True, request_limit=REQUEST_LIMIT),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run.

    Attributes:
        p99_s: TTFT of each tier's served requests, seconds; None: none was served.
        refused: Part of each tier's requests that was rejected, shed or waited too long.
        tokens_per_s: Output tokens of the requests that ended while traffic came.
    """

    p99_s: Mapping[Tier, float | None]
    refused: Mapping[Tier, float]
    tokens_per_s: float


Found = Mapping[tuple[int, int, str], Figures]
"""By workers, load and name of the mode."""


def measure(seconds: float, note: Callable[[str], None], *, workers: tuple[int, ...] = WORKERS) -> Found:
    """Run every mode with `MODE_WORKERS`, and tiers with and without rejection with other numbers of workers."""
    found: dict[tuple[int, int, str], Figures] = {}
    for count in workers:
        for load in LOADS:
            for mode in MODES if count == MODE_WORKERS else MODES[:3]:
                note(f"{mode.name}, {count} workers, {load}x")
                found[count, load, mode.name] = _run(mode, count, load, seconds)
    return found


def _run(mode: Mode, workers: int, load: int, seconds: float) -> Figures:
    slo = {tier.name.lower(): {"ttft": "24h", "endToEnd": "1m"} for tier in TIERS}
    slo["premium"]["ttft"] = duration_text(PREMIUM_TTFT_S)
    section: dict[str, Any] = {
        "admission": {"mode": "token-capacity" if mode.rejects else "none"},
        "tiers": {"enabled": mode.tiers, "slo": slo, "shedding": {"enabled": mode.sheds}},
    }
    model = ProfiledModel(
        PROFILE,
        kv_tokens=KV_BLOCKS * 16,
        block_size=16,
        max_num_batched_tokens=512,
        preemption=PreemptionFlag(),
        request_limit=mode.request_limit,
    )
    pool = PoolSpec(Role.AGGREGATED, workers, model)
    world = Simulation(
        Scenario([pool], RouterConfig.model_validate(section)), _traffic(workers, load, seconds)
    )
    world.run()
    jobs = {tier: [job for job in world.jobs if job.request.tier is tier] for tier in _tiers()}
    ended = [job for job in world.jobs if _is_ok(job) and (job.ended_s or 0.0) <= seconds]
    return Figures(
        {tier: _p99_s(of_tier) for tier, of_tier in jobs.items()},
        {tier: 1 - sum(map(_is_ok, of_tier)) / max(1, len(of_tier)) for tier, of_tier in jobs.items()},
        sum(job.request.output_tokens for job in ended) / seconds,
    )


def _tiers() -> list[Tier]:
    return [Tier[tier.name] for tier in TIERS]


def _is_ok(job: Job) -> bool:
    return job.outcome is JobOutcome.OK


def _p99_s(jobs: list[Job]) -> float | None:
    served = [
        job.first_token_s - job.request.arrival_s
        for job in jobs
        if _is_ok(job) and job.first_token_s is not None
    ]
    return float(np.percentile(served, 99)) if served else None


def _traffic(workers: int, load: int, seconds: float) -> list[TraceRequest]:
    rng = np.random.default_rng(0)
    rate = RATE * workers * load
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds * 1.3) + 100))
    times = times[times < seconds]
    premium, standard = PARTS
    drawn = rng.choice(3, times.size, p=[premium / load, standard / load, 1 - (premium + standard) / load])
    tiers = _tiers()
    return [
        TraceRequest(float(at_s), PROMPT_TOKENS, OUTPUT_TOKENS, None, line, tier=tiers[tier])
        for line, (at_s, tier) in enumerate(zip(times, drawn, strict=True), 1)
    ]


def verdicts(found: Found) -> list[tuple[str, str, bool]]:
    """Return what was asked, what was measured and whether it holds."""
    ratios, kept = [], []
    for both, alone, rejecting in _compared(found):
        ratios.append((both.p99_s[Tier.PREMIUM] or 0.0) / (alone.p99_s[Tier.PREMIUM] or 1.0))
        kept.append(both.tokens_per_s / min(alone.tokens_per_s, rejecting.tokens_per_s))
    return [
        (
            f"premium's p99 TTFT with rejection within {MOST_P99:g}x of that without, at every load and number of workers",
            f"{max(ratios):.2f}x at most",
            max(ratios) <= MOST_P99,
        ),
        (
            f"output tokens/s of both together at least {LEAST_TOKENS:g}x of the lower of either alone",
            f"{min(kept):.2f}x at least",
            min(kept) >= LEAST_TOKENS,
        ),
    ]


def _compared(found: Found) -> Iterator[tuple[Figures, Figures, Figures]]:
    tiers, rejection, both = (mode.name for mode in MODES[:3])
    for workers, load, name in found:
        if name == both:
            yield found[workers, load, both], found[workers, load, tiers], found[workers, load, rejection]


def together_section(found: Found, *, seconds: float) -> list[str]:
    """Return the lines of the page."""
    counts = sorted({workers for workers, _, _ in found})
    lines = [
        "## All of it together",
        "",
        (
            f"Aggregated workers of profile `{PROFILE}` with {KV_BLOCKS} KV blocks of 16 tokens and preemption behind the router's core, "
            f"{seconds:g} s of Poisson arrivals, seed 0: prompts of {PROMPT_TOKENS}, outputs of {OUTPUT_TOKENS} tokens, 1x is {RATE:g} "
            f"requests/s for each worker. Premium asks for {PARTS[0]:.0%} and standard for {PARTS[1]:.0%} of 1x at every load, background "
            f"for the rest. Rejection has the product's thresholds (85% of the KV blocks, 100,000 prompt tokens), shedding a target of "
            f"{PREMIUM_TTFT_S:g} s for premium's p99 TTFT, the request limit is {REQUEST_LIMIT}. Cells of tiers: premium / standard / "
            "background; refused requests were rejected, shed, or waited longer than 60 s. Without tiers all requests are treated alike. "
            "With the request limit, all slots are taken before the first request ends, and premium's p99 comes from those seconds alone."
        ),
        "",
        "| workers | load | | p99 TTFT, s | refused, % | output tokens/s |",
        "|---:|---:|---|---:|---:|---:|",
    ]
    for workers in counts:
        for load in LOADS:
            for mode in MODES:
                figures = found.get((workers, load, mode.name))
                if figures is None:
                    continue
                p99 = " / ".join("-" if each is None else f"{each:.2f}" for each in figures.p99_s.values())
                refused = " / ".join(f"{100 * each:.0f}" for each in figures.refused.values())
                lines.append(
                    f"| {workers} | {load}x | {mode.name} | {p99} | {refused} | {figures.tokens_per_s:.0f} |"
                )
    lines += ["", "**Held to:**", ""]
    lines += [
        f"- {what}: {measured}, {'holds' if holds else 'does not hold'}"
        for what, measured, holds in verdicts(found)
    ]
    return lines
