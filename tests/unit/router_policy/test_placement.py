"""Placing policies and the queues that they fill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import QueueOrder, RouterConfig
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.arrival import QueuedRequest
from penstock.router.policy.dualmap import CacheAffinity, DualMap, DualMapSettings, PairChoice
from penstock.router.policy.policies import KvCost, LeastPending, MinTtft, Preble, PrefixCost
from penstock.router.policy.rebalance import RebalanceParams, plan_moves
from penstock.router.policy.registry import StickySessions, make_policy, policy_names
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

PACE = 1000.0


def placement(placer, names=("a", "b", "c", "d"), **settings):
    """Return queues over some workers, at a known rate of 1,000 tokens/s."""
    queues = DispatchQueue(placer, QueueSettings(tokens_per_s=PACE, **settings))
    queues.set_workers(map(WorkerLoad, names), 0.0)
    return queues


def where(queues):
    """Return the worker of each queued item."""
    return {each.item: each.worker for each in queues.waiting_requests()}


def arrival(*chain, tokens=None):
    """Return a request whose blocks hold 512 tokens each."""
    return Arrival(tuple(chain), len(chain) * 512 if tokens is None else tokens)


@pytest.mark.parametrize("name", policy_names())
def test_equal_prompts_meet_their_cache_while_nothing_is_busy(name):
    """A second equal prompt, once the first is done, goes where its prefix is (load-only policies aside)."""
    queues = placement(make_policy(RouterConfig(policy=name)))
    homes = []
    for item in range(4):
        queues.submit(item, arrival(1, 2, 3), float(item))
        (handed,) = list(queues.dispatch(float(item)))
        homes.append(handed.worker)
        queues.prefilled(item, item + 0.5)

    if name not in {"least-pending", "least-loaded", "round-robin"}:
        assert len(set(homes)) == 1


def test_the_least_pending_instance_wins_whatever_is_cached():
    """The paper's Least Loaded looks at tokens only."""
    queues = placement(LeastPending(), names=("a", "b"))
    queues.submit("x", arrival(1, 2, 3), 0.0)
    queues.submit("y", arrival(1, 2, 3), 0.0)

    assert {"a", "b"} == set(where(queues).values())


def test_min_ttft_weighs_queue_against_hit():
    """512 cached tokens are worth waiting behind 400, not behind 600."""
    queues = placement(MinTtft(), names=("a", "b"))
    queues.submit("warm", arrival(1), 0.0)
    home = where(queues)["warm"]
    list(queues.dispatch(0.0))
    queues.prefilled("warm", 0.512)
    queues.workers.set_peer_load(home, 400)
    queues.submit("near", arrival(1, 7), 1.0)
    assert home == where(queues)["near"]

    queues.cancel("near")
    queues.workers.set_peer_load(home, 600)
    queues.submit("far", arrival(1, 8), 1.0)
    assert home != where(queues)["far"]


def test_preble_follows_the_cache_above_half():
    """Two of three blocks cached: affinity; one of three: load."""
    queues = placement(Preble(), names=("a", "b"))
    queues.submit("warm", arrival(1, 2), 0.0)
    home = where(queues)["warm"]
    queues.submit("most", arrival(1, 2, 3), 0.0)
    queues.submit("little", arrival(1, 8, 9), 0.0)

    assert home == where(queues)["most"]
    assert home != where(queues)["little"]


def test_cache_affinity_ignores_load():
    """One prefix, one worker, however long its queue."""
    queues = placement(CacheAffinity())
    for item in range(5):
        queues.submit(item, arrival(1, 100 + item), 0.0)

    assert len(set(where(queues).values())) == 1


def test_kv_cost_counts_what_runs_with_its_whole_prompt():
    """A prompt that runs, though cached, occupies blocks."""
    queues = placement(KvCost(), names=("a", "b"))
    queues.submit("x", arrival(1, 2), 0.0)
    home = where(queues)["x"]
    list(queues.dispatch(0.0))
    queues.submit("y", arrival(9), 0.0)

    assert home != where(queues)["y"]


def test_dualmap_keeps_to_the_cache_until_the_slo_is_at_risk():
    """At 1,000 tokens/s and an SLO of 5 s the hit is followed up to 5,000 pending tokens, then load decides."""
    queues = placement(DualMap(DualMapSettings(rebalance=False, adaptive_prefix=False)))
    homes = []
    for item in range(14):
        queues.submit(item, arrival(1, 2, 3, 100 + item), 0.0)
        homes.append(where(queues)[item])

    # The first computes 2,048 tokens, each further one 512: number 6 would wait 2,048 + 5 x 512 + 512 = 5,120.
    assert len(set(homes[:6])) == 1
    assert homes[6] != homes[0]
    assert len(set(homes)) == 2


def test_dualmap_breaks_equal_hits_by_load():
    """Nothing cached on either: the less loaded candidate."""
    queues = placement(DualMap(DualMapSettings(adaptive_prefix=False)), names=("a", "b"))
    queues.submit("x", arrival(1), 0.0)
    queues.submit("y", arrival(2), 0.0)

    assert {"a", "b"} == set(where(queues).values())


@pytest.mark.parametrize("choice", PairChoice)
def test_dualmap_never_leaves_its_pair(choice):
    """A prefix has two homes; rebalancing only moves between them."""
    queues = placement(DualMap(DualMapSettings(choice=choice, adaptive_prefix=False)), names=list("abcdefgh"))
    for item in range(200):
        queues.submit(item, arrival(1, 100 + item), 0.0)

    assert len(set(where(queues).values())) <= 2


def test_rebalancing_brings_a_queue_within_the_slo():
    """Ten seconds of queue beside an empty candidate: it takes what it can serve within five, and no more."""
    queues = placement(DualMap(DualMapSettings(choice=PairChoice.CACHE_AFFINITY, adaptive_prefix=False)))
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
    queues = placement(
        DualMap(DualMapSettings(choice=PairChoice.CACHE_AFFINITY, adaptive_prefix=False)), slot_requests=1
    )
    queues.submit("runs", arrival(1), 0.0)
    list(queues.dispatch(0.0))
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


def test_who_decodes_much_is_given_less():
    """Nothing pending or cached anywhere: the one whose answers are out gets the next, until they have ended."""
    queues = placement(PrefixCost(), names=("a", "b"))
    homes = []
    for item in range(4):
        queues.submit(item, arrival(100 + item, tokens=2000), 0.0)
        homes += [each.worker for each in queues.dispatch(0.0)]
        queues.prefilled(item, 0.0)
    assert sorted(homes) == ["a", "a", "b", "b"]

    for item in (each for each in range(4) if homes[each] == "b"):
        queues.release(item, 1.0)
    queues.submit("next", arrival(200, tokens=2000), 1.0)

    assert where(queues)["next"] == "b"


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
    assert queues.submit("again", arrival(1), 6.0, again=True)
    assert [each.item for each in queues.take_expired(10.0)] == ["x"]
    assert queues.waiting == 2


def test_hit_first_serves_the_largest_cached_share_first():
    """Queue order is a setting of its own."""
    queues = placement(LeastPending(), names=("a",), order=QueueOrder.HIT_FIRST, slot_requests=1)
    queues.submit("warm", arrival(1, 2), 0.0)
    list(queues.dispatch(0.0))
    queues.submit("cold", arrival(8, 9), 0.1)
    queues.submit("hit", arrival(1, 2), 0.2)
    queues.prefilled("warm", 1.0)

    (handed,) = list(queues.dispatch(1.0))

    assert handed.item == "hit"


def test_an_idle_instance_takes_one_prompt_however_long():
    """A million tokens exceed every slot, and still are served."""
    queues = placement(MinTtft(), slot_tokens=8192)
    queues.submit("huge", arrival(tokens=1_000_000), 0.0)

    assert [handed.item for handed in list(queues.dispatch(0.0))] == ["huge"]


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
    again = Arrival((failed,), 512, frozenset({worker}))
    queues.submit(failed, again, 1.0, again=True)
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


@pytest.mark.parametrize(("resting", "held"), [(["a"], 2), ([], 0)])
def test_an_instance_that_only_rests_keeps_its_cache(resting, held):
    """Unhealthy for a moment: its cache is still there. Gone: whoever comes back under its name is new."""
    queues = placement(LeastPending(), names=("a",))
    queues.submit("x", arrival(1, 2), 0.0)
    list(queues.dispatch(0.0))
    queues.prefilled("x", 1.0)
    queues.set_workers(map(WorkerLoad, ["b"]), 2.0, quarantined=resting)
    queues.set_workers(map(WorkerLoad, ["a", "b"]), 3.0)

    assert held == queues.workers.index_of("a").held(arrival(1, 2).prefix)


def test_a_restart_forgets_the_cache_even_of_one_that_rests():
    """A new process has an empty cache."""
    queues = placement(LeastPending(), names=("a",))
    queues.submit("x", arrival(1), 0.0)
    queues.set_workers(map(WorkerLoad, []), 1.0, quarantined=["a"])
    queues.workers.restarted("a")
    queues.workers.restarted("never seen")
    queues.set_workers(map(WorkerLoad, ["a"]), 2.0)

    assert next(queues.dispatch(2.0)).item == "x"


def test_a_move_must_still_pay_when_its_turn_comes():
    """Later moves are weighed against what earlier ones have left here and brought there."""
    queues = placement(LeastPending(), names=("a", "b"))
    for item, tokens in enumerate([100, 3000, 3000, 3000]):
        queues.submit(item, arrival(item, tokens=tokens), 0.0)
    source, target = queues.workers.eligible["a"], queues.workers.eligible["b"]
    for queued in [*source.line.queue.values(), *target.line.queue.values()]:
        queues.cancel(queued.item)
    for item, tokens in enumerate([100, 3000, 3000, 3000]):
        source.put(QueuedRequest(item, arrival(10 + item, tokens=tokens), 0.0, "a", tokens, 0, "b", tokens))
        queues._assigned[item] = source.line.queue[item]

    moves = plan_moves(
        source,
        queues.workers.eligible,
        queues.workers.estimates,
        RebalanceParams(5.0, 3.0, 0.0, hit_first=False),
    )

    # 9.1 s of work here: the last (9.1 - 3) goes first, then nothing else fits within 5 s on the other side.
    assert [queued.item for queued in moves] == [3]


def test_sessions_stay_where_they_began():
    """Whatever the policy would say now, as long as the worker is there and has not failed them."""
    queues = placement(StickySessions(LeastPending(), limit=2), names=("a", "b"))
    homes = []
    for item in range(3):
        queues.submit(item, Arrival((item,), 512, session="s"), 0.0)
        homes.append(where(queues)[item])
    queues.submit("failed", Arrival((9,), 512, frozenset(homes[:1]), session="s"), 0.0)
    queues.submit("none", Arrival((8,), 512), 0.0)

    assert len(set(homes)) == 1
    assert where(queues)["failed"] != homes[0]


def test_a_session_stays_where_another_router_began_it():
    """The picker was told of it, and may now choose for the other router."""
    policy = StickySessions(LeastPending(), limit=2)
    queues = placement(policy, names=("a", "b"))
    policy.prompt_queued(Arrival((0,), 512, session="s"), "b", queues.workers.eligible)
    for item in range(3):
        queues.submit(item, Arrival((item,), 512, session="s"), 0.0)

    assert set(where(queues).values()) == {"b"}


def test_few_sessions_are_remembered():
    """Bounded: the quietest is queued again."""
    policy = StickySessions(LeastPending(), limit=2)
    queues = placement(policy, names=("a", "b"))
    for item, session in enumerate("stuv"):
        queues.submit(item, Arrival((item,), 512, session=session), 0.0)

    assert len(policy._workers) <= 2


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.lists(st.integers(0, 5), max_size=5), st.integers(0, 4000)),
        st.tuples(st.just("set"), st.sets(st.sampled_from("abcd")), st.booleans()),
        st.tuples(st.just("take")),
        st.tuples(st.just("prefilled"), st.integers(0, 50)),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("fail"), st.integers(0, 50), st.sampled_from("abcd")),
        st.tuples(st.just("withdraw"), st.integers(0, 50)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("rebalance")),
    ),
    max_size=80,
)


@given(st.sampled_from(policy_names()), EVENTS, st.sampled_from(QueueOrder), st.floats(-1.0, 3.0))
def test_every_request_leaves_exactly_once(policy, events, order, step_s):  # noqa: C901, PLR0912 - one case per event
    """Whatever joins, leaves, flaps, fails, expires or steps back in time: nothing is lost or handed out twice."""
    queues = DispatchQueue(
        StickySessions(make_policy(RouterConfig(policy=policy, ttft_slo_seconds=1.0))),
        QueueSettings(slot_tokens=1000, max_wait_s=20.0, order=order, slo_s=2.0, tokens_per_s=500.0),
    )
    waiting, running, decoding, now_s, count = set(), [], [], 0.0, 0
    for event in events:
        now_s += step_s
        match event:
            case ("submit", chain, tokens):
                queues.submit(count, Arrival(tuple(chain), tokens, session=f"s{tokens % 3}"), now_s)
                waiting.add(count)
                count += 1
            case ("set", names, flaps):
                away = {"a", "b", "c", "d"} - names if flaps else ()
                queues.set_workers(map(WorkerLoad, sorted(names)), now_s, quarantined=away)
            case ("take",):
                for handed in list(queues.dispatch(now_s)):
                    waiting.remove(handed.item)
                    running.append(handed.item)
            case ("prefilled", index) if running:
                decoding.append(running.pop(index % len(running)))
                queues.prefilled(decoding[-1], now_s)
            case ("release", index) if running or decoding:
                item = (running + decoding)[index % (len(running) + len(decoding))]
                (running if item in running else decoding).remove(item)
                queues.release(item, now_s)
            case ("fail", index, worker) if running:
                item = running.pop(index % len(running))
                queues.release(item, now_s)
                queues.submit(item, Arrival((1,), 700, frozenset({worker})), now_s, again=True)
                waiting.add(item)
            case ("withdraw", index) if waiting:
                item = sorted(waiting)[index % len(waiting)]
                waiting.remove(item)
                queues.cancel(item)
            case ("expire",):
                for each in queues.take_expired(now_s):
                    waiting.remove(each.item)
            case ("rebalance",):
                queues.rebalance(now_s)

        assert len(waiting) == queues.waiting
        counts = queues.prompt_tokens
        assert counts.waiting >= len(waiting)
        assert sum(counts.pending.values()) >= len(running)
        assert bool(counts.pending) is bool(running)
        assert counts.admitted >= counts.computed + counts.waiting + sum(counts.pending.values())
    for item in running + decoding:
        queues.release(item, now_s)
    for item in list(waiting):
        queues.cancel(item)

    assert 0 == queues.waiting == queues.tokens == queues.prompt_tokens.waiting
    assert not queues.prompt_tokens.pending
    assert queues.waiting_requests() == []
    queues.set_workers(map(WorkerLoad, "abcd"), now_s)
    assert {queues.workers.load_of(name, now_s)[0] for name in "abcd"} == {0}
