"""The dispatch queue: what waits, runs, moves, leaves and comes back, whatever fleet and policy do."""

import pytest
from placement import arrival, compute, placement, send, where

from penstock.router.policy.arrival import KeyDensity, QueuedRequest
from penstock.router.policy.dualmap import CacheAffinity, DualMap, PairChoice
from penstock.router.policy.policies import LeastPending, MinTtft, PrefixCost
from penstock.router.policy.prefixes import Prefix
from penstock.router.policy.rebalance import RebalanceParams, plan_moves
from penstock.router.policy.routing_policy import (
    CACHE_BLOCKS,
    Arrival,
    WorkerLoad,
)


def test_rebalancing_brings_a_queue_within_the_slo():
    """Ten seconds of queue alongside an empty candidate: it takes what it can serve within five, and no more."""
    queues = placement(DualMap(choice=PairChoice.CACHE_AFFINITY, adaptive_prefix=False))
    for item in range(10):
        queues.submit(item, arrival(1, tokens=1000), 0.0)
    busy = where(queues)[0]
    source = queues.workers.eligible[busy]
    for queued in list(source.line.queue.values()):
        source.queued_tokens += 1000 - queued.uncached
        queued.uncached = queued.other_uncached = 1000

    queues.rebalance(0.0, [busy])

    assert queues.moved == 4
    assert source.queued_tokens == 6000
    assert sum(name != busy for name in where(queues).values()) == 4


def test_a_decode_bound_instance_gives_its_queue_away():
    """Work in hand, no prompt computed for longer than T beyond its due: the waiting ones move."""
    queues = placement(DualMap(choice=PairChoice.CACHE_AFFINITY, adaptive_prefix=False), slot_requests=1)
    send(queues, "runs", arrival(1))
    queues.submit("waits", arrival(1), 0.1)
    home = where(queues)["waits"]

    queues.rebalance(2.0)
    assert queues.moved == 0
    queues.rebalance(5.0)
    assert queues.moved == 1
    assert home != where(queues)["waits"]


def test_a_leaving_instance_gives_its_queue_back():
    """What waited is queued again; what runs there ends there."""
    queues = placement(CacheAffinity(), slot_requests=1)
    for item in range(3):
        queues.submit(item, arrival(1), 0.0)
    (handed,) = list(queues.dispatch(0.0))
    rest = [name for name in "abcd" if name != handed.worker]

    queues.set_workers(map(WorkerLoad, rest), 1.0)

    assert queues.waiting == 2
    assert set(where(queues).values()) <= set(rest)
    queues.prefilled(handed.item, 2.0)
    assert queues.waiting == 2


def test_silent_answers_give_their_room_back_when_they_should_have_computed():
    """A whole answer tells nothing before its end: at 1,000 tokens/s, 2,000 tokens are over after 2 s."""
    queues = placement(LeastPending(), names=("a",), slot_requests=1)
    for item in range(2):
        queues.submit(item, Arrival((item,), 2000, is_non_streaming=True), 0.0)
    assert [handed.item for handed in list(queues.dispatch(0.0))] == [0]

    queues.assume_prefilled(1.9)
    assert list(queues.dispatch(1.9)) == []
    queues.assume_prefilled(2.0)
    assert [handed.item for handed in list(queues.dispatch(2.0))] == [1]
    queues.prefilled(0, 5.0, measured=False)
    for item in range(2):
        queues.release(item, 6.0)

    assert queues.workers.load_of("a", 6.0)[0] == 0


def test_a_backlog_is_shared_with_who_joins():
    """What waits is queued again when a worker joins, in order of arrival; what runs stays."""
    queues = placement(LeastPending(), names=("a",), slot_requests=1)
    for item in range(5):
        queues.submit(item, arrival(item), float(item))
    (running,) = list(queues.dispatch(5.0))

    queues.set_workers(map(WorkerLoad, ["a", "b"]), 6.0)

    assert running.item == 0
    assert sorted(where(queues).values()) == ["a", "a", "b", "b"]
    assert [handed.item for handed in list(queues.dispatch(6.0))] == [1]
    assert queues.waiting == 3


def test_without_instances_requests_wait_for_one():
    """Nobody to place them on: they keep their order and their age."""
    queues = placement(MinTtft(), names=())
    queues.submit("x", arrival(1), 0.0)
    queues.submit("y", arrival(2), 1.0)

    assert list(queues.dispatch(2.0)) == []
    assert queues.waiting == 2
    queues.set_workers(map(WorkerLoad, ["a"]), 3.0)
    assert [handed.item for handed in list(queues.dispatch(3.0))] == ["x", "y"]
    assert queues.oldest_s(3.0) == 0.0


def test_bounds_refuse_and_expire():
    """At most two wait, at most ten seconds; a retry meets no bound."""
    queues = placement(MinTtft(), names=(), max_requests=2, max_wait_s=10.0)

    assert queues.submit("x", arrival(1), 0.0)
    assert queues.submit("y", arrival(1), 5.0)
    assert not queues.submit("z", arrival(1), 5.0)
    assert queues.submit("again", arrival(1), 6.0, is_retry=True)
    assert [each.item for each in queues.take_expired(10.0)] == ["x"]
    assert queues.waiting == 2


def test_prompts_of_one_batch_count_together():
    """Four prompts that end at the same moment took that time once."""
    queues = placement(LeastPending(), names=("a",))
    for item in range(4):
        queues.submit(item, arrival(item), 0.0)
    list(queues.dispatch(0.0))
    for item in range(4):
        queues.prefilled(item, 1.0)

    assert queues.workers.eligible["a"].throughput.tokens_per_s == pytest.approx(2048, rel=0.1)


def test_a_retry_waits_before_all_others_and_avoids_its_worker():
    """It has waited once already."""
    queues = placement(LeastPending(), names=("a", "b"), slot_requests=1)
    for item in range(4):
        queues.submit(item, arrival(item), 0.0)
    ran = {handed.item: handed.worker for handed in list(queues.dispatch(0.0))}
    failed, worker = next(iter(ran.items()))
    queues.release(failed, 1.0)
    retried = Arrival((failed,), 512, frozenset({worker}))
    queues.submit(failed, retried, 1.0, is_retry=True)
    other = next(item for item in ran if item != failed)
    queues.prefilled(other, 2.0)

    assert (failed, ran[other]) in [(handed.item, handed.worker) for handed in list(queues.dispatch(2.0))]


def test_what_was_not_computed_is_not_held():
    """A lost request's blocks are unlearnt, those it found stay."""
    queues = placement(LeastPending(), names=("a",))
    queues.submit("first", arrival(1), 0.0)
    queues.submit("second", arrival(1, 2, 3), 0.0)
    list(queues.dispatch(0.0))
    queues.prefilled("first", 1.0)
    queues.release("second", 1.0)

    assert queues.workers.index_of("a").held(arrival(1, 2, 3).prefix) == 1


@pytest.mark.parametrize(
    ("quarantined", "is_restarted", "held"), [(["a"], False, 2), ([], False, 0), (["a"], True, 0)]
)
def test_a_worker_that_only_rests_keeps_its_cache(quarantined, is_restarted, held):
    """Unhealthy for a moment: its cache is still there. Gone, or restarted meanwhile: it is new."""
    queues = placement(LeastPending(), names=("a",))
    compute(queues, "x", arrival(1, 2), 0.0, 1.0)
    queues.set_workers(map(WorkerLoad, ["b"]), 2.0, quarantined=quarantined)
    if is_restarted:
        queues.workers.restarted("a")
        queues.workers.restarted("never seen")
    queues.set_workers(map(WorkerLoad, ["a", "b"]), 3.0)

    assert held == queues.workers.index_of("a").held(arrival(1, 2).prefix)


def test_a_move_must_still_pay_when_its_turn_comes():
    """Later moves are weighed against what earlier ones have left here and brought there."""
    queues = placement(LeastPending(), names=("a", "b"))
    source = queues.workers.eligible["a"]
    for item, tokens in enumerate([100, 3000, 3000, 3000]):
        request = arrival(10 + item, tokens=tokens)
        source.put(QueuedRequest(item, request, 0.0, other="b", other_uncached=tokens))
    aim = RebalanceParams(5.0, 3.0, 0.0, hit_first=False)

    # 9.1 s of work here: the last (9.1 - 3) goes first, then nothing else fits within 5 s on the other side.
    moves = plan_moves(source, queues.workers.eligible, queues.workers.estimates, aim)
    assert [queued.item for queued in moves] == [3]


# ---------------------------------------------------------------------- faults


class Raising(LeastPending):
    """A policy that raises while it is told to."""

    is_broken = True

    def route(self, arrival, workers, estimates):
        """Choose the least loaded worker, or none."""
        if self.is_broken:
            raise ZeroDivisionError
        return super().route(arrival, workers, estimates)


def counts_of(queues):
    """Return what an empty queue has zero of."""
    return queues.waiting, queues.tokens, queues.occupancy.tiers.total(), queues.prompt_tokens.waiting


def test_a_request_for_which_the_policy_raises_leaves_nothing_counted():
    """Neither a place, nor room, nor tokens: a defect in a policy may not fill the queue for good."""
    policy = Raising()
    queues = placement(policy, names=("a",), max_requests=1)
    with pytest.raises(ZeroDivisionError):
        queues.submit(1, Arrival((), 10), 0.0)
    assert counts_of(queues) == (0, 0, 0, 0)
    policy.is_broken = False
    assert queues.submit(2, Arrival((), 10), 0.0)


def test_what_waits_while_the_policy_raises_can_still_leave_and_be_served():
    """Three wait for a worker that goes; the policy raises over the first; one leaves, the others are served later."""
    policy = Raising()
    policy.is_broken = False
    queues = placement(policy, names=("a",))
    for item in range(3):
        queues.submit(item, Arrival((), 10), 0.0)
    policy.is_broken = True
    with pytest.raises(ZeroDivisionError):
        queues.set_workers([WorkerLoad("b")], 1.0)
    queues.cancel(1)
    policy.is_broken = False
    queues.set_workers([WorkerLoad("b")], 2.0)
    assert [each.item for each in queues.dispatch(2.0)] == [0, 2]
    assert counts_of(queues) == (0, 0, 0, 0)


# ---------------------------------------------------------------------- what a worker's cache holds


def test_a_small_cache_is_not_taken_for_a_large_one():
    """20,480 tokens are 40 blocks: of five prompts of ten blocks the first is forgotten, as the worker has.

    A size that is not known is assumed, and a worker that is not there is no error.
    """
    queues = placement(PrefixCost(), names=("a",))
    for name in ("a", "b"):
        queues.workers.fit_cache(name)
    index = queues.workers.index_of("a")
    assert index.capacity == CACHE_BLOCKS

    queues.workers.eligible["a"].load.kv_capacity_tokens = 20_480
    for item in range(5):
        queues.submit(item, arrival(*range(100 * item, 100 * item + 10)), float(item))
    queues.workers.fit_cache("a")
    assert index.capacity == 40
    assert index.held(Prefix(tuple(range(10)))) < 10
    assert index.held(Prefix(tuple(range(400, 410)))) == 10


def test_short_chats_have_more_keys_to_a_token():
    """Eight keys for 500 tokens each: a cache of 100,000 tokens holds 1,600 keys, and a few less at first."""
    density = KeyDensity()
    assert density.keys(100_000) == pytest.approx(195, abs=1)
    for _ in range(3000):
        density.learn(8, 500)
    density.learn(0, 500)
    density.learn(8, 0)
    assert density.keys(100_000) == pytest.approx(1600, rel=0.01)
    assert density.keys(1) == 2
