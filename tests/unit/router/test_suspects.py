"""Who is suspected of killing workers, and who is convicted: requests, killers and outside kills over the router's real core.

Each request is a `RequestMachine`, the workers are played here: every tick a stream gets a token, a killer ends its worker at
its prompt or at one token of its answer, every time and before it could be cleared, and workers that ended come back as new processes.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from penstock.api import Role, RouterConfig
from penstock.router.core.build import TOGETHER, build_router
from penstock.router.core.request import BROKEN, CONNECT, RequestMachine, RequestPlan
from penstock.router.core.request_steps import (
    AcquireWorker,
    AwaitOutage,
    BuildContinuation,
    Continuation,
    End,
    EndKind,
    QueryOfDeath,
    RelayStream,
    ReleaseWorker,
    ResponseStarted,
    Retry,
    SendRequest,
)
from penstock.router.core.retries import Assignment, FailedTry, RequestTries, RetryRules, RetryScope
from penstock.router.core.suspects import CLEARED_TOKENS, DeathRecord, IsolatedRequests, is_trial
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.arrival import Arrival

TICK_S = 0.1
TOKENS = 40
RESTART_TICKS = 30
NOTICED_TICKS = 3
"""Until the router knows that a worker is gone, to which it may send more until then."""
PATIENCE_TICKS = 20_000


@dataclass(eq=False)
class Played:
    """One request.

    Attributes:
        kills_at: Token of its answer at which it ends its worker, 0: its prompt; None: it is innocent.
        kills: Names of workers that it has ended.
    """

    number: int
    kills_at: int | None
    machine: RequestMachine | None = None
    said: int = 0
    here: int = 0
    has_first_token: bool = False
    assignment: Assignment | None = None
    state: str = ""
    end: End | None = None
    convicted: bool = False
    kills: list = field(default_factory=list)


class Fleet:
    """Workers of one role, and requests over them."""

    def __init__(self, workers, killers, outside):
        config = RouterConfig.model_validate(
            {"breaker": {"consecutiveFailures": 1000}, "retries": {"maxPerRequest": 10}}
        )
        self.core = build_router(config, TOGETHER, is_supervised=True)
        self.rules = RetryRules(self.core.pool, config.retries, 0.0)
        self.rules.budget.take = lambda _now_s: True
        self.now_s = 0.0
        self.incarnations = {f"w{n}": 0 for n in range(workers)}
        self.away = {}
        self.noticed = {}
        self.closing = set()
        self._apply()
        for worker in self.core.pool:
            worker.has_ever_answered = worker.has_answered_since_failure = True
        self.outside = sorted(outside)
        plan = RequestPlan(Role.AGGREGATED, is_split=False, max_continuations=1000, worker_wait_s=1e6)
        self.requests = [Played(n, kills_at) for n, kills_at in enumerate(killers)]
        self.due = []
        self.order = count()
        self.together = 0
        for each in self.requests:
            each.machine = RequestMachine(plan, self.rules, RequestTries(), lambda: self.now_s)

    def run(self):
        """Return once every request has ended; fail where one never does, or where a suspect does not run apart."""
        for each in self.requests:
            self.go_on(each, None)
        for tick in range(PATIENCE_TICKS):
            self.now_s = tick * TICK_S
            self.closing.clear()
            self._restart(tick)
            self._notice(tick)
            self._kill_outside(tick)
            while self.due and self.due[0][0] <= self.now_s:
                self.go_on(heappop(self.due)[2], None)
            self.apply(self.core.tick(self.now_s))
            for each in self.requests:
                self._generate(each, tick)
            self._check_apart()
            if all(each.end is not None for each in self.requests):
                return
        raise AssertionError(
            [(each.number, each.state, each.machine.alone_at) for each in self.requests if not each.end]
        )

    def _check_apart(self):
        """No suspect that is not cleared runs alongside anything that is not."""
        for worker in self.core.pool:
            here = [
                each
                for each in self.requests
                if each.assignment and each.assignment.is_open and each.assignment.worker is worker
            ]
            trials = [each for each in here if is_trial(each.assignment) and not each.assignment.is_cleared]
            others = [each for each in here if not (is_trial(each.assignment))]
            assert len(trials) <= 1
            assert not (trials and others)

    # -- workers

    def _apply(self):
        specs = [
            WorkerSpec(
                name,
                Role.AGGREGATED,
                f"http://{name}",
                supervised=True,
                ready=name not in self.away or name in self.noticed,
                incarnation=str(number),
            )
            for name, number in self.incarnations.items()
        ]
        return self.core.set_workers(specs, self.now_s)

    def _restart(self, tick):
        back = [name for name, at in self.away.items() if at <= tick]
        for name in back:
            del self.away[name]
            self.incarnations[name] += 1
        if back:
            self.apply(self._apply())

    def _notice(self, tick):
        """Have discovery report what has died some ticks ago."""
        gone = [name for name, at in self.noticed.items() if at <= tick]
        for name in gone:
            del self.noticed[name]
        if gone:
            self.apply(self._apply())

    def _kill_outside(self, tick):
        while self.outside and self.outside[0][0] <= tick:
            _, number = self.outside.pop(0)
            name = f"w{number % len(self.incarnations)}"
            on_trial = any(
                each.assignment
                and each.assignment.is_open
                and each.assignment.worker.name == name
                and is_trial(each.assignment)
                and not each.assignment.is_cleared
                for each in self.requests
            )
            # A kill from outside in the second in which a suspect runs alone is the one that cannot be told from its own.
            if not on_trial and name not in self.away:
                self.die(name, tick)

    def die(self, name, tick):
        """End a worker, and all that runs there."""
        self.away[name], self.noticed[name] = tick + RESTART_TICKS, tick + NOTICED_TICKS
        worker = self.core.pool.get(name)
        victims = [
            each
            for each in self.requests
            if each.assignment and each.assignment.is_open and each.assignment.worker is worker
        ]
        self.closing |= {name for _ in victims}
        for each in victims:
            each.assignment.failed(self.now_s, "broke off")
        failure = FailedTry(BROKEN, RetryScope.ANYWHERE, (worker,))
        for each in victims:
            self.go_on(each, failure)

    def _generate(self, each, tick):
        if each.state not in {"sent", "speaks"} or each.assignment.since_s >= self.now_s:
            return
        if each.kills_at is not None and each.said >= each.kills_at:
            each.kills.append(each.assignment.worker.name)
            self.die(each.assignment.worker.name, tick)
            return
        if each.state == "sent":
            self.go_on(each, ResponseStarted(is_stream=True, can_resume=True))
        each.said, each.here = each.said + 1, each.here + 1
        if each.machine.alone_at and each.here >= CLEARED_TOKENS:
            each.machine.clear()
        if each.said >= TOKENS:
            self.go_on(each, None)

    # -- machines

    def apply(self, effects):
        """Take what the core gives to requests that wait."""
        for effect in effects:
            if effect.item.state != "waits":
                continue
            if isinstance(effect, Assignment):
                effect.item.assignment = effect
                self.go_on(effect.item, effect)
            else:
                self.go_on(effect.item, effect.reason)

    def go_on(self, each, answer):  # noqa: C901 - one branch for each kind of step
        """Answer a request's last step, and carry out what follows."""
        while True:
            step = each.machine.advance(answer)
            effects = []
            for done in each.machine.steps:
                if isinstance(done, ReleaseWorker):
                    effects += self.core.release(each.assignment, self.now_s)
                elif isinstance(done, QueryOfDeath):
                    each.convicted = True
            each.machine.steps.clear()
            match step:
                case AcquireWorker():
                    each.state, each.here = "waits", 0
                    machine = each.machine
                    arrival = Arrival(
                        (),
                        100,
                        machine.tries.avoid,
                        is_continuation=each.has_first_token,
                        alone_at=machine.alone_at,
                    )
                    effects += self.core.acquire(each, step.role, arrival, self.now_s, is_retry=step.is_retry)
                case SendRequest():
                    each.state = "sent"
                    worker = each.assignment.worker
                    if worker.name in self.away:
                        # A connection that is being closed breaks; later, and at one that was idle, none opens.
                        reason = BROKEN if worker.name in self.closing else CONNECT
                        each.assignment.failed(self.now_s, reason)
                        answer = FailedTry(reason, RetryScope.ANYWHERE, (worker,))
                        self.apply(effects)
                        continue
                case RelayStream():
                    each.state, each.has_first_token = "speaks", True
                case BuildContinuation():
                    answer = Continuation.READY
                    self.apply(effects)
                    continue
                case Retry() | AwaitOutage():
                    each.state = "pauses"
                    pause_s = 5.0 if isinstance(step, AwaitOutage) else 0.05 * step.pauses
                    heappush(self.due, (self.now_s + pause_s, next(self.order), each))
                case End():
                    each.end, each.state = step, "over"
            self.apply(effects)
            return


@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, CLEARED_TOKENS - 1)),
        min_size=1,
        max_size=10,
    ),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), max_size=4),
)
def test_no_innocent_is_refused_and_a_killer_ends_three_workers_at_most(workers, killers, outside):
    """Whatever dies of what, and when: innocents are served in full, killers are convicted."""
    fleet = Fleet(workers, killers, outside)
    fleet.run()
    for each in fleet.requests:
        event(f"killer: {each.kills_at is not None}")
        assert len(each.kills) <= 3
        if each.kills_at is None:
            assert (each.end.kind, each.said, each.convicted) == (EndKind.SERVED, TOKENS, False)
        else:
            assert (each.end.kind, each.convicted) == (EndKind.FAILED, True)


def test_two_deaths_from_outside_convict_none_of_those_that_were_at_both():
    """As two workers that die minutes apart: all streams of the second that came from the first are suspects."""
    fleet = Fleet(3, [None] * 24, [(40, 0), (60, 1)])
    fleet.run()
    assert [each.end.kind for each in fleet.requests] == [EndKind.SERVED] * 24


@pytest.mark.parametrize("kills_at", [0, 1, 30])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_killer_costs_three_workers_beside_many(workers, kills_at):
    """At its prompt or at a place of its answer; with one worker, too, for which all others wait."""
    fleet = Fleet(workers, [None] * 9 + [kills_at], [])
    fleet.run()
    assert len(fleet.requests[-1].kills) == 3
    assert [each.end.kind for each in fleet.requests[:-1]] == [EndKind.SERVED] * 9


def test_a_suspect_waits_while_one_worker_of_several_serves():
    """It gets none until another one is there for the others."""
    isolated, fleet = IsolatedRequests(Role.AGGREGATED), Fleet(2, [], [])
    one, other = fleet.core.pool
    everything = (one, other)
    assert isolated.free([one], everything, lambda _: True) is None
    assert isolated.closed([one], everything, is_awaited=True) == frozenset()
    assert isolated.free([one, other], everything, lambda _: True) is one
    assert isolated.free([one], [one], lambda _: True) is one
    assert isolated.free([one, other], everything, lambda worker: worker is other) is other


def test_a_request_is_alone_where_it_was_at_a_death():
    """After two of them; cleared, it is as any other."""
    record, fleet = DeathRecord(), Fleet(2, [], [])
    for worker, alone_at in zip(fleet.core.pool, [(), (Role.AGGREGATED,)], strict=True):
        for _ in range(2):
            # The second time it was sent to a worker that is dead already.
            record.record_death(worker)
        assert record.alone_at == alone_at
    record.clear()
    assert record.alone_at == ()


def test_a_worker_that_is_back_before_a_check_misses_it_may_die_again():
    """After a failure it takes no suspect until it answers a check, or five seconds have passed without news of its end."""
    record, fleet = DeathRecord(), Fleet(1, [], [])
    (worker,) = fleet.core.pool
    record.record_death(worker)
    worker.failed(0.0, "broke off", probe=False, proven=True, openings=0)
    assert [worker.may_be_gone(now_s) for now_s in (0.0, 4.9, 5.0)] == [True, True, False]
    worker.confirm_alive()
    assert not worker.may_be_gone(0.1)
    record.record_death(worker)
    assert record.alone_at == (Role.AGGREGATED,)
