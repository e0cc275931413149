"""Demand that exceeds the GPU budget or maxReplicas: how the GPUs are divided, which limit binds, and what latency to expect.

The GPUs are divided as by `divide_budget`. A role that has its part of the budget ("share") leaves free GPUs to the
other role. A role above its share gives one replica up for a role below it; the receiving role waits for the drain
(`rebalance`). This happens only if it can succeed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.api import Role
from penstock.performance.capacity import wait_quantile_s
from penstock_planner.decide.capacity import queueing
from penstock_planner.decide.capacity.profiled import ProfiledWorkers
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Reason, RoleProposal, Step, count_of
from penstock_planner.decide.demand.load import KvLoad

REPLICAS_MOST = 1000
"""Maximum replicas of a service in the API. Demand for more counts as demand for this number."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected TTFT and ITL of a role with some number of replicas.

    Attributes:
        numbers: Values for the record of the decision, by name with unit; None if a value is unbounded.
        words: The same values in words.
    """

    numbers: dict[str, float | None]
    words: str


@dataclass(frozen=True, slots=True)
class Projection:
    """Demand at the horizon, and what the workers that must serve it can do, according to a performance profile.

    The horizon is the time when a replica requested now could be ready.

    Attributes:
        workers: Throughput and latencies of workers: those of the profile, with learned corrections (observed divided
            by profiled value).
        kv: Observed KV usage of the workers, used for decode until the first answer was completed.
        tokens_per_s: Uncached prompt tokens/s expected to arrive, >= 0.
        service_s: Time in seconds that a worker takes to prefill a prompt of mean length, > 0: the profile's time
            multiplied by the learned factor of observed to profiled time.
        speed: Prompt tokens/s that one worker computes, > 0: the profile's throughput divided by that factor.
    """

    workers: ProfiledWorkers
    kv: KvLoad
    tokens_per_s: float
    service_s: float
    speed: float

    def needed(self, role: Role) -> int:
        """Return the minimum number of replicas of a role that meet the latency targets and have room in the KV cache.

        The result is from 1 to 1000. The workers' throughput and latencies are those of the performance profile,
        multiplied by the learned ratio of observed to profiled values.

        The maximum is `REPLICAS_MOST`; it is also returned if no number is enough.
        """
        holds, enough = self._test(role), 1
        while enough < REPLICAS_MOST and not holds(enough):
            enough *= 2  # the formula's cost grows with the count
        counts = range(enough // 2 + 1, min(enough, REPLICAS_MOST))
        return counts.start + bisect_left(counts, True, key=holds)

    def steps(self, role: Role, replicas: int) -> tuple[Step, ...]:
        """Return one record for the decision: the number of replicas that meet the latency targets by the performance profile.

        Returns an empty tuple if too little was observed to use the profile for the role.

        Args:
            role: Role to calculate.
            replicas: Present number of replicas, which is recorded too.
        """
        if role is not Role.PREFILL and self.workers.learnt.osl is None:
            return ()
        inputs = {
            "replicas": self.needed(role),
            "replicas_now": replicas,
            "tokens_per_s": self.tokens_per_s,
            "worker_tokens_per_s": self.speed,
        }
        return (Step("needed", inputs, None, "by profile and targets"),)

    def limited_by_prefill(self, prefill_replicas: int) -> Projection:
        """Return this projection with the demand limited to the prompts that some number of prefill replicas can compute.

        Decode needs no more replicas than for the answers to these prompts.

        Args:
            prefill_replicas: Number of prefill replicas that compute prompts.
        """
        return replace(self, tokens_per_s=min(self.tokens_per_s, prefill_replicas * self.speed))

    def expected(self, role: Role, replicas: int) -> Expectation:
        """Return the TTFT and ITL that are expected with a number of replicas of a role, in numbers and words.

        Args:
            role: Role to calculate.
            replicas: Number of replicas, >= 1.
        """
        first = None if role is Role.DECODE else self._first_token(role, replicas)
        gaps = None if role is Role.PREFILL else self._gaps(replicas)
        found = [each for each in (first, gaps) if each is not None]
        numbers = {name: value for each in found for name, value in each.numbers.items()}
        return Expectation(numbers, ", ".join(each.words for each in found))

    def _test(self, role: Role) -> Callable[[int], bool]:
        """Return a function that tells whether a number of replicas meets the targets and fits the KV."""
        gaps = None if role is Role.PREFILL else self.workers.itl(self.tokens_per_s)
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
        """Return the number of workers that serve one queue, and its load in erlangs."""
        return queueing.queue_of(role, replicas, self.tokens_per_s / self.speed)

    def _late_share(self, role: Role, replicas: int) -> float:
        servers, load = self._servers(role, replicas)
        if not self.workers.knows_waits:
            return 0.0 if load <= self.workers.busy_most(role, replicas) * servers else 1.0
        return queueing.late_fraction(
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
        in_time = 1.0 - queueing.late_fraction(
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
    """Number of replicas that one role needs to meet the latency targets, and its bounds.

    Attributes:
        role: Role of these numbers.
        needed: Number of replicas that meet the targets, >= 1.
        floor: Minimum number of replicas that the planner keeps, >= 1.
        most: Maximum number of replicas (``maxReplicas``); None means no limit.
        gpus: GPUs of one replica.
    """

    role: Role
    needed: int
    floor: int
    most: int | None
    gpus: int

    @property
    def wanted(self) -> int:
        """Return the number of replicas that the role would get without a GPU budget.

        They are as many as meet the latency targets, within the role's minimum and maximum.
        """
        reachable = self.needed if self.most is None else min(self.needed, self.most)
        return max(self.floor, reachable)


def gpus_of(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> int:
    """Return the total GPUs of all roles with ``counts`` replicas of each.

    Args:
        needs: The roles, with the GPUs of one replica.
        counts: Number of replicas by role.
    """
    return sum(each.gpus * counts[each.role] for each in needs)


def coverage(needs: Sequence[RoleNeed], counts: Mapping[Role, int]) -> float:
    """Return the smallest of the roles' fractions: replicas in ``counts`` divided by replicas that meet the latency targets.

    For a given number of GPUs it is largest if all roles have about the same fraction.

    Args:
        needs: The roles, with the number of replicas that meet the latency targets.
        counts: Number of replicas by role.
    """
    return min(counts[each.role] / each.needed for each in needs)


def divide_budget(needs: Sequence[RoleNeed], budget: int | None) -> dict[Role, int]:
    """Return the number of replicas by role within the GPU budget: the wanted ones if all fit, else the most even split.

    A role wants as many replicas as meet the latency targets, within its minimum and maximum. Starting with the
    minimums, which are kept even above the budget, each further replica goes to the role with the smallest fraction of
    its need (decode if equal), as long as it fits. No other split has a larger smallest fraction (`coverage`), because
    taking one replica away again would leave its role no better off than the role that now has the smallest fraction.
    Example: prefill needs 4 and decode 8 replicas of one GPU; with 6 GPUs they get 2 and 4.

    Args:
        needs: Need of each role.
        budget: GPUs of all roles; None means no limit.
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
"""Minimum factor by which a move of one replica must raise `coverage`.

Chosen: a move costs the GPUs of one replica for a drain and a start-up. With a tenth, the needed ratio must change by
a fifth before a move is reversed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Needs of all roles, and the replicas that the GPU budget and the roles' bounds allow.

    Attributes:
        needs: Need of each role.
        allowed: Number of replicas by role that fits into the budget and the bounds (result of `divide_budget`).
        budget: GPUs that all roles together may hold; None means no limit.
    """

    needs: tuple[RoleNeed, ...]
    allowed: Mapping[Role, int]
    budget: int | None

    @property
    def gpus_needed(self) -> int:
        """Return the GPUs that would be enough for all roles to meet the latency targets."""
        return gpus_of(self.needs, {each.role: each.needed for each in self.needs})

    @property
    def is_budget_short(self) -> bool:
        """Whether the roles together would have more GPUs, within their own bounds, than the budget allows."""
        wanted = gpus_of(self.needs, {each.role: each.wanted for each in self.needs})
        return self.budget is not None and wanted > self.budget

    def of(self, role: Role) -> RoleNeed:
        """Return the number of replicas that one role needs to meet the latency targets, and its bounds.

        The role must be in ``needs``.
        """
        return next(each for each in self.needs if each.role is role)

    def binding(self, role: Role) -> str:
        """Return the manifest keys, with values, that keep a role from the replicas with which it meets the latency targets.

        Such as "maxGpuBudget 8"; empty if no key does.
        """
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
    out_of_hold_down: Collection[Role],
) -> list[RoleProposal]:
    """Return the proposals limited to each role's share of the GPU budget, with explanations if demand exceeds the limits.

    A role's share is the number of replicas that `divide_budget` gives it. The explanation names the limit that binds
    and the expected latency. A role above its share gives up a replica for the other role if this makes the smallest
    fraction of all roles (replicas divided by needed replicas) clearly larger. Returns the proposals unchanged if no
    role grows, or if a role shrinks because of a lowered budget.

    Args:
        proposals: One proposal per role.
        projection: Demand when a replica requested now could be ready.
        config: Bounds and budget.
        gpus: GPUs held by existing workers, draining ones included.
        out_of_hold_down: Roles that neither grew nor shrank recently, so that they are allowed to shrink. Only these
            roles can give up a replica.
    """
    is_lowered = any(each.reason is Reason.ABOVE_BUDGET for each in proposals)
    if is_lowered or not any(each.action is Action.UP for each in proposals):
        return list(proposals)
    needs = tuple(_need(each, projection, config) for each in proposals)
    limits = Limits(needs, divide_budget(needs, config.max_gpu_budget), config.max_gpu_budget)
    free = None if config.max_gpu_budget is None else config.max_gpu_budget - gpus
    giver = _giver(proposals, limits, free, out_of_hold_down)
    explained = [_explained(each, limits, projection) for each in proposals]
    return [
        _giving(each, limits) if each.role is giver else _within_share(each, limits, free)
        for each in explained
    ]


def _need(proposal: RoleProposal, projection: Projection, config: DecideConfig) -> RoleNeed:
    """Return the need of a role: by the profile if it wants to grow, else the replicas that its proposal leaves it."""
    replicas, role = proposal.pool.replicas, proposal.role
    asked = max(1, replicas + proposal.change)
    needed = max(projection.needed(role), replicas + 1) if proposal.action is Action.UP else asked
    floor = config.floor(role, proposal.engine_gpus)
    return RoleNeed(role, needed, floor, config.max_replicas.get(role), proposal.engine_gpus)


def _explained(proposal: RoleProposal, limits: Limits, projection: Projection) -> RoleProposal:
    """Return the proposal with an explanation of the binding limit and the expected latency with the allowed replicas."""
    role = proposal.role
    binds = limits.binding(role)
    if not binds:
        return proposal
    need, allowed = limits.of(role), limits.allowed[role]
    if role is Role.DECODE and Role.PREFILL in limits.allowed:
        projection = projection.limited_by_prefill(limits.allowed[Role.PREFILL])
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
    """Return a scale-up limited to the role's share. A role that has its share leaves the free GPUs to the other role."""
    if proposal.action is not Action.UP or not limits.is_budget_short or free is None:
        return proposal
    share = limits.allowed[proposal.role]
    headroom = share - proposal.pool.replicas
    inputs = {"replicas_needed": limits.of(proposal.role).needed, "replicas": proposal.pool.replicas}
    if headroom >= 1:
        amount = min(headroom, proposal.amount)
        return replace(proposal.passed(Step("budget_share", inputs, share, "pass")), amount=amount)
    if free < proposal.engine_gpus:
        return proposal  # the GPU budget holds it in a later rule
    detail = f"its share of the budget of {limits.budget} is {share}"
    return proposal.held(Reason.GPU_BUDGET_YIELDED, detail, Step("budget_share", inputs, share, "hold"))


def _giver(
    proposals: Sequence[RoleProposal], limits: Limits, free: int | None, out_of_hold_down: Collection[Role]
) -> Role | None:
    """Return the role that gives up a replica for another one. None unless both changes are possible and worth their cost."""
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
    return giver.role if is_feasible and giver.role in out_of_hold_down else None


def _giving(proposal: RoleProposal, limits: Limits) -> RoleProposal:
    share = limits.allowed[proposal.role]
    inputs = {"replicas_needed": limits.of(proposal.role).needed, "replicas": proposal.pool.replicas}
    step = Step("budget_share", inputs, share, "give one up")
    detail = f"{proposal.detail}, but its share of the budget of {limits.budget} is {share}"
    return proposal.changed(Action.DOWN, Reason.BUDGET_SHARE, detail, step)
