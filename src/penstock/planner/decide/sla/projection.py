"""What the demand expected at the horizon needs by the profile, and what TTFT and ITL fewer replicas would give."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.performance.capacity import wait_quantile_s
from penstock.planner.decide.adaptive.memory import KvLoad
from penstock.planner.decide.sla import learning, queueing
from penstock.planner.decide.sla.workers import ProfiledWorkers

REPLICAS_MOST = 1000
"""The API's bound of a service's replicas; demand that needs more is counted as needing these."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The targets' figures on a number of replicas, None where they grow without end."""

    numbers: dict[str, float | None]
    words: str


@dataclass(frozen=True, slots=True)
class Projection:
    """Demand at the horizon on the workers of the profile.

    Attributes:
        kv: KV load so far, for decode before the first answer was complete.
        tokens_per_s: Uncached prompt tokens/s expected to arrive, >= 0.
        service_s: Corrected time that a worker computes at the mean prompt, > 0.
        speed: Prompt tokens/s of one worker, > 0.
    """

    workers: ProfiledWorkers
    kv: KvLoad
    tokens_per_s: float
    service_s: float
    speed: float

    def needed(self, role: Role) -> int:
        """Return the fewest replicas of a role that hold the targets and the KV, 1 to `REPLICAS_MOST`."""
        holds, enough = self._test(role), 1
        while enough < REPLICAS_MOST and not holds(enough):
            enough *= 2  # the formula's cost grows with the count
        counts = range(enough // 2 + 1, min(enough, REPLICAS_MOST))
        return counts.start + bisect_left(counts, True, key=holds)

    def behind(self, prefill_replicas: int) -> Projection:
        """Return the same for decode: no more prompts than so many prefill replicas compute become answers."""
        return replace(self, tokens_per_s=min(self.tokens_per_s, prefill_replicas * self.speed))

    def expected(self, role: Role, replicas: int) -> Expectation:
        """Return what so many replicas of a role give, >= 1."""
        first = None if role is Role.DECODE else self._first_token(role, replicas)
        gaps = None if role is Role.PREFILL else self._gaps(replicas)
        found = [each for each in (first, gaps) if each is not None]
        numbers = {name: value for each in found for name, value in each.numbers.items()}
        return Expectation(numbers, ", ".join(each.words for each in found))

    def _test(self, role: Role) -> Callable[[int], bool]:
        """Return a function that says whether so many replicas hold targets and KV."""
        gaps = None if role is Role.PREFILL else self.workers.gaps(self.tokens_per_s)
        decoding = None if role is Role.PREFILL else self.workers.decoding(self.kv, self.tokens_per_s)

        def holds(replicas: int) -> bool:
            if role is not Role.DECODE and self._late_share(role, replicas) > self._may_be_late:
                return False
            if (
                decoding is not None
                and decoding.load_on(replicas) > self.workers.restraint.kv_ahead * replicas
            ):
                return False
            return gaps is None or gaps.itl_with(replicas) <= gaps.target_s

        return holds

    @property
    def _may_be_late(self) -> float:
        return 1.0 - self.workers.config.attainment

    def _servers(self, role: Role, replicas: int) -> tuple[int, float]:
        """Return how many serve one queue, and their load in erlangs."""
        return queueing.queue_of(role, replicas, self.tokens_per_s / self.speed)

    def _late_share(self, role: Role, replicas: int) -> float:
        servers, load = self._servers(role, replicas)
        if not self.workers.knows_waits:
            return 0.0 if load <= self.workers.busy_most(role, replicas) * servers else 1.0
        return queueing.late_share(
            servers,
            load,
            service_s=self.service_s,
            variability=self.workers.learnt.variability,
            may_wait_s=self.workers.may_wait_s(self.service_s),
        )

    def _first_token(self, role: Role, replicas: int) -> Expectation:
        servers, load = self._servers(role, replicas)
        config, learnt = self.workers.config, self.workers.learnt
        done = min(1.0, servers / load) if load > 0 else 1.0
        if load >= servers:
            numbers = {"ttft_s_expected": None, "in_time_expected": 0.0, "computed_expected": done}
            return Expectation(numbers, f"TTFT without end, {done:.0%} of the prompts' tokens computed")
        wait_s = wait_quantile_s(
            servers,
            load / self.service_s,
            self.service_s,
            variability=learnt.variability / 2.0,
            quantile=config.attainment,
        )
        ttft_s = wait_s + self.service_s * learning.factor(learnt.ttft)
        in_time = 1.0 - queueing.late_share(
            servers,
            load,
            service_s=self.service_s,
            variability=learnt.variability,
            may_wait_s=self.workers.may_wait_s(self.service_s),
        )
        numbers = {"ttft_s_expected": ttft_s, "in_time_expected": in_time, "computed_expected": done}
        return Expectation(
            numbers, f"TTFT of {ttft_s:.3g} s at {config.attainment:g}, {in_time:.1%} of the requests in time"
        )

    def _gaps(self, replicas: int) -> Expectation | None:
        answers = self.workers.answers(self.tokens_per_s)
        if answers is None:
            return None
        itl_s = answers.itl_with(replicas)
        if math.isinf(itl_s):
            return Expectation({"itl_s_expected": None}, "ITL of a full batch, answers wait to begin")
        return Expectation({"itl_s_expected": itl_s}, f"ITL of {1000 * itl_s:.1f} ms")
