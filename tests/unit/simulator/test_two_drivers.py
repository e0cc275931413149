"""One script of events through both drivers of the router's state machine: futures on a loop, and jobs in virtual time."""

import asyncio
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import Role, RouterConfig
from penstock.router.admission import Admission
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.retries import Assignment, FailedTry, RequestTries, RetryRules, RetryScope
from penstock.router.core.worker import WorkerSize, WorkerSpec
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.prefixes import BLOCK_TOKENS
from penstock.router.policy.registry import policy_names
from penstock.router.policy.routing_policy import CACHE_BLOCKS, AssignTime
from penstock.simulator.jobs import Job
from penstock.simulator.routing import VirtualRouter
from penstock.workload.traces import TraceRequest

SLOT_TOKENS, MAX_WAITING, MAX_WAIT_S, SLO_S = 1000, 4, 10.0, 2.0


class Server:
    """A worker that exists."""

    incarnation = 0

    def __init__(self, name):
        self.name = name
        self.role = Role.DECODE if name.startswith("d") else Role.PREFILL


class Script:
    """What both drivers share: requests, workers, and a log of what became of whom after each event.

    A driver has ``acquire(index, role, is_retry)``, ``set_workers()``, ``prefilled(index)``, ``finished(index)``,
    ``lost(index)``, ``may_retry(index)`` and ``tick()``; it calls `note` for every effect.
    """

    def __init__(self):
        self.now_s = 0.0
        self.arrivals = []
        self.held = {}
        self.servers = []
        self.log = []

    def note(self, index, outcome):
        """Keep one effect: the name of a worker, or a refusal."""
        self.log[-1].append((index, outcome))
        if outcome.isupper():
            self.held.pop(index, None)
        else:
            self.held[index] = outcome

    def step(self, event, driver):
        """Let one event happen; indexes are taken modulo what there is."""
        self.log.append([])
        match event:
            case ("workers", names):
                self.servers = [Server(name) for name in sorted(names)]
                self.change(driver)
            case ("arrive", chain, tokens):
                self.arrivals.append((tuple(chain), tokens))
                driver.acquire(len(self.arrivals) - 1, Role.PREFILL, is_retry=False)
            case ("work", number) if self.held:
                index = sorted(self.held)[number % len(self.held)]
                if self.held.pop(index).startswith("p"):
                    driver.prefilled(index)
                    driver.acquire(index, Role.DECODE, is_retry=False)
                else:
                    driver.finished(index)
            case ("tick", after_s):
                self.now_s += after_s
                driver.tick()

    def change(self, driver):
        """Take over the workers; what runs at those that are gone fails and may be tried again."""
        names = {each.name for each in self.servers}
        driver.set_workers()
        failed = sorted(index for index, worker in self.held.items() if worker not in names)
        for index in failed:
            del self.held[index]
            driver.lost(index)
        for index in failed:
            if driver.may_retry(index):
                driver.acquire(index, Role.PREFILL, is_retry=True)


def section(policy):
    """Return a router section with small bounds."""
    queue = {"workerTokens": SLOT_TOKENS, "maxRequests": MAX_WAITING, "maxWaitSeconds": MAX_WAIT_S}
    return RouterConfig.model_validate({"policy": policy, "prefillQueue": queue})


class Virtual:
    """The simulator's driver."""

    def __init__(self, script, policy):
        self.script = script
        size = WorkerSize(CACHE_BLOCKS * BLOCK_TOKENS)
        self.router = VirtualRouter(section(policy), {Role.PREFILL: size, Role.DECODE: size})
        self.jobs = {}

    def apply(self, effects):
        """Do what the router has decided."""
        for effect in effects:
            if not isinstance(effect, Assignment):
                self.script.note(effect.item.index, effect.reason.name)
                continue
            effect.item.assignment = effect
            self.script.note(effect.item.index, effect.worker.name)

    def set_workers(self):
        """Say who serves."""
        self.apply(self.router.set_workers(self.script.servers, self.script.now_s))

    def acquire(self, index, role, *, is_retry):
        """Ask for a worker."""
        chain, tokens = self.script.arrivals[index]
        job = self.jobs.setdefault(index, Job(index, TraceRequest(0.0, tokens, 1, None, 1), chain))
        now_s = self.script.now_s
        decodes = role is Role.DECODE
        self.apply(
            self.router.acquire_decode(job, now_s)
            if decodes
            else self.router.acquire(job, now_s, is_retry=is_retry)
        )

    def prefilled(self, index):
        """End a prefill."""
        job, now_s = self.jobs[index], self.script.now_s
        effects = self.router.prefilled(job, now_s)
        job.assignment.succeeded()
        self.apply(effects + self.router.release(job, now_s))

    def finished(self, index):
        """End an answer."""
        self.jobs[index].assignment.succeeded()
        self.apply(self.router.release(self.jobs[index], self.script.now_s))

    def lost(self, index):
        """Let a worker die under a request."""
        self.router.lost(self.jobs[index], self.script.now_s)

    def may_retry(self, index):
        """Ask whether a failed request is tried again."""
        job = self.jobs[index]
        failure = FailedTry("upstream_broken", RetryScope.ANYWHERE, (job.assignment.worker,))
        return self.router.retries.retry(job.tries, failure, self.script.now_s, left_s=inf) is not None

    def tick(self):
        """Let time act."""
        self.apply(self.router.expire(self.script.now_s) + self.router.tick(self.script.now_s))


class Live:
    """The event loop's driver, with requests that hold assignments as the proxy's handler does."""

    def __init__(self, script, policy):
        self.script = script
        config = section(policy)
        core = build_router(config, SPLIT, is_supervised=True)
        self.reads_prompts = core.entry_queue.policy.assigns is AssignTime.ON_ARRIVAL
        self.admission = Admission(core, lambda: script.now_s)
        self.rules = RetryRules(core.pool, config.retries, 0.0)
        self.tries = {}
        self.assignments = {}
        self.waiting = {}

    async def settle(self):
        """Let the loop run, and keep what became of those that waited."""
        for _ in range(3):
            await asyncio.sleep(0)
        for index in [index for index, task in self.waiting.items() if task.done()]:
            task = self.waiting.pop(index)
            error = task.exception()
            if error is not None:
                self.script.note(index, error.reason.name)
                continue
            self.assignments[index] = task.result()
            self.script.note(index, task.result().worker.name)

    def set_workers(self):
        """Say who serves."""
        self.admission.set_workers(
            WorkerSpec(each.name, each.role, "", supervised=True, incarnation="0")
            for each in self.script.servers
        )

    def acquire(self, index, role, *, is_retry):
        """Ask for a worker."""
        if role is Role.PREFILL and not is_retry:
            self.rules.budget.request_arrived()
        chain, tokens = self.script.arrivals[index]
        tries = self.tries.setdefault(index, RequestTries())
        reads = self.reads_prompts and role is Role.PREFILL
        arrival = Arrival(chain if reads else (), tokens, tries.avoid)
        self.waiting[index] = asyncio.ensure_future(self.admission.wait(role, arrival, is_retry=is_retry))

    def prefilled(self, index):
        """End a prefill."""
        assignment = self.assignments[index]
        assignment.succeeded()
        self.admission.prefilled(assignment, 0)
        self.admission.release(assignment)

    def finished(self, index):
        """End an answer."""
        self.assignments[index].succeeded()
        self.admission.release(self.assignments[index])

    def lost(self, index):
        """Let a worker die under a request."""
        self.assignments[index].failed(self.script.now_s, "broke off")
        self.admission.release(self.assignments[index])

    def may_retry(self, index):
        """Ask whether a failed request is tried again."""
        failure = FailedTry("upstream_broken", RetryScope.ANYWHERE, (self.assignments[index].worker,))
        return self.rules.retry(self.tries[index], failure, self.script.now_s, left_s=inf) is not None

    def tick(self):
        """Let time act."""
        self.admission.tick()


def run_virtual(policy, events):
    """Return what became of whom after each event, in virtual time."""
    script = Script()
    driver = Virtual(script, policy)
    for event in events:
        script.step(event, driver)
    return [sorted(each) for each in script.log]


async def run_live(policy, events):
    """Return the same of the live driver."""
    script = Script()
    driver = Live(script, policy)
    for event in events:
        script.step(event, driver)
        await driver.settle()
    for task in driver.waiting.values():
        task.cancel()
    await asyncio.gather(*driver.waiting.values(), return_exceptions=True)
    for assignment in driver.assignments.values():
        driver.admission.release(assignment)
    assert {each.inflight_requests for each in driver.admission.core.pool} <= {0}
    assert all(not queue.waiting for queue in driver.admission.core.queues.values())
    return [sorted(each) for each in script.log]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.lists(st.integers(0, 4), max_size=4), st.integers(1, 1500)),
        st.tuples(st.just("work"), st.integers(0, 9)),
        st.tuples(st.just("tick"), st.sampled_from([0.1, 1.0, 6.0])),
        st.tuples(st.just("workers"), st.sets(st.sampled_from(["p1", "p2", "p3", "d1", "d2"]))),
    ),
    max_size=40,
)
START = ("workers", {"p1", "p2", "d1", "d2"})


@settings(deadline=None)
@given(st.sampled_from(policy_names()), EVENTS)
def test_both_drivers_do_the_same(policy, events):
    """Every request gets the same worker, or the same refusal, after the same event, whichever driver runs."""
    events = [START, *events]

    assert run_virtual(policy, events) == asyncio.run(run_live(policy, events))


def test_a_script_reaches_every_effect():
    """Dispatch in both stages, a retry elsewhere, a full queue and a time-out: the property above is not empty."""
    arrive = ("arrive", [1, 2], 1200)
    events = [
        START,
        *[arrive] * 7,
        ("work", 0),
        ("workers", {"p1", "d1", "d2"}),
        ("tick", 6.0),
        ("tick", 6.0),
    ]

    log = run_virtual("least-loaded", events)

    assert log == asyncio.run(run_live("least-loaded", events))
    outcomes = {outcome for each in log for _, outcome in each}
    assert outcomes >= {"p1", "p2", "d1", "QUEUE_FULL", "QUEUE_TIMEOUT"}
