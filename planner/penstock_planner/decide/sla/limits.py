"""Demand beyond what budget and maxReplicas allow: who gets the GPUs, what binds, and what to expect.

The GPUs are split as `shared` has it. A role at its share leaves what is free to the other one. A role above its
share gives one replica up for one below it, as a `rebalance` that waits for the drain, and only if that can succeed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.performance.capacity import wait_quantile_s
from penstock_planner.decide.adaptive.signals import KvLoad
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.sla import queueing
from penstock_planner.decide.sla.workers import ProfiledWorkers

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

    def steps(self, role: Role, replicas: int) -> tuple[Step, ...]:
        """Return how many replicas the targets need by the profile; nothing where that cannot be looked up yet."""
        if role is not Role.PREFILL and self.workers.learnt.osl is None:
            return ()
        inputs = {
            "replicas": self.needed(role),
            "replicas_now": replicas,
            "tokens_per_s": self.tokens_per_s,
            "worker_tokens_per_s": self.speed,
        }
        return (Step("needed", inputs, None, "by profile and targets"),)

    def behind(self, prefill_replicas: int) -> Projection:
        """Return the same for decode: no more prompts than this many prefill replicas compute become answers."""
        return replace(self, tokens_per_s=min(self.tokens_per_s, prefill_replicas * self.speed))

    def expected(self, role: Role, replicas: int) -> Expectation:
        """Return what this many replicas of a role give, >= 1."""
        first = None if role is Role.DECODE else self._first_token(role, replicas)
        gaps = None if role is Role.PREFILL else self._gaps(replicas)
        found = [each for each in (first, gaps) if each is not None]
        numbers = {name: value for each in found for name, value in each.numbers.items()}
        return Expectation(numbers, ", ".join(each.words for each in found))

    def _test(self, role: Role) -> Callable[[int], bool]:
        """Return a function that says whether this many replicas hold targets and KV."""
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
            return Expectation(numbers, f"unbounded TTFT: only {done:.0%} of prompt tokens can be computed")
        wait_s = wait_quantile_s(
            servers,
            load / self.service_s,
            self.service_s,
            variability=learnt.variability / 2.0,
            quantile=config.attainment,
        )
        ttft_s = wait_s + self.service_s * learnt.ttft.factor
        in_time = 1.0 - queueing.late_share(
            servers,
            load,
            service_s=self.service_s,
            variability=learnt.variability,
            may_wait_s=self.workers.may_wait_s(self.service_s),
        )
        numbers = {"ttft_s_expected": ttft_s, "in_time_expected": in_time, "computed_expected": done}
        return Expectation(
            numbers,
            f"TTFT of {ttft_s:.3g} s at quantile {config.attainment:g}, {in_time:.1%} of requests on time",
        )

    def _gaps(self, replicas: int) -> Expectation | None:
        answers = self.workers.answers(self.tokens_per_s)
        if answers is None:
            return None
        itl_s = answers.itl_with(replicas)
        if math.isinf(itl_s):
            return Expectation(
                {"itl_s_expected": None}, "the ITL of a full batch, with requests waiting for decode"
            )
        return Expectation({"itl_s_expected": itl_s}, f"ITL of {1000 * itl_s:.1f} ms")


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """What one role needs, and what bounds it.

    Attributes:
        needed: Replicas that hold the targets, >= 1.
        floor: Fewest that it may have, >= 1.
        most: Most that it may have; None: no such bound.
    """

    role: Role
    needed: int
    floor: int
    most: int | None
    gpus: int

    @property
    def wanted(self) -> int:
        """Return the replicas that it would have without a budget."""
        reachable = self.needed if self.most is None else min(self.needed, self.most)
        return max(self.floor, reachable)


def gpus_of(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> int:
    """Return the GPUs of this many replicas of each role."""
    return sum(each.gpus * counts[each.role] for each in needs)


def coverage(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> float:
    """Return the least that a role has of what it needs, as a share; the ratio of the roles holds where all have as much."""
    return min(counts[each.role] / each.needed for each in needs)


def shared(needs: Sequence[RoleNeed], budget: int | None) -> dict[Role, int]:
    """Return the replicas of each role within the budget: the desired number, or else the greatest `coverage`.

    From the floors, which are kept even above the budget, each replica goes to the role that has least of what it
    needs, decode on equal terms, as long as one of it fits. Taking one away again would leave its role no better
    off than the one that has least now, so no other split covers more. Example: prefill needs 4 and decode 8, one
    GPU each, of 6: 2 and 4.
    """
    wanted = {each.role: each.wanted for each in needs}
    if budget is None or gpus_of(needs, wanted) <= budget:
        return wanted
    counts = {each.role: each.floor for each in needs}
    left = budget - gpus_of(needs, counts)
    while True:
        able = [each for each in needs if counts[each.role] < each.wanted and each.gpus <= left]
        if not able:
            return counts
        least = min(able, key=lambda each: (counts[each.role] / each.needed, each.role is Role.PREFILL))
        counts[least.role] += 1
        left -= least.gpus


MOVE_GAIN = 1.1
"""Chosen: the role that has least of what it needs must have a tenth more of it after a move, because a move costs the
GPUs of one replica for a drain and a start-up. So the needed ratio must change by a fifth before a move is undone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the roles need and may have.

    Attributes:
        allowed: Replicas within budget and bounds.
        budget: GPUs of all roles; None: no ceiling.
    """

    needs: tuple[RoleNeed, ...]
    allowed: Mapping[Role, int]
    budget: int | None

    @property
    def gpus_needed(self) -> int:
        """Return the GPUs that would hold the targets."""
        return gpus_of(self.needs, {each.role: each.needed for each in self.needs})

    @property
    def is_budget_short(self) -> bool:
        """Whether the roles want more GPUs, within their own bounds, than the budget has."""
        wanted = gpus_of(self.needs, {each.role: each.wanted for each in self.needs})
        return self.budget is not None and wanted > self.budget

    def of(self, role: Role) -> RoleNeed:
        """Return one role's need."""
        return next(each for each in self.needs if each.role is role)

    def binding(self, role: Role) -> str:
        """Return what keeps a role from the replicas that it needs, by the keys to raise; empty: nothing does."""
        need = self.of(role)
        if self.allowed[role] >= need.needed:
            return ""
        found = []
        if self.budget is not None and self.gpus_needed > self.budget:
            found.append(f"maxGpuBudget {self.budget}")
        if need.most is not None and need.most < need.needed:
            found.append(f"maxReplicas {need.most} of {role.value}")
        return " and ".join(found)


def limited(
    proposals: Sequence[RoleProposal],
    projection: Projection,
    config: DecideConfig,
    *,
    gpus: int,
    rested: Collection[Role],
) -> list[RoleProposal]:
    """Return adaptive's proposals within each role's share, with what binds and what to expect where demand is beyond it.

    ``gpus`` counts draining workers' too; ``rested`` roles neither grew nor shrank lately.
    """
    is_lowered = any(each.reason is Reason.ABOVE_BUDGET for each in proposals)
    if is_lowered or not any(each.action is Action.UP for each in proposals):
        return list(proposals)
    needs = tuple(_need(each, projection, config) for each in proposals)
    limits = Limits(needs, shared(needs, config.max_gpu_budget), config.max_gpu_budget)
    free = None if config.max_gpu_budget is None else config.max_gpu_budget - gpus
    giver = _giver(proposals, limits, free, rested)
    explained = [_explained(each, limits, projection) for each in proposals]
    return [
        _giving(each, limits) if each.role is giver else _within_share(each, limits, free)
        for each in explained
    ]


def _need(proposal: RoleProposal, projection: Projection, config: DecideConfig) -> RoleNeed:
    """Return what a role needs: by the profile if it asks for more, else what it has or is left with."""
    replicas, role = proposal.pool.replicas, proposal.role
    asked = max(1, replicas + proposal.change)
    needed = max(projection.needed(role), replicas + 1) if proposal.action is Action.UP else asked
    floor = config.floor(role, proposal.engine_gpus)
    return RoleNeed(role, needed, floor, config.max_replicas.get(role), proposal.engine_gpus)


def _explained(proposal: RoleProposal, limits: Limits, projection: Projection) -> RoleProposal:
    """Return the proposal with what binds, and what to expect at what is allowed."""
    role = proposal.role
    binds = limits.binding(role)
    if not binds:
        return proposal
    need, allowed = limits.of(role), limits.allowed[role]
    if role is Role.DECODE and Role.PREFILL in limits.allowed:
        projection = projection.behind(limits.allowed[Role.PREFILL])
    expected = projection.expected(role, max(1, allowed))
    inputs = {
        "binds": binds,
        "replicas_needed": need.needed,
        "gpus_needed": limits.gpus_needed,
        **expected.numbers,
    }
    words = f"{count_of(need.needed, 'worker')} {'is' if need.needed == 1 else 'are'} needed and {binds} allows {allowed}: expect {expected.words}"
    step = Step("limit", inputs, allowed, f"{binds} binds: expect {expected.words}")
    return replace(proposal.passed(step), detail=f"{proposal.detail}; {words}")


def _within_share(proposal: RoleProposal, limits: Limits, free: int | None) -> RoleProposal:
    """Return a scale-up of at most the role's share; at its share, it leaves the free GPUs to the other role."""
    if proposal.action is not Action.UP or not limits.is_budget_short or free is None:
        return proposal
    share = limits.allowed[proposal.role]
    headroom = share - proposal.pool.replicas
    inputs = {"replicas_needed": limits.of(proposal.role).needed, "replicas": proposal.pool.replicas}
    if headroom >= 1:
        amount = min(headroom, proposal.amount)
        return replace(proposal.passed(Step("budget_share", inputs, share, "pass")), amount=amount)
    if free < proposal.engine_gpus:
        return proposal  # the budget itself holds it
    detail = f"its share of the budget of {limits.budget} is {share}"
    return proposal.held(Reason.GPU_BUDGET_YIELDED, detail, Step("budget_share", inputs, share, "hold"))


def _giver(
    proposals: Sequence[RoleProposal], limits: Limits, free: int | None, rested: Collection[Role]
) -> Role | None:
    """Return the role that gives a replica up for another one; None unless both halves can happen and are worth it."""
    is_moving = any(each.pool.starting or each.pool.draining for each in proposals)
    if free is None or not limits.is_budget_short or is_moving:
        return None
    now = {each.role: each.pool.replicas for each in proposals}
    if coverage(limits.needs, limits.allowed) < MOVE_GAIN * coverage(limits.needs, now):
        return None
    taker = next(
        (
            each
            for each in proposals
            if each.action is Action.UP and now[each.role] < limits.allowed[each.role]
        ),
        None,
    )
    giver = next((each for each in proposals if now[each.role] > limits.allowed[each.role]), None)
    if taker is None or giver is None or giver.reason is Reason.METRIC_UNKNOWN:
        return None
    given = (now[giver.role] - limits.allowed[giver.role]) * giver.engine_gpus
    is_feasible = free < taker.engine_gpus <= free + given
    return giver.role if is_feasible and giver.role in rested else None


def _giving(proposal: RoleProposal, limits: Limits) -> RoleProposal:
    share = limits.allowed[proposal.role]
    inputs = {"replicas_needed": limits.of(proposal.role).needed, "replicas": proposal.pool.replicas}
    step = Step("budget_share", inputs, share, "give one up")
    detail = f"{proposal.detail}, but its share of the budget of {limits.budget} is {share}"
    return proposal.changed(Action.DOWN, Reason.BUDGET_SHARE, detail, step)
