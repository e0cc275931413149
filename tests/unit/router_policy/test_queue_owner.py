"""Which routers keep queues, and which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.policy.queue_owner import QueueOwners, RouterState, owner_count, owners_among

NAMES = st.sets(st.integers(0, 40).map("router-{}".format), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("cores", "before", "expected"),
    [
        (0.0, 0, 1),
        (0.7, 1, 1),
        (0.71, 1, 2),
        (1.5, 1, 3),
        (9.0, 3, 4),
        (1.3, 3, 3),
        (0.97, 3, 2),
        (0.1, 4, 1),
    ],
)
def test_as_few_decide_as_processors_allow(cores, before, expected):
    """One for each 0.7 cores that four routers use together; fewer again only clearly below."""
    assert owner_count(4, cores, before) == expected


@given(st.integers(1, 20), st.floats(0, 100), st.integers(0, 20))
def test_a_count_is_kept_where_nothing_changes(routers, cores, before):
    """The same load asks for the same number again: routers that agree once agree on."""
    count = owner_count(routers, cores, before)
    assert 1 <= count <= routers
    assert owner_count(routers, cores, count) == count


def test_the_oldest_decide_because_they_know_most():
    """A new one decides about nothing while one is enough; of two that began together the name decides."""
    old, new, twin = RouterState("z", 1.0, 0.3), RouterState("a", 2.0, 0.1), RouterState("b", 1.0, 0.1)
    assert owners_among([new, old], 1) == ("z",)
    assert owners_among([new, old, twin], 1) == ("b",)
    assert owners_among([RouterState("a", 2.0, 0.8), old], 1) == ("z", "a")
    assert owners_among([], 0) == ()


def test_a_sole_router_keeps_every_queue():
    """Also before a worker is chosen; without routers nobody is named."""
    owners = QueueOwners()
    assert owners.owner("w") is None
    owners.set_owners(["a"])
    assert owners.owner("") == owners.owner("w") == "a"
    owners.set_owners(["a", "b"])
    assert owners.owner("") is None


@given(NAMES, st.lists(st.text(min_size=1), min_size=1, max_size=60))
def test_routers_agree_without_a_word(names, workers):
    """Whatever the order in which they learnt the names, two name the same keeper of each queue."""
    one, two = QueueOwners(), QueueOwners()
    one.set_owners(sorted(names))
    for name in sorted(names, reverse=True):
        two.set_owners([name])
    two.set_owners(names)
    assert [one.owner(worker) for worker in workers] == [two.owner(worker) for worker in workers]


def test_a_lost_router_moves_its_own_queues_alone():
    """Of 400 workers, of which each of four routers keeps some."""
    owners = QueueOwners()
    workers = [f"prefill-{number}" for number in range(400)]
    owners.set_owners(["a", "b", "c", "d"])
    before = [owners.owner(worker) for worker in workers]
    assert all(60 < before.count(name) < 140 for name in "abcd")
    owners.set_owners(["a", "b", "c"])
    after = [owners.owner(worker) for worker in workers]
    assert all(then == now for then, now in zip(before, after, strict=True) if then != "d")
    assert set(after) == {"a", "b", "c"}
