"""One simulated worker in virtual time under four ways of scheduling; with the router's SLO monitor at its frontend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workload import TIERS, Request

from penstock.api import Tier, TiersConfig
from penstock.core.durations import duration_text
from penstock.core.tiers import TierPriority
from penstock.engine import profiles
from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.requests import EngineRequest, EngineRole, RequestState
from penstock.engine.serve.settings import PreemptionFlag
from penstock.router.policy.slo_monitor import EVALUATE_S, EndedRequest, SloMonitor

PROFILE = "a100-llama-70b-bf16-tp8"
KV_BLOCKS, BLOCK_TOKENS = 3072, 16
MAX_SEQS, BATCH_TOKENS = 64, 512
PREEMPTION = PreemptionFlag(maxPerRequest=3, premiumReservedFraction=0.3, swapGigabytes=16)
TARGETS_S = {TierPriority.PREMIUM: 0.2, TierPriority.STANDARD: 0.5}


@dataclass(frozen=True, slots=True)
class Mode:
    """A column of the table."""

    name: str
    by_priority: bool = True
    preempts: bool = True
    sheds: bool = False


MODES = (
    Mode("FIFO", by_priority=False, preempts=False),
    Mode("Priority", preempts=False),
    Mode("+ preemption"),
    Mode("+ SLO monitor", sheds=True),
)


@dataclass(slots=True)
class Run:
    """What a mode made of the traffic.

    Attributes:
        seconds: Virtual time of arrivals.
        ttft_s: By tier, of all requests that were let in; those without a first token are not among them.
        arrived, shed, ended: Requests by tier.
        tokens: Prompt and output tokens of requests that ended within ``seconds``.
        preemptions: By kind.
    """

    seconds: float
    ttft_s: dict[TierPriority, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    arrived: dict[TierPriority, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    shed: dict[TierPriority, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    ended: dict[TierPriority, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)


def make_engine(mode: Mode) -> Engine:
    """Return an empty worker."""
    profile = profiles.load(PROFILE)
    limits = BatchLimits(BATCH_TOKENS, MAX_SEQS, BLOCK_TOKENS, by_priority=mode.by_priority)
    preemption = PREEMPTION.terms(profile, BLOCK_TOKENS) if mode.preempts else None
    settings = EngineSettings(
        EngineRole.AGGREGATED, KV_BLOCKS, profile.kv.bytes_per_token, limits, preemption=preemption
    )
    return Engine(settings, profile.latency())


def make_monitor() -> SloMonitor:
    """Return the router's monitor, with the document's targets of TTFT."""
    slo = {
        tier.name.lower(): {"ttft": duration_text(target_s), "endToEnd": None}
        for tier, target_s in TARGETS_S.items()
    }
    return SloMonitor(TiersConfig.model_validate({"slo": slo}))


def drive(mode: Mode, requests: Sequence[Request], seconds: float) -> Run:
    """Run the traffic to its end, which is after the last arrival."""
    return _Drive(mode, requests, seconds).to_end()


class _Drive:
    def __init__(self, mode: Mode, requests: Sequence[Request], seconds: float) -> None:
        self._mode, self._requests = mode, requests
        self._engine = make_engine(mode)
        self._monitor = make_monitor()
        self._run = Run(seconds)
        self._next = 0
        self._evaluate_s = EVALUATE_S
        self._waiting: dict[str, RequestState] = {}

    def to_end(self) -> Run:
        engine, now_s = self._engine, 0.0
        while True:
            self._take_arrivals(now_s)
            step = engine.begin_step(now_s)
            if step is None:
                due = [at for at in (engine.next_event_s(), self._next_arrival_s()) if at is not None]
                if not due:
                    break
                now_s = max(now_s, min(due))
                continue
            outcome = engine.finish_step(step)
            now_s = outcome.end_s
            for state in outcome.started:
                self._started(state, now_s)
            for state in outcome.finished:
                self._ended(state, now_s)
        counts = engine.counters.preemptions_by
        for kind, _ in counts:
            self._run.preemptions[kind] = sum(n for (each, _), n in counts.items() if each is kind)
        return self._run

    def _next_arrival_s(self) -> float | None:
        return self._requests[self._next].arrival_s if self._next < len(self._requests) else None

    def _take_arrivals(self, now_s: float) -> None:
        while (at_s := self._next_arrival_s()) is not None and at_s <= now_s:
            request = self._requests[self._next]
            self._next += 1
            self._evaluate(at_s)
            self._run.arrived[request.tier] += 1
            if self._mode.sheds and self._monitor.sheds(Tier[request.tier.name]):
                self._run.shed[request.tier] += 1
                continue
            name = str(self._next)
            order = EngineRequest(
                name, request.prompt_tokens, request.output_tokens, at_s, priority=request.tier
            )
            self._waiting[name] = self._engine.add(order)

    def _evaluate(self, now_s: float) -> None:
        while self._evaluate_s <= now_s:
            waits: dict[Tier, list[float]] = {}
            for state in self._waiting.values():
                tier = Tier[TierPriority(state.request.priority).name]
                waits.setdefault(tier, []).append(self._evaluate_s - state.request.arrival_s)
            self._monitor.evaluate(self._evaluate_s, waits)
            self._evaluate_s += EVALUATE_S

    def _started(self, state: RequestState, now_s: float) -> None:
        tier = TierPriority(state.request.priority)
        ttft_s = now_s - state.request.arrival_s
        self._waiting.pop(state.request.request_id, None)
        self._run.ttft_s[tier].append(ttft_s)
        self._monitor.first_token(Tier[tier.name], ttft_s, now_s)

    def _ended(self, state: RequestState, now_s: float) -> None:
        tier, request = TierPriority(state.request.priority), state.request
        self._run.ended[tier] += 1
        self._monitor.ended(Tier[tier.name], EndedRequest(e2e_s=now_s - request.arrival_s), now_s)
        if now_s <= self._run.seconds:
            self._run.tokens += request.prompt_tokens + request.output_tokens
