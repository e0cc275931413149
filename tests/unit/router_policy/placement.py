"""Queues of a policy before idle workers, cores driven by hand, and whatever may happen to them."""

from hypothesis import strategies as st

from penstock.api import Role, RouterConfig, SloConfig, Tier, TiersConfig
from penstock.api.router_tiers import TierShares
from penstock.router.core.build import SPLIT, TOGETHER, build_router
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.retries import Assignment, Refuse
from penstock.router.core.waiting import QueueSettings
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.prefixes import MAX_BLOCKS
from penstock.router.policy.registry import StickySessions, make_policy
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

PACE = 1000.0


def placement(policy, names=("a", "b", "c", "d"), *, tokens_per_s=PACE, **settings):
    """Return queues over some workers, at a known rate of 1,000 tokens/s where nothing else is said."""
    queues = DispatchQueue(policy, QueueSettings(**settings))
    if tokens_per_s is not None:
        queues.workers.estimates.throughput.learn_other(tokens_per_s)
    queues.set_workers(map(WorkerLoad, names), 0.0)
    return queues


def where(queues):
    """Return the worker of each queued item."""
    return {each.item: each.worker for each in queues.waiting_requests()}


def arrival(*chain, tokens=None, **more):
    """Return a request whose blocks hold 512 tokens each."""
    return Arrival(tuple(chain), len(chain) * 512 if tokens is None else tokens, **more)


def send(queues, item, request, now_s=0.0):
    """Queue a request and dispatch what can be; return its worker."""
    queues.submit(item, request, now_s)
    list(queues.dispatch(now_s))
    return queues.worker_of(item)


def compute(queues, item, request, now_s=0.0, end_s=None):
    """Send a request whose prompt is computed, at once where nothing else is said; return its worker."""
    worker = send(queues, item, request, now_s)
    queues.prefilled(item, now_s if end_s is None else end_s)
    return worker


NUMBERS, TIERS = st.integers(0, 50), st.sampled_from(Tier)
# Few keys, so that prompts meet; and a prompt as long as any may be.
CHAINS = st.lists(st.integers(0, 5), max_size=5) | st.just(range(MAX_BLOCKS))
TOKENS = st.integers(0, 4000) | st.just(1_000_000)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), CHAINS, TOKENS, TIERS, st.sampled_from(["", "a", "b"])),
        st.tuples(st.just("set"), st.sets(st.sampled_from("abcd")), st.booleans()),
        st.tuples(st.just("fail"), NUMBERS, st.sampled_from("abcd"), TIERS),
        st.tuples(st.sampled_from(["take", "expire", "rebalance", "settings"])),
        st.tuples(st.just("clock"), st.sampled_from([-3600.0, 3600.0])),
        st.tuples(st.sampled_from(["prefilled", "release", "withdraw"]), NUMBERS),
    ),
    max_size=80,
)


class Script:
    """Lets events happen to a queue, and keeps what came of them; without tiers all requests are standard and of no tenant."""

    def __init__(self, policy, order, tiers=None, *, step_s=0.3):
        settings = {"slot_tokens": 1000, "max_wait_s": 20.0, "order": order, "slo_s": 2.0, "tiers": tiers}
        policy = StickySessions(make_policy(RouterConfig(policy=policy), SloConfig(ttft="1s")))
        self.queue = placement(policy, (), tokens_per_s=500.0, **settings)
        self.waiting, self.running, self.decoding, self.log = set(), [], [], []
        self.now_s, self.step_s, self.count = 0.0, step_s, 0

    def step(self, event, *, has_tiers):  # noqa: C901 - one case per event
        """Let one event happen."""
        self.now_s += self.step_s
        queue, now_s, running = self.queue, self.now_s, self.running
        match event:
            case ("submit", chain, tokens, tier, tenant):
                own = {"tier": tier, "tenant": tenant} if has_tiers else {}
                request = arrival(*chain, tokens=tokens, session=f"s{tokens % 3}", **own)
                queue.submit(self.count, request, now_s)
                self.waiting.add(self.count)
                self.count += 1
            case ("set", names, flaps):
                away = {"a", "b", "c", "d"} - names if flaps else ()
                queue.set_workers(map(WorkerLoad, sorted(names)), now_s, quarantined=away)
            case ("take",):
                for each in list(queue.dispatch(now_s)):
                    self.waiting.remove(each.item)
                    running.append(each.item)
                    self.log.append((each.item, each.worker))
            case ("clock", hour_s):
                self.now_s += hour_s
            case ("prefilled", number) if running:
                self.decoding.append(running.pop(number % len(running)))
                queue.prefilled(self.decoding[-1], now_s, cached_tokens=(None, 0, 1000)[number % 3])
            case ("release", number) if held := running + self.decoding:
                item = held[number % len(held)]
                (running if item in running else self.decoding).remove(item)
                queue.release(item, now_s)
            case ("fail", number, worker, tier) if running:
                item = running.pop(number % len(running))
                queue.release(item, now_s)
                own = {"tier": tier} if has_tiers else {}
                queue.submit(item, arrival(1, avoid=frozenset({worker}), **own), now_s, is_retry=True)
                self.waiting.add(item)
            case ("withdraw", number) if self.waiting:
                item = sorted(self.waiting)[number % len(self.waiting)]
                self.waiting.remove(item)
                queue.cancel(item)
            case ("expire",):
                expired = {each.item for each in queue.take_expired(now_s)}
                self.waiting -= expired
                self.log.append(sorted(expired))
            case ("rebalance",):
                queue.rebalance(now_s)
            case ("settings",) if has_tiers:
                shares = TierShares(premium=0.2, standard=0.35, background=0.45)
                queue.set_tiers(TiersConfig(shares=shares))

    def assert_ends_empty(self):
        """With all requests gone nothing is left counted anywhere."""
        queue = self.queue
        for item in self.running + self.decoding:
            queue.release(item, self.now_s)
        for item in self.waiting:
            queue.cancel(item)
        counts = queue.prompt_tokens
        assert 0 == queue.waiting == queue.tokens == counts.waiting == queue.occupancy.tiers.total()
        assert (counts.pending, queue.waiting_requests(), list(queue.workers.central)) == ({}, [], [])
        queue.set_workers(map(WorkerLoad, "abcd"), self.now_s)
        assert {queue.workers.load_of(name, self.now_s)[0] for name in "abcd"} == {0}
        assert not any(worker.line for worker in queue.workers.eligible.values())


class Stage:
    """A core over aggregated workers, or one of prefill and one of decode, driven by hand."""

    def __init__(
        self, *names, policy="least-loaded", slot_tokens=8192, tiers=None, is_split=False, **admission
    ):
        self.now_s = 0.0
        config = RouterConfig.model_validate(
            {
                "policy": policy,
                "admission": {"mode": "token-capacity", **admission},
                "prefillQueue": {"workerTokens": slot_tokens},
                "tiers": {"enabled": tiers is not None, **(tiers or {})},
            }
        )
        self.core = build_router(config, SPLIT if is_split else TOGETHER)
        roles = list(self.core.queues) if is_split else [Role.AGGREGATED] * len(names)
        pairs = zip(names, roles, strict=True)
        specs = [WorkerSpec(name, role, "http://x", supervised=True) for name, role in pairs]
        self.core.set_workers(specs, 0.0)
        # By item: its assignment, and its prompt tokens while they are not computed.
        self.held, self.tokens = {}, {}
        self.count = 0

    def worker(self, name):
        """Return a worker."""
        return self.core.pool.get(name)

    def read(self, name, usage, *, total_blocks=100, block_tokens=16, ranks=()):
        """A worker's metrics are read."""
        worker = self.worker(name)
        worker.kv_usage_fraction, worker.kv_ranks = usage, ranks
        worker.kv_total_blocks, worker.kv_capacity_tokens = total_blocks, total_blocks * block_tokens
        worker.scraped_tokens, worker.metrics_at_s = worker.inflight_tokens, self.now_s
        worker.scraped_uncomputed_tokens = self.core.uncomputed_tokens(worker, self.now_s)
        self.note(self.core.load_read(worker, self.now_s))

    def ask(self, tokens=100, *, is_retry=False, tier=Tier.STANDARD, role=None, is_continuation=False):
        """A request arrives; returns its worker's name, "waits", or its refusal."""
        self.count += 1
        item = self.count
        self.tokens[item] = tokens
        arrival = Arrival((item,), tokens, tier=tier, is_continuation=is_continuation)
        effects = self.core.acquire(item, role or self.core.entry, arrival, self.now_s, is_retry=is_retry)
        self.note(effects)
        refused = [each for each in effects if isinstance(each, Refuse) and each.item == item]
        return refused[0] if refused else self.held[item].worker.name if item in self.held else "waits"

    def note(self, effects):
        """Keep the assignments."""
        for effect in effects:
            if isinstance(effect, Assignment):
                self.held[effect.item] = effect

    def computed(self, item, now_s):
        """A worker has computed a prompt."""
        self.tokens[item] = 0
        self.note(self.core.prefilled(self.held[item], now_s))

    def leave(self, item):
        """A request leaves its worker."""
        self.note(self.core.release(self.held.pop(item), self.now_s))
