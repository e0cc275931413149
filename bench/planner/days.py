"""Loads of hours to a week, written by one who does not tune: nights, bursts that seldom come, drift, slow and failing starts.

They run where they are named, or all by ``--workloads days``; figures are printed; TRIED.md has those of one run, RESULTS.md none.

A week is 604,800 s: 140 s of processor time with mode adaptive, 58 s with an HPA. A request costs a simulation some milliseconds, an hour of an idle fleet 1,800 decisions. So
requests are coarse (14,000 tokens on a 14-billion model: 0.02/s to 0.4/s fill the same GPUs as ten times as many short ones), pulls are
5 s apart and samples 10 s in loads of a day and more, for every policy alike, and 1 s and 1 s in loads of hours.
"""

from __future__ import annotations

from dataclasses import replace

from workloads import A100_14B, Case

from penstock.simulator.scenario import Faults
from penstock.simulator.workload import WorkloadSpec

KIND = "days"
HOUR_S = 3600
DAY_S = 24 * HOUR_S

_LONG = "input_tokens=14000,output_tokens=300,length_cv=0.3,max_tokens=24000"
_CHAT = "input_tokens=8000,output_tokens=300,max_tokens=24000"

BURST = f"step:rate=0.00056,peak=1800,step_s=3600,step_length_s=720,{_LONG}"
"""A request each half hour, and 1/s for 12 minutes in the second hour."""


SWITCHABLE = ("drifting-prompts", "agents-and-chat", "alternating-tenants", "rag-and-essays")
"""Loads whose shape changes, which are also run with workers that can be of either role."""


def days() -> list[Case]:
    """Return every case."""
    fixed = [*_bursts(), *_hours(), *_starts(), *_weeks(), *_shapes()]
    return [*fixed, *(_switchable(case) for case in fixed if case.name in SWITCHABLE)]


def _switchable(case: Case) -> Case:
    about = f"{case.about}; workers can switch roles"
    return replace(case, name=f"{case.name}-switchable", about=about, switches_roles=True)


def _case(name: str, about: str, source: str, **options: object) -> Case:
    case = Case(name, about, WorkloadSpec(source), kind=KIND, seeds=1, profile=A100_14B, **options)  # type: ignore[arg-type]  # as the caller says
    return replace(case, itl_slo_s=0.05)


def _coarse(name: str, about: str, source: str, **options: object) -> Case:
    return replace(_case(name, about, source, **options), pull_s=5.0, sample_s=10.0)


def _bursts() -> list[Case]:
    """Return the cases that ask for nothing most of the time: GPUs have to be let go."""
    return [
        _case(
            "burst-then-night", "12 minutes at 1/s, then 11 h of silence", f"{BURST},duration_s={12 * HOUR_S}"
        ),
        _coarse(
            "burst-then-weekend",
            "12 minutes at 1/s, then 59 h of silence",
            f"{BURST},duration_s={60 * HOUR_S}",
        ),
        _coarse(
            "burst-a-day",
            "12 minutes at 1/s, four days at the same time",
            f"{BURST},every_s={DAY_S},duration_s={4 * DAY_S}",
        ),
        _coarse(
            "burst-a-week",
            "12 minutes at 1/s, twice, a week apart",
            f"{BURST},every_s={7 * DAY_S},duration_s={7 * DAY_S + 6 * HOUR_S}",
        ),
    ]


def _hours() -> list[Case]:
    return [
        _case(
            "sawtooth-47-min",
            "0.1/s to 0.8/s in 47 minutes, then back at once",
            f"sawtooth:rate=0.1,peak=8,period_s=2820,duration_s={6 * HOUR_S},{_LONG}",
        ),
        _case(
            "drifting-prompts",
            "0.5/s; prompts grow from 6,000 to 18,000 tokens within six hours",
            f"poisson:rate=0.5,drift_input=3,duration_s={6 * HOUR_S},input_tokens=6000,output_tokens=300,length_cv=0.3,"
            "max_tokens=24000",
        ),
    ]


def _shapes() -> list[Case]:
    """Return the cases in which now prefill has the work, now decode."""
    return [
        _case(
            "agents-and-chat",
            "agents for two hours (14,000/150 at 0.6/s), chat for two (1,400/1,200 at 2.4/s), twice",
            f"step:rate=0.6,peak=4,step_s=7200,step_length_s=7200,every_s=14400,duration_s={8 * HOUR_S},"
            "input_tokens=14000,output_tokens=150,length_cv=0.3,max_tokens=24000,shift_s=7200,shift_every_s=7200,"
            "shift_input=0.1,shift_output=8",
        ),
        _case(
            "alternating-tenants",
            "two tenants in turn, ten minutes each: 14,000/100 at 0.6/s, 1,400/1,200 at 1.8/s",
            f"step:rate=0.6,peak=3,step_s=600,step_length_s=600,every_s=1200,duration_s={6 * HOUR_S},"
            "input_tokens=14000,output_tokens=100,length_cv=0.3,max_tokens=24000,shift_s=600,shift_every_s=600,"
            "shift_input=0.1,shift_output=12",
        ),
        _case(
            "rag-and-essays",
            "days of an hour and a half, 0.1/s to 0.8/s; every 20 minutes 12,000/200 turns to 1,200/2,000 and back",
            f"day:rate=0.1,peak=8,period_s=5400,step_length_s=1200,duration_s={6 * HOUR_S},input_tokens=12000,"
            "output_tokens=200,length_cv=0.3,max_tokens=24000,shift_s=1200,shift_every_s=1200,shift_input=0.1,shift_output=10",
        ),
    ]


def _starts() -> list[Case]:
    """Return one load with starts of 30, 120 and 300 s, of which a fifth never serve."""
    source = f"sine:rate=0.45,amplitude=0.7,period_s=5400,duration_s={4 * HOUR_S},{_LONG}"
    faults = Faults(failing_starts=0.2)
    return [
        _case(
            f"failing-starts-{start_s}",
            f"0.45/s +- 70% in 90 minutes; {start_s} s to start, a fifth never does",
            source,
            cold_start_s=float(start_s),
            cold_start_cv=0.3,
            faults=faults,
        )
        for start_s in (30, 120, 300)
    ]


def _weeks() -> list[Case]:
    return [
        _coarse(
            "week",
            "two time zones, a nightly batch within 20 minutes of two, a holiday, a weekend; 0.02/s to 0.4/s",
            f"week:rate=0.02,peak=20,step_length_s=7200,duration_s={7 * DAY_S},{_LONG}",
        )
    ]
