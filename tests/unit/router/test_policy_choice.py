import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_core.errors import ConfigError
from penstock_graph.models import Role, RouterPolicy
from penstock_router.policy.candidate import Candidate, RoutedRequest
from penstock_router.policy.registry import POLICIES, make_policy

REQUEST = RoutedRequest(prompt_tokens=100)


def _candidate(name, tokens=0, *, kv=None, scraped=0, requests=0, role=Role.DECODE):
    return Candidate(name, role, requests, tokens, kv, scraped)


def _chosen(policy, candidates, times):
    state = policy.new_state()
    return [policy.choose(candidates, REQUEST, state).candidate.name for _ in range(times)]


def test_round_robin_takes_turns():
    """Each candidate in the order given, then from the start."""
    policy = make_policy(RouterPolicy.ROUND_ROBIN)

    assert _chosen(policy, [_candidate("a"), _candidate("b"), _candidate("c")], 5) == [
        "a",
        "b",
        "c",
        "a",
        "b",
    ]


def test_round_robin_survives_a_shrinking_pool():
    """A turn beyond the pool's new size still gives a candidate."""
    policy = make_policy(RouterPolicy.ROUND_ROBIN)
    state = policy.new_state()
    for _ in range(4):
        policy.choose([_candidate("a"), _candidate("b"), _candidate("c")], REQUEST, state)

    assert policy.choose([_candidate("a")], REQUEST, state).candidate.name == "a"


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([_candidate("a", 10), _candidate("b", 9)], "b"),
        ([_candidate("a", 9, requests=2), _candidate("b", 9, requests=1)], "b"),
        ([_candidate("a", 900, kv=0.2), _candidate("b", 5, kv=0.3)], "a"),
        ([_candidate("a", 900, kv=0.3), _candidate("b", 5, kv=0.3)], "b"),
        # One unknown KV: tokens decide for all.
        ([_candidate("a", 900, kv=0.0), _candidate("b", 5)], "b"),
        # Since the scrape a's tokens have tripled, so its 0.2 stands for 0.6.
        ([_candidate("a", 300, kv=0.2, scraped=100), _candidate("b", 100, kv=0.3, scraped=100)], "b"),
        # Idle at the scrape and busy since: its zero says nothing, so tokens decide for all.
        ([_candidate("a", 900, kv=0.0), _candidate("b", 5, kv=0.3, scraped=5)], "b"),
        ([_candidate("a")], "a"),
    ],
)
def test_least_loaded_takes_the_emptiest(candidates, expected):
    """Free KV where all tell it, then tokens in flight, then requests."""
    assert _chosen(make_policy(RouterPolicy.LEAST_LOADED), candidates, 1) == [expected]


def test_least_loaded_rotates_among_equals():
    """An idle pool does not send everything to its first worker."""
    policy = make_policy(RouterPolicy.LEAST_LOADED)

    assert _chosen(policy, [_candidate("a"), _candidate("b"), _candidate("c")], 4) == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("kv", "scraped", "tokens", "expected"),
    [
        (None, 100, 100, None),
        (0.5, 1000, 1500, 0.75),
        (0.5, 1000, 0, 0.0),
        (0.5, 0, 400, 0.5),
        (0.9, 100, 200, 1.0),
    ],
)
def test_kv_usage_is_projected_by_the_tokens_since_the_scrape(kv, scraped, tokens, expected):
    """Usage follows the tokens in flight, at most 1; without a basis it stays as read."""
    assert _candidate("a", tokens, kv=kv, scraped=scraped).projected_kv_usage() == expected


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(
        st.builds(
            _candidate,
            st.text(min_size=1, max_size=3),
            st.integers(0, 10**6),
            kv=st.none() | st.floats(0, 1),
            scraped=st.integers(0, 10**6),
            requests=st.integers(0, 100),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 5),
)
def test_every_policy_chooses_one_of_the_candidates(name, candidates, times):
    """Whatever the pool, the choice is in it and has a reason."""
    policy = make_policy(name)
    state = policy.new_state()
    for _ in range(times):
        choice = policy.choose(candidates, REQUEST, state)
        assert choice.candidate in candidates
        assert choice.reason


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_least_loaded_without_kv_never_takes_a_fuller_worker(tokens):
    """No other candidate has fewer tokens in flight than the chosen one."""
    policy = make_policy(RouterPolicy.LEAST_LOADED)
    candidates = [_candidate(str(index), count) for index, count in enumerate(tokens)]

    choice = policy.choose(candidates, REQUEST, policy.new_state())

    assert choice.candidate.inflight_tokens == min(tokens)


def test_a_placing_policy_does_not_choose_and_those_that_do_are_named():
    """The message names the key, the value and what can be chosen."""
    with pytest.raises(ConfigError, match=r"router\.policy: dualmap .*least-loaded, round-robin"):
        make_policy(RouterPolicy.DUALMAP)
