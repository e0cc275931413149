"""The scoreboard's workloads: each with the fleet that serves it and its targets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from split import is_tuned

from penstock.api import Role, RouterConfig, SloConfig
from penstock.core.durations import duration_text
from penstock.simulator.scenario import (
    BudgetChange,
    Fault,
    FaultPeriod,
    Faults,
    PoolSpec,
    ProfiledModel,
    WorkerFailure,
)
from penstock.simulator.workload import WorkloadSpec

A100 = "a100-llama-8b-bf16-tp1"
A100_14B = "a100-qwen2.5-14b-bf16-tp1"
H200 = "h200-llama-3.1-8b-tp1"
H100_70B = "h100-llama-3.3-70b-tp2"

START_UP_S = 120.0
"""Chosen: engines of 8 to 70 billion parameters take one to five minutes from the pod to the first answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload with its fleet.

    Attributes:
        name: Unique.
        about: One line for people.
        spec: Requests.
        fleet: Replicas at time 0: prefill and decode, or aggregated alone.
        budget: GPUs.
        profile: Latency profile.
        gpus: Of one replica.
        slo_s: TTFT in time.
        itl_slo_s: Mean gap between tokens in time; None: any.
        qps: Mean rate; None: the source's own.
        cold_start_s: From asking until serving, the mean.
        cold_start_cv: How much that differs; log-normal.
        failures: Deaths of workers.
        faults: What else goes wrong.
        kind: ``load``, ``short``, ``start-up`` or ``fault``: which table it is in; goals are of loads and start-ups, which last for
            hours.
        is_quick: Part of ``--quick``.
        needs_data: It needs a trace file that is not packaged.
        search: Requests that oracles are searched on, where all would take too long.
        seeds: Most seeds it is run with; None: as many as asked for.
        pull_s: Between two pulls of the planner's own modes, seconds.
        sample_s: Between two samples of the fleet, seconds.
        switches_roles: Workers can change between prefill and decode.
    """

    name: str
    about: str
    spec: WorkloadSpec
    fleet: tuple[int, ...] = (2, 1)
    budget: int = 12
    profile: str = A100
    gpus: int = 1
    slo_s: float = 5.0
    itl_slo_s: float | None = None
    qps: float | None = None
    cold_start_s: float = START_UP_S
    cold_start_cv: float = 0.0
    failures: tuple[WorkerFailure, ...] = ()
    faults: Faults = field(default_factory=Faults)
    kind: str = "load"
    is_quick: bool = False
    needs_data: bool = False
    search: WorkloadSpec | None = None
    seeds: int | None = None
    pull_s: float = 1.0
    sample_s: float = 1.0
    switches_roles: bool = False

    def pools(self, fleet: tuple[int, ...] | None = None) -> tuple[PoolSpec, ...]:
        """Return the pools, with another fleet if one is given."""
        counts = fleet or self.fleet
        model = ProfiledModel(self.profile, block_size=512)
        roles = (Role.AGGREGATED,) if len(counts) == 1 else (Role.PREFILL, Role.DECODE)
        return tuple(PoolSpec(role, n, model, self.gpus) for role, n in zip(roles, counts, strict=True))

    @property
    def is_tuned(self) -> bool:
        """Whether policies may be tuned on it; the others are held out."""
        return is_tuned(self.name)

    @property
    def router(self) -> RouterConfig:
        """The router of every run: the live one's own settings, with the bounds of its queue."""
        return RouterConfig()

    @property
    def slo(self) -> SloConfig:
        """The targets by which runs are judged."""
        return SloConfig(
            ttft=duration_text(self.slo_s),
            itl=None if self.itl_slo_s is None else duration_text(self.itl_slo_s),
        )


PUBLISHED = "sine:rate=25,amplitude=0.8,period_s=600,input_tokens=3000,output_tokens=300,length_cv=0.2"
CHAT = "input_tokens=8000,output_tokens=300,max_tokens=24000"
"""Log-normal with a CV of 1; cut at 24,000 tokens, which take 2.2 s by themselves, so that every request can be in time."""


HOURS_S = 6 * 3600
SINE = f"sine:rate=2.4,amplitude=0.7,period_s=600,duration_s={HOURS_S},{CHAT}"
FLASH = f"step:rate=0.6,peak=10,step_s=300,step_length_s=120,duration_s=1200,{CHAT}"
RECURRING = f"step:rate=0.1,peak=30,step_s=600,step_length_s=90,every_s=900,duration_s={HOURS_S},{CHAT}"
DAY = "input_tokens=14000,output_tokens=300,length_cv=0.3,max_tokens=24000"
CYCLES = f"day:rate=0.08,peak=10,period_s=3600,step_length_s=600,duration_s={HOURS_S},{DAY}"


def cases(data: Path | None) -> list[Case]:
    """Return every case; those that need a trace are left out where ``data`` has none."""
    found = [*_synthetic(), *_traces(data), *_start_ups(), *_faults()]
    return [case for case in found if not case.needs_data or Path(case.spec.source).exists()]


def _case(name: str, about: str, source: str, **options: object) -> Case:
    return Case(name, about, WorkloadSpec(source), **options)  # type: ignore[arg-type]  # as the caller says


def _synthetic() -> list[Case]:
    return [*_short(), *_long(), _published()]


def _short() -> list[Case]:
    """Return the cases that end before a planner has seen what comes again."""
    long_short = "input_tokens=12000,output_tokens=20,length_cv=0.5,max_tokens=24000"
    loads = [
        _case("long-short", "12,000/20 tokens at 2/s", f"poisson:rate=2,duration_s=900,{long_short}"),
        _case(
            "short-long",
            "500/1,500 tokens at 3/s",
            "poisson:rate=3,duration_s=900,input_tokens=500,output_tokens=1500",
            fleet=(1, 2),
        ),
        _case(
            "shift",
            "8,000/100, from 600 s on 1,000/800",
            "poisson:rate=2.4,duration_s=1200,input_tokens=8000,output_tokens=100,max_tokens=24000,shift_s=600,"
            "shift_input=0.125,shift_output=8",
        ),
        _case("flash", "0.6/s, x 10 for two minutes", FLASH, is_quick=True),
        _case("aggregated-flash", "aggregated, 0.6/s, x 10 for two minutes", FLASH, fleet=(2,)),
    ]
    return [replace(case, kind="short") for case in loads]


def _hours(name: str, about: str, source: str, **options: object) -> Case:
    """Return a case of hours: one seed, and oracles that are searched on its beginning."""
    return _case(name, about, source, search=WorkloadSpec(source, limit=1200), seeds=1, **options)


def _long() -> list[Case]:
    """Return the cases of hours, in which a planner can learn what comes again."""
    shared = "share=0.9,prefixes=6,prefix_tokens=16384,input_tokens=20000,output_tokens=200,length_cv=0.2"
    return [
        _hours("poisson", "3.2/s, 8,000/300 tokens", f"poisson:rate=3.2,duration_s={HOURS_S},{CHAT}"),
        _hours("sine", "2.4/s +- 70% in 600 s", SINE),
        _hours("aggregated-sine", "aggregated, 2.4/s +- 70%", SINE, fleet=(2,)),
        _hours(
            "bursts", "on and off, CV 13, 1.5/s", f"bursts:rate=1.5,peak=6,cv=13,duration_s={HOURS_S},{CHAT}"
        ),
        _hours("recurring", "0.1/s, x 30 for 90 s every 15 minutes", RECURRING, is_quick=True),
        _hours("aggregated-recurring", "aggregated, the same", RECURRING, fleet=(2,)),
        _hours(
            "regimes",
            "random levels of 0.1/s to 1.2/s, 15 minutes each in the mean; 12,000/300, 14B",
            f"regimes:rate=0.1,peak=12,step_length_s=900,duration_s={HOURS_S},input_tokens=12000,output_tokens=300,"
            "length_cv=0.3,max_tokens=24000",
            profile=A100_14B,
            budget=16,
        ),
        _hours(
            "tenants",
            "ten heavy-tailed tenants, each on an eighth of the time, 0.3/s; 14,000/300, 14B",
            f"tenants:rate=0.3,tenants=10,peak=8,step_length_s=300,duration_s={HOURS_S},{DAY}",
            profile=A100_14B,
            budget=8,
        ),
        _hours(
            "code",
            "code completion: 20 tenants on a sixth of the time, 8,000/28 at 0.7/s, Llama 70B on two H100 each",
            f"tenants:rate=0.7,tenants=20,peak=6,step_length_s=120,duration_s={HOURS_S},input_tokens=8000,"
            "output_tokens=28,length_cv=0.7,max_tokens=16000",
            profile=H100_70B,
            gpus=2,
            budget=64,
            fleet=(2, 1),
            slo_s=2.0,
        ),
        _hours(
            "shared",
            "random levels of 0.2/s to 2.4/s; 20,000 tokens, of which 16,384 are one of six prefixes",
            f"regimes:rate=0.2,peak=12,step_length_s=600,duration_s={HOURS_S},{shared}",
            budget=16,
        ),
        *_tides(),
    ]


def _tides() -> list[Case]:
    """Return the cases that move more slowly than a start-up."""
    return [
        _hours(
            "monday",
            "0.08/s for two hours and a half, then to 0.8/s within an hour and a half; 14,000/300, 14B",
            f"ramp:rate=0.08,peak=10,step_s=9000,step_length_s=5400,duration_s={HOURS_S},{DAY}",
            profile=A100_14B,
            is_quick=True,
        ),
        _hours(
            "cycles",
            "six days of an hour, 0.08/s to 0.8/s; 14,000/300, 14B",
            CYCLES,
            profile=A100_14B,
            is_quick=True,
        ),
        _hours(
            "days",
            "two days of three hours, 0.08/s to 0.8/s; 14,000/300, 14B",
            f"day:rate=0.08,peak=10,period_s=10800,step_length_s=1800,duration_s={HOURS_S},{DAY}",
            profile=A100_14B,
        ),
        _hours(
            "two-days",
            "packaged Mooncake slice over two days of four hours, 0.04/s to 0.64/s, 14B",
            "day:rate=0.04,peak=16,period_s=14400,step_length_s=3600,duration_s=28800,requests=mooncake,max_tokens=24000",
            profile=A100_14B,
            budget=16,
            is_quick=True,
        ),
    ]


def _published() -> Case:
    """Return the one that Dynamo publishes figures of."""
    case = _case(
        "dynamo-sine",
        "Dynamo's published case: 25/s +- 80% in 600 s, 3,000/300, TTFT 0.2 s, ITL 10 ms",
        f"{PUBLISHED},duration_s=600",
        search=WorkloadSpec(f"{PUBLISHED},duration_s=450"),
        profile=H200,
        fleet=(3, 3),
        budget=16,
        slo_s=0.2,
        itl_slo_s=0.01,
        seeds=1,
    )
    return replace(case, kind="short")


def _traces(data: Path | None) -> list[Case]:
    folder = data or Path()
    conversation, arxiv = (
        folder / "mooncake_conversation_trace.jsonl",
        folder / "mooncake_arxiv_first1000.jsonl",
    )
    azure, code = (folder / f"AzureLLMInferenceTrace_{name}.csv" for name in ("conv", "code"))
    found = [
        Case(
            "mooncake",
            "packaged Mooncake slice at 0.7/s",
            WorkloadSpec("mooncake"),
            qps=0.7,
            budget=8,
            is_quick=True,
        ),
        Case(
            "conversation",
            "Mooncake conversation, whole, own rate",
            WorkloadSpec(str(conversation)),
            search=WorkloadSpec(str(conversation), limit=3000),
            budget=24,
            fleet=(4, 2),
            needs_data=True,
            seeds=1,
        ),
        Case(
            "arxiv",
            "Mooncake arXiv slice (1,000 requests), 2/s",
            WorkloadSpec(str(arxiv)),
            qps=2.0,
            budget=16,
            needs_data=True,
        ),
        Case(
            "azure",
            "Azure conversation, first 6,000, Llama 70B on two H100 each",
            WorkloadSpec(str(azure), limit=6000),
            profile=H100_70B,
            gpus=2,
            budget=24,
            fleet=(2, 2),
            slo_s=2.0,
            itl_slo_s=0.05,
            needs_data=True,
            seeds=1,
        ),
        Case(
            "azure-code",
            "Azure code completion, whole, own rate, Llama 70B on two H100 each",
            WorkloadSpec(str(code)),
            profile=H100_70B,
            gpus=2,
            budget=64,
            fleet=(2, 1),
            slo_s=2.0,
            needs_data=True,
            seeds=1,
        ),
    ]
    return [replace(case, kind="short") for case in found]


def _start_ups() -> list[Case]:
    def case(name: str, source: str, suffix: str, **options: float) -> Case:
        return Case(
            f"{name}-start-{suffix}",
            f"{name} with {suffix} s to start",
            WorkloadSpec(source),
            search=WorkloadSpec(source, limit=1200),
            kind="start-up",
            seeds=1,
            **(options | ({"profile": A100_14B} if name == "cycles" else {})),
        )  # type: ignore[arg-type]  # as the caller says

    loads = (("cycles", CYCLES), ("recurring", RECURRING))
    return [
        *(
            case(name, source, str(start_up_s), cold_start_s=float(start_up_s))
            for name, source in loads
            for start_up_s in (30, 300)
        ),
        case("cycles", CYCLES, "40-to-300", cold_start_cv=0.5),
    ]


def _faults() -> list[Case]:
    source = WorkloadSpec(f"sine:rate=2.4,amplitude=0.5,period_s=600,duration_s=1200,{CHAT}")

    def case(name: str, about: str, faults: Faults | None = None, **options: object) -> Case:
        return Case(
            f"fault-{name}",
            about,
            source,
            faults=faults or Faults(),
            kind="fault",
            fleet=(3, 2),
            cold_start_s=30.0,
            seeds=1,
            **options,
        )  # type: ignore[arg-type]  # as the caller says

    def period(kind: Fault, from_s: float, to_s: float) -> Faults:
        return Faults(periods=(FaultPeriod(kind, from_s, to_s),))

    return [
        case(
            "metrics-gap",
            "no metrics for 5 minutes from the crest on",
            period(Fault.METRICS_MISSING, 150, 450),
        ),
        case(
            "metrics-stale", "metrics repeat themselves for 5 minutes", period(Fault.METRICS_STALE, 150, 450)
        ),
        case("metrics-zero", "gauges read 0 for 2 minutes", period(Fault.METRICS_ZERO, 150, 270)),
        case("router-outage", "router away for a minute", period(Fault.ROUTER_DOWN, 300, 360)),
        case(
            "crash",
            "a prefill and a decode worker die and come back after 60 s",
            failures=(WorkerFailure(200.0, "prefill-0", 260.0), WorkerFailure(400.0, "decode-0", 460.0)),
        ),
        case(
            "never-ready",
            "replicas asked for in the first 3 minutes never serve",
            period(Fault.NEVER_READY, 0, 180),
        ),
        case("budget-cut", "budget 12, from 200 s on 4", Faults(budget=(BudgetChange(200.0, 4),))),
        case("small-nodes", "budget 12, nodes for 6", Faults(node_gpus=6)),
        case(
            "restarts",
            "the planner's process is replaced each minute",
            Faults(restarts=tuple(float(at_s) for at_s in range(60, 1200, 60))),
        ),
    ]
