"""What the allocator of a GPU pool grants: exact figures, and what holds for any pool, bids and history."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.api import ReclaimBy
from penstock.gpu_pool.allocator import (
    Grant,
    GraphBid,
    PoolState,
    PoolTerms,
    Share,
    adjusted_grants,
    allocate,
    wanted_gpus,
)

STARTUP_S = 60.0
LATER_S = 10_000.0
"""Longer than any start-up."""

sizes = st.sampled_from([1, 2, 4, 8])

orders = st.permutations(list(ReclaimBy)).flatmap(
    lambda every: st.integers(1, len(every)).map(lambda count: tuple(every[:count]))
)


def bid(wanted: int = 0, **changes) -> GraphBid:
    """Return the bid of a graph that wants this many replicas of one GPU, holds none and may hold 1,000."""
    fields = {
        "guaranteed": 0,
        "priority": 0,
        "max_gpus": 1000,
        "replicas": (1,) * wanted,
        "held": 0,
        "serial": 0,
    }
    return GraphBid(**{**fields, **changes})


def settled(
    pool: PoolTerms, graphs: Mapping[str, GraphBid], state: PoolState | None = None, *, now_s: float = 0.0
) -> tuple[Mapping[str, Grant], PoolState, Mapping[str, GraphBid]]:
    """Allocate until nothing changes, with graphs that do at once what they are granted."""
    state = state or {}
    while True:
        now_s += LATER_S
        grants, after = allocate(pool, graphs, state, now_s)
        graphs = {
            name: GraphBid(
                b.guaranteed, b.priority, b.max_gpus, b.replicas, grants[name].gpus, grants[name].serial
            )
            for name, b in graphs.items()
        }
        if after == state:
            return grants, state, graphs
        state = after


def gpus(grants: Mapping[str, Grant]) -> dict[str, int]:
    """Return the GPUs of each grant."""
    return {name: grant.gpus for name, grant in grants.items()}


@st.composite
def pools(draw, *, size=sizes):
    """Draw a pool, whose guarantees fit, and the bids of graphs that hold nothing."""
    total = draw(st.integers(0, 48))
    left, graphs = total, {}
    for name in "abcde"[: draw(st.integers(1, 5))]:
        guaranteed = draw(st.integers(0, left))
        left -= guaranteed
        graphs[name] = bid(
            guaranteed=guaranteed,
            priority=draw(st.integers(0, 2)),
            max_gpus=draw(st.integers(0, 64)),
            replicas=tuple(draw(st.lists(size, max_size=12))),
        )
    return PoolTerms(total, STARTUP_S, draw(orders)), graphs


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [
        # Nothing is wanted.
        ({"a": bid(0), "b": bid(0)}, {"a": 0, "b": 0}),
        # There is enough for both.
        ({"a": bid(3), "b": bid(5)}, {"a": 3, "b": 5}),
        # Equal wants share evenly.
        ({"a": bid(9), "b": bid(9)}, {"a": 4, "b": 4}),
        # What one leaves is lent to the other.
        ({"a": bid(1, guaranteed=4), "b": bid(9, guaranteed=4)}, {"a": 1, "b": 7}),
        # The guarantee comes before another's priority.
        ({"a": bid(9, guaranteed=3), "b": bid(9, priority=1)}, {"a": 3, "b": 5}),
        # What is left goes to the highest priority.
        ({"a": bid(9), "b": bid(6, priority=1)}, {"a": 2, "b": 6}),
        # No graph gets more than its most.
        ({"a": bid(9, max_gpus=2), "b": bid(9, max_gpus=3, guaranteed=5)}, {"a": 2, "b": 3}),
        # Replicas are whole: the third of three GPUs does not fit, and a smaller one takes the rest.
        ({"a": bid(replicas=(3, 3, 3), priority=1), "b": bid(9)}, {"a": 6, "b": 2}),
        # What borrows counts, not what is held: a with a guarantee of 2 borrows as much as b.
        ({"a": bid(9, guaranteed=2), "b": bid(9)}, {"a": 5, "b": 3}),
    ],
)
def test_a_pool_of_eight_is_divided_by_guarantee_priority_and_borrowed_gpus(graphs, expected):
    """Guarantees first, then the highest priority, then whoever borrows least; whole replicas within each graph's most."""
    grants, _ = allocate(PoolTerms(8, STARTUP_S), graphs, {}, 0.0)
    assert gpus(grants) == expected


def test_a_guarantee_is_granted_when_the_borrower_has_given_back():
    """The lender's grant rises by what the borrower's workers leave, and not before."""
    pool = PoolTerms(4, STARTUP_S)
    lent = {"owner": bid(0, guaranteed=3), "borrower": bid(4)}
    _, state, lent = settled(pool, lent)
    now_s = 2 * LATER_S * 2
    wanting = bid(3, guaranteed=3, serial=state["owner"].serial)
    graphs = {"owner": wanting, "borrower": lent["borrower"]}

    grants, state = allocate(pool, graphs, state, now_s)
    assert (grants["borrower"].gpus, grants["owner"].gpus, grants["owner"].target) == (1, 0, 3)

    serial = grants["borrower"].serial
    graphs["borrower"] = bid(4, held=2, serial=serial)
    grants, state = allocate(pool, graphs, state, now_s)
    assert grants["owner"].gpus == 2, (
        "two of four are left by the borrower's draining worker and its last one"
    )

    graphs["borrower"] = bid(4, held=1, serial=serial)
    grants, state = allocate(pool, graphs, state, now_s)
    assert grants["owner"].gpus == 3


def test_a_lowered_grant_counts_in_full_until_it_is_acknowledged():
    """A report from before the grant was lowered frees nothing: the graph may still grow."""
    pool = PoolTerms(4, STARTUP_S)
    state = {"a": Share(4, 7, 4), "b": Share(0, 0, 0)}
    unaware = {"a": bid(0, held=0, serial=7), "b": bid(4)}
    grants, state = allocate(pool, unaware, state, LATER_S)
    assert gpus(grants) == {"a": 0, "b": 0}
    grants, state = allocate(pool, unaware, state, LATER_S)
    assert gpus(grants) == {"a": 0, "b": 0}
    grants, _ = allocate(pool, {**unaware, "a": bid(0, serial=grants["a"].serial)}, state, LATER_S)
    assert gpus(grants) == {"a": 0, "b": 4}


def test_a_grant_that_rises_again_still_counts_as_the_larger_one_before():
    """Lowered from four to none and raised to two before it was heard of: the graph may still hold four."""
    pool, state = PoolTerms(4, STARTUP_S), {"a": Share(0, 8, 4), "b": Share(0, 0, 0)}
    graphs = {"a": bid(2, serial=6, guaranteed=2), "b": bid(4)}
    _, state = allocate(pool, graphs, state, LATER_S)
    assert (state["a"].gpus, state["a"].max_held) == (2, 4)
    grants, _ = allocate(pool, graphs, state, LATER_S)
    assert gpus(grants) == {"a": 2, "b": 0}


def test_the_odd_gpu_stays_where_it_is():
    """Three GPUs for two graphs of equal wants: whoever has two keeps them."""
    state = {"a": Share(1, 1, 1), "b": Share(2, 1, 2)}
    graphs = {"a": bid(4, held=1, serial=1), "b": bid(4, held=2, serial=1)}
    grants, _ = allocate(PoolTerms(3, STARTUP_S), graphs, state, LATER_S)
    assert gpus(grants) == {"a": 1, "b": 2}


def test_what_becomes_free_goes_first_to_who_lacks_of_its_guarantee_then_by_priority():
    """Two of six GPUs are free yet: the guarantee first; four: then the higher priority, though its name comes last."""
    graphs = {"a": bid(2), "b": bid(2, priority=1), "c": bid(2, guaranteed=2)}
    state = {name: Share() for name in graphs}
    two, _ = allocate(PoolTerms(6, STARTUP_S), graphs, {**state, "gone": Share(4, 1, 4)}, 0.0)
    assert gpus(two) == {"a": 0, "b": 0, "c": 2}
    targets = {"a": 2, "b": 2, "c": 2}
    partly = {**state, "gone": Share(2, 1, 2)}
    assert gpus(adjusted_grants(PoolTerms(6, STARTUP_S), graphs, partly, targets, 0.0)[0]) == {
        "a": 0,
        "b": 2,
        "c": 2,
    }


def test_a_graph_that_is_missing_keeps_what_it_may_hold():
    """Of four GPUs a graph that cannot be seen keeps its three; the others get one, not a target that needs its GPUs."""
    state = {"lost": Share(2, 5, 3)}
    grants, after = allocate(PoolTerms(4, STARTUP_S), {"b": bid(4, guaranteed=4)}, state, 0.0)
    assert (grants["b"].gpus, grants["b"].target) == (1, 1)
    assert after["lost"] == state["lost"]


def test_a_pool_that_shrinks_takes_from_borrowers_first():
    """Six of eight GPUs are left: the guarantee of four stays, the borrower gives the two."""
    graphs = {"a": bid(4, guaranteed=4), "b": bid(4)}
    _, state, graphs = settled(PoolTerms(8, STARTUP_S), graphs)
    grants, _ = allocate(PoolTerms(6, STARTUP_S), graphs, state, 10 * LATER_S)
    assert gpus(grants) == {"a": 4, "b": 2}


def test_a_step_back_of_the_clock_delays_nobody():
    """A share whose last change is in the future counts as old: its GPUs can be taken back and given."""
    state = {"a": Share(4, 1, 4, gained_s=1e9), "b": Share(0, 1, 0, lost_s=1e9)}
    graphs = {"a": bid(4, held=4, serial=1), "b": bid(4, serial=1, priority=1)}
    grants, _ = allocate(PoolTerms(4, STARTUP_S), graphs, state, 0.0)
    assert (grants["a"].gpus, grants["b"].target) == (0, 4)


@given(pools())
def test_every_graph_gets_its_guarantee_and_the_pool_holds_them(drawn):
    """Once all is settled each graph has the replicas that fit into its guarantee, within its most, none more than it wants."""
    pool, graphs = drawn
    grants, _, _ = settled(pool, graphs)
    assert sum(gpus(grants).values()) <= pool.gpus
    for name, each in graphs.items():
        whole = bid(replicas=each.replicas, max_gpus=min(each.max_gpus, each.guaranteed))
        assert wanted_gpus(whole) <= grants[name].gpus <= min(each.max_gpus, sum(each.replicas))


@given(pools())
def test_no_gpu_is_free_while_a_graph_wants_it_and_may(drawn):
    """Once all is settled, no graph's next replica fits into what is free and into its most."""
    pool, graphs = drawn
    grants, _, _ = settled(pool, graphs)
    free = pool.gpus - sum(gpus(grants).values())
    for name, each in graphs.items():
        larger = bid(replicas=each.replicas, max_gpus=min(each.max_gpus, grants[name].gpus + free))
        assert wanted_gpus(larger) == grants[name].gpus


@given(pools())
def test_the_same_wants_change_nothing(drawn):
    """A settled pool stays as it is, whatever time passes; `settled` returns, so it is reached."""
    pool, graphs = drawn
    grants, state, held = settled(pool, graphs)
    for now_s in (0.0, 5 * LATER_S, 1e7):
        again, after = allocate(pool, held, state, now_s)
        assert (gpus(again), after) == (gpus(grants), state)


@given(pools(), st.randoms(use_true_random=False))
def test_the_order_of_graphs_does_not_matter(drawn, shuffle: random.Random):
    """The same graphs in another order get the same."""
    pool, graphs = drawn
    names = list(graphs)
    shuffle.shuffle(names)
    assert settled(pool, {name: graphs[name] for name in names})[0] == settled(pool, graphs)[0]


@given(st.integers(2, 8), st.integers(2, 12), st.integers(0, 64), orders)
def test_equal_wants_get_equal_shares(count, each, total, order):
    """Jain's index of what graphs of one priority and equal wants get is at least .95 where two GPUs each are there."""
    assume(total >= 2 * count)
    graphs = {f"g{index}": bid(each) for index in range(count)}
    shares = list(gpus(settled(PoolTerms(total, STARTUP_S, order), graphs)[0]).values())
    assert sum(shares) ** 2 / (count * sum(share**2 for share in shares)) >= 0.95


@given(pools(size=st.just(1)), st.integers(0, 16))
def test_a_larger_pool_takes_from_no_graph(drawn, more):
    """With replicas of one size, GPUs that are added leave every graph at least what it had."""
    pool, graphs = drawn
    before, state, held = settled(pool, graphs)
    after, _, _ = settled(replace(pool, gpus=pool.gpus + more), held, state)
    assert all(after[name].gpus >= before[name].gpus for name in graphs)


@st.composite
def borrowers(draw):
    """Draw graphs that borrow all that they want, the GPUs that the pool loses, and the graphs' shares."""
    graphs, state = {}, {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        borrowed = draw(st.integers(0, 6))
        graphs[name] = bid(
            borrowed, priority=draw(st.integers(0, 2)), held=draw(st.integers(0, borrowed)), serial=1
        )
        state[name] = Share(borrowed, 1, borrowed, float(draw(st.integers(0, 9))))
    total = sum(share.gpus for share in state.values())
    return graphs, state, total, draw(st.integers(0, total))


def lost_by(drawn, *order: ReclaimBy) -> dict[str, int]:
    """Return what each graph loses when the pool shrinks."""
    graphs, state, total, lost = drawn
    grants, _ = allocate(PoolTerms(total - lost, STARTUP_S, order), graphs, state, LATER_S)
    found = {name: state[name].gpus - grants[name].gpus for name in graphs}
    assert sum(found.values()) == lost
    return found


@given(borrowers(), orders)
def test_who_gives_back_first_is_the_pools_order(drawn, order):
    """Who loses anything while another keeps a GPU that it borrows is not an earlier in the order than that one."""
    graphs, state, _, _ = drawn
    found = lost_by(drawn, *order)
    for name, gives in found.items():
        for other in graphs:
            kept = state[other].gpus - found[other]
            if name == other or not gives or not kept:
                continue
            if order[0] is ReclaimBy.PRIORITY:
                mine, others = graphs[name].priority, graphs[other].priority
                assert mine < others or (mine == others and state[name].gpus - gives >= kept - 1)
            elif order[0] is ReclaimBy.NEWEST:
                assert state[name].gained_s >= state[other].gained_s
            elif state[name].gpus - gives < graphs[name].held:
                assert kept <= graphs[other].held, "a worker drains while a grant that is not used stays"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["priority", "idle", "newest"], {"low": 4, "old": 0, "new": 0, "idle": 1}),
        (["priority", "newest"], {"low": 4, "old": 0, "new": 1, "idle": 0}),
        (["newest"], {"low": 0, "old": 0, "new": 4, "idle": 1}),
        (["newest", "idle"], {"low": 0, "old": 0, "new": 4, "idle": 1}),
        (["idle"], {"low": 2, "old": 0, "new": 0, "idle": 3}),
    ],
)
def test_five_gpus_come_back_from_different_borrowers(order, expected):
    """Each of four graphs borrows four; one has a low priority, one was granted last, one does not use three of them."""
    graphs = {name: bid(4, held=4, serial=1, priority=1) for name in ("old", "new", "idle")}
    graphs["idle"] = replace(graphs["idle"], held=1)
    graphs["low"] = bid(4, held=4, serial=1)
    granted_s = {"low": 10.0, "old": 10.0, "idle": 20.0, "new": 30.0}
    state = {name: Share(4, 1, 4, at_s) for name, at_s in granted_s.items()}
    assert lost_by((graphs, state, 16, 5), *map(ReclaimBy, order)) == expected


@settings(max_examples=60)
@given(st.integers(4, 24), orders, st.data())
def test_within_one_start_up_a_graph_regains_only_what_nobody_else_wants(total, order, data):
    """Without guarantees, and with a pool that stays: one that gained loses nothing but by its own bid."""
    pool, names = PoolTerms(total, STARTUP_S, order), "abc"
    priorities = {name: data.draw(st.integers(0, 2)) for name in names}
    state: PoolState = {}
    granted = dict.fromkeys(names, Grant(0, 0, 0, 0))
    gained, lost = dict.fromkeys(names, -LATER_S), dict.fromkeys(names, -LATER_S)
    now_s = 0.0
    for _ in range(12):
        now_s += data.draw(st.integers(1, 40))
        graphs = {
            name: bid(
                priority=priorities[name],
                replicas=tuple(data.draw(st.lists(st.sampled_from([1, 2]), max_size=12))),
                held=granted[name].gpus,
                serial=granted[name].serial,
            )
            for name in names
        }
        after, state = allocate(pool, graphs, state, now_s)
        for name in names:
            had, has = granted[name].gpus, after[name].gpus
            if has > had and now_s - lost[name] < STARTUP_S:
                others = [each for each in names if now_s - lost[each] >= STARTUP_S]
                assert not any(_takes(graphs[each], after[each].target, has - had) for each in others)
            if has > had:
                gained[name] = now_s
            elif has < min(had, _own(graphs[name], had)):
                assert now_s - gained[name] >= STARTUP_S
                lost[name] = now_s
        granted = dict(after)


def _takes(each: GraphBid, gpus: int, more: int) -> bool:
    """Return whether a graph with this many GPUs wants a replica that fits into ``more``."""
    return wanted_gpus(bid(replicas=each.replicas, max_gpus=gpus + more)) > gpus


def test_a_graph_that_lost_takes_a_gpu_again_that_stands_free():
    """The other one's want lasted a second; without it the GPU would stand free for a start-up."""
    pool = PoolTerms(4, STARTUP_S)
    held = {"a": bid(4, held=4), "b": bid(0, priority=1)}
    first, state = allocate(pool, held, {}, 0.0)
    assert gpus(first) == {"a": 4, "b": 0}
    taken, state = allocate(pool, held | {"b": bid(1, priority=1)}, state, LATER_S)
    assert taken["a"].gpus == 3
    drained = {
        "a": bid(4, held=3, serial=taken["a"].serial),
        "b": bid(0, priority=1, serial=taken["b"].serial),
    }
    again, _ = allocate(pool, drained, state, LATER_S + 1.0)
    assert gpus(again) == {"a": 4, "b": 0}


def _own(each: GraphBid, gpus: int) -> int:
    """Return what a graph would keep of its GPUs by its own bid."""
    return wanted_gpus(bid(replicas=each.replicas, max_gpus=gpus))
