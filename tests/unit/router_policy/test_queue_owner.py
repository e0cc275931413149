"""Which routers decide, and about which prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_router.policy.prefix_owner import PrefixOwners, RouterState, owner_count, owners_among

NAMES = st.sets(st.integers(0, 40).map("router-{}".format), min_size=2, max_size=8)
CHAINS = st.lists(st.integers(0, 1 << 60), min_size=1, max_size=4)


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


def test_a_sole_owner_decides_about_everything():
    """Also about prompts that cannot be read; without routers nobody is named."""
    owners = PrefixOwners()
    assert owners.owner((1, 2)) is None
    owners.set_owners(["a"])
    assert owners.owner(()) == owners.owner((1, 2)) == "a"
    owners.set_owners(["a", "b"])
    assert owners.owner(()) is None


@given(NAMES, st.lists(CHAINS, min_size=1, max_size=60))
def test_routers_agree_without_a_word(names, chains):
    """Two that see the same prompts name the same owner, whatever the order in which they learnt the names."""
    one, two = PrefixOwners(), PrefixOwners()
    one.set_owners(sorted(names))
    for name in sorted(names, reverse=True):
        two.set_owners([name])
    two.set_owners(names)
    assert [one.owner(chain) for chain in chains] == [two.owner(chain) for chain in chains]


def test_a_lost_router_moves_its_own_prompts_alone():
    """Of 400 prompts, each with a beginning of its own."""
    owners = PrefixOwners()
    chains = [(number * 7919, number) for number in range(400)]
    owners.set_owners(["a", "b", "c", "d"])
    before = [owners.owner(chain) for chain in chains]
    owners.set_owners(["a", "b", "c"])
    after = [owners.owner(chain) for chain in chains]
    assert all(then == now for then, now in zip(before, after, strict=True) if then != "d")
    assert {"a", "b", "c"} == set(after)


def test_a_prefix_that_all_share_is_told_apart():
    """A system prompt before every request would else let one of four routers decide about all."""
    owners = PrefixOwners()
    owners.set_owners(["a", "b", "c", "d"])
    found = [owners.owner((1, 100 + number % 97)) for number in range(2000)][1000:]
    assert all(found.count(name) > 100 for name in "abcd")
