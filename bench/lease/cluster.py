"""Prefill and decode engines in virtual time, messages between them at once: what the scenarios run on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import HeartbeatSchedule, LeaseTerms, Read
from penstock.engine.core.requests import EngineRequest, EngineRole
from penstock.engine.core.timeline import Timeline
from penstock.engine.core.transfer import LinkTerms

LATENCY = LatencyModel(QuadraticPrefill(0.016, 1.5e-5, 0.0), LinearDecode(0.02, 0.0, 0.0))
"""Chosen: round figures near an 8B model's: 16 ms and 15 us a token to prefill, 20 ms a decode step."""
KV_BYTES_PER_TOKEN = 131_072
"""Of Llama 3.1 8B in bf16."""
OUTPUT_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """One cluster.

    Attributes:
        prefills, decodes: Engines of each role.
        decode_seats: Requests that one decode engine runs at a time; the rest wait in it.
        prompt_tokens: Of each request.
        lease: Terms of all engines.
        renews: Whether decode engines send heartbeats; without, a lease is a fixed time-out.
    """

    prefills: int
    decodes: int
    decode_seats: int
    prompt_tokens: int
    lease: LeaseTerms
    renews: bool = True


@dataclass(slots=True)
class Counts:
    """What happened.

    Attributes:
        messages: Heartbeat messages.
        renewed: Requests named in them.
        lost: Prompts that were gone when decode asked for them.
        served: Requests that decode has ended.
        longest_wait_s: From the hand-over to decode's scheduling, the longest so far; virtual seconds.
    """

    messages: int = 0
    renewed: int = 0
    lost: int = 0
    served: int = 0
    longest_wait_s: float = 0.0


@dataclass(slots=True)
class _Decode:
    timeline: Timeline
    schedule: HeartbeatSchedule
    home: dict[str, int] = field(default_factory=dict)


class Cluster:
    """Engines of both roles; requests go round robin on each stage."""

    def __init__(self, shape: Shape, *, blocks: int) -> None:
        """Start empty; ``blocks`` is the KV cache of each engine, in blocks of 16 tokens."""
        self.shape = shape
        self.counts = Counts()
        self.now_s = 0.0
        self._blocks = blocks
        self.prefills = [self._timeline(EngineRole.PREFILL) for _ in range(shape.prefills)]
        interval_s = shape.lease.heartbeat_interval_s
        self._decodes = [
            _Decode(self._timeline(EngineRole.DECODE), HeartbeatSchedule(interval_s))
            for _ in range(shape.decodes)
        ]
        self._handed_over = 0
        self._submitted = 0

    @property
    def pinned_blocks(self) -> int:
        """Blocks that prefill engines keep for decode."""
        return sum(each.engine.pinned.blocks for each in self.prefills)

    def prompts_of(self, decode: int) -> list[str]:
        """Return the prompts that one decode engine has been given and not read."""
        return list(self._decodes[decode].home)

    def submit(self, arrival_s: float) -> None:
        """Give a request to the next prefill engine."""
        self._submitted += 1
        prefill = self.prefills[self._submitted % len(self.prefills)]
        prefill.submit(
            EngineRequest(f"r{self._submitted}", self.shape.prompt_tokens, 1, arrival_s, pin_blocks=True)
        )

    def crash(self, decode: int) -> None:
        """Stop one decode engine for good; it says nothing."""
        del self._decodes[decode]

    def run_until(self, until_s: float) -> None:
        """Do everything that is due by then, in order."""
        while True:
            due = [at for at in self._due() if at <= until_s]
            if not due:
                self.now_s = until_s
                return
            self.now_s = max(self.now_s, min(due))
            self._advance(self.now_s)

    def _due(self) -> Iterator[float]:
        for timeline in (*self.prefills, *(each.timeline for each in self._decodes)):
            at_s = timeline.next_due_s()
            if at_s is not None:
                yield at_s
        if self.shape.renews:
            yield from (at for each in self._decodes if (at := each.schedule.next_s()) is not None)

    def _advance(self, now_s: float) -> None:
        for number, prefill in enumerate(self.prefills):
            for outcome in prefill.run_until(now_s, max_steps=1):
                for state in outcome.finished:
                    self._hand_over(number, state.request.request_id, outcome.end_s)
        for decode in self._decodes:
            for outcome in decode.timeline.run_until(now_s, max_steps=1):
                self.counts.served += len(outcome.finished)
            self._read(decode, now_s)
            if self.shape.renews:
                self._renew(decode, now_s)

    def _hand_over(self, prefill: int, name: str, now_s: float) -> None:
        self._handed_over += 1
        decode = self._decodes[self._handed_over % len(self._decodes)]
        tokens = self.shape.prompt_tokens
        decode.timeline.submit(EngineRequest(name, tokens, OUTPUT_TOKENS, now_s, load_remote=True))
        decode.schedule.track(str(prefill), name)
        decode.home[name] = prefill

    def _read(self, decode: _Decode, now_s: float) -> None:
        for transfer in decode.timeline.engine.take_events().transfers:
            name = transfer.state.request.request_id
            prefill = decode.home.pop(name)
            decode.schedule.untrack(str(prefill), name)
            self.counts.lost += len(self.prefills[prefill].engine.pinned.read([Read(name)]))
            self.prefills[prefill].retry(now_s)
            waited_s = transfer.started_s - transfer.state.request.arrival_s
            self.counts.longest_wait_s = max(self.counts.longest_wait_s, waited_s)

    def _renew(self, decode: _Decode, now_s: float) -> None:
        for prefill, names in decode.schedule.due(now_s).items():
            self.counts.messages += 1
            self.counts.renewed += len(names)
            self.counts.lost += len(self.prefills[int(prefill)].engine.pinned.renew(names, now_s))

    def _timeline(self, role: EngineRole) -> Timeline:
        seats = self.shape.decode_seats if role is EngineRole.DECODE else 256
        # A decode engine fetches no more than it has room for, so requests wait there and not in its memory.
        blocks = self._blocks if role is EngineRole.PREFILL else self._decode_blocks(seats)
        limits = BatchLimits(max_num_seqs=seats)
        settings = EngineSettings(
            role, blocks, KV_BYTES_PER_TOKEN, limits, self.shape.lease, LinkTerms(0.005, 25e9)
        )
        return Timeline(Engine(settings, LATENCY))

    def _decode_blocks(self, seats: int) -> int:
        return seats * -(-(self.shape.prompt_tokens + OUTPUT_TOKENS) // 16)
