"""How long a prefill worker keeps the KV of a decode worker that is gone: leases against one fixed time-out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster import Cluster, Shape

from penstock.engine.core.lease import LeaseTerms

CRASH_S = 120.0
END_S = 640.0
RATE = 4.0
PROMPT_TOKENS = 2000
BLOCKS = 40_000
FIXED_S = 480.0
"""vLLM's ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT`` before leases."""

SHAPE = Shape(prefills=1, decodes=2, decode_seats=3, prompt_tokens=PROMPT_TOKENS, lease=LeaseTerms(30.0))
"""Three seats of 2 s each serve 1.5 requests/s of the 2 that a decode engine gets, so a queue waits when one crashes."""


@dataclass(frozen=True, slots=True)
class CrashRun:
    """One run.

    Attributes:
        orphans: Prompts that the crashed engine had not read.
        pinned: Blocks kept of those, by second from the start.
        kv_usage: Share of the prefill engine's blocks in use, 0 to 1, by second.
        freed_s: From the crash until each of them was free, sorted; virtual seconds.
    """

    orphans: int
    pinned: list[int]
    kv_usage: list[float]
    freed_s: list[float]

    def blocks_at(self, after_s: float) -> int:
        """Return the blocks still kept this long after the crash."""
        return self.pinned[int(CRASH_S + after_s)]


def run_crash(*, leases: bool) -> CrashRun:
    """Let one of two decode engines crash in mid-traffic; arrivals continue, at what the other one serves."""
    shape = SHAPE if leases else replace(SHAPE, lease=LeaseTerms(FIXED_S), renews=False)
    cluster = Cluster(shape, blocks=BLOCKS)
    for number in range(int(CRASH_S * RATE)):
        cluster.submit(number / RATE)
    for number in range(int(END_S - CRASH_S)):
        cluster.submit(CRASH_S + number + 0.5)
    pinned: list[int] = []
    kv_usage: list[float] = []
    freed_s: dict[str, float] = {}
    orphans: list[str] = []
    engine = cluster.prefills[0].engine
    for second in range(int(END_S)):
        cluster.run_until(float(second))
        if second == CRASH_S:
            orphans = cluster.prompts_of(1)
            cluster.crash(1)
        for name in orphans:
            if name not in engine.pinned:
                freed_s.setdefault(name, second - CRASH_S)
        kept = orphans or cluster.prompts_of(1)
        pinned.append(sum(len(engine.pinned.blocks_of(name)) for name in kept))
        kv_usage.append(engine.kv_usage_fraction)
    return CrashRun(len(orphans), pinned, kv_usage, sorted(freed_s.values()))
