import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api import RouterConfig
from penstock.core.errors import ConfigError
from penstock.router.policy.registry import decode_policy, make_policy, policy_names
from penstock.router.policy.routing_policy import (
    KV_MAX_AGE_S,
    Arrival,
    AssignTime,
    Estimates,
    WorkerLoad,
    WorkerQueue,
)

REQUEST = Arrival((), 100)
WHEN_FREE = sorted(
    name for name in policy_names() if make_policy(RouterConfig(policy=name)).assigns is AssignTime.WHEN_FREE
)


def _candidate(name, tokens=0, *, kv=None, scraped=0, requests=0):
    load = WorkerLoad(name)
    load.inflight_requests, load.inflight_tokens = requests, tokens
    load.kv_usage_fraction, load.scraped_tokens, load.metrics_at_s = kv, scraped, 0.0
    return WorkerQueue(load, now_s=0.0)


def _route(policy, candidates):
    return policy.route(REQUEST, {each.name: each for each in candidates}, Estimates())


def _chosen(policy, candidates, times):
    return [_route(policy, candidates).worker for _ in range(times)]


@pytest.mark.parametrize("name", ["round-robin", "least-loaded"])
def test_equal_workers_take_turns(name):
    """In the order given, then from the start; a turn beyond a pool that shrinks is one as well."""
    policy = make_policy(RouterConfig(policy=name))

    assert "".join(_chosen(policy, [_candidate(each) for each in "abc"], 5)) == "abcab"
    assert _route(policy, [_candidate("a")]).worker == "a"


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
    assert _chosen(make_policy(RouterConfig(policy="least-loaded")), candidates, 1) == [expected]


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
    assert _candidate("a", tokens, kv=kv, scraped=scraped).projected_kv_usage(0.0) == expected


def test_old_kv_readings_are_unknown():
    """After ten missed scrapes tokens decide."""
    candidate = _candidate("a", 100, kv=0.4, scraped=100)

    assert candidate.projected_kv_usage(KV_MAX_AGE_S) == 0.4
    assert candidate.projected_kv_usage(KV_MAX_AGE_S + 0.1) is None


@given(
    st.sampled_from(WHEN_FREE),
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
    policy = make_policy(RouterConfig(policy=name))
    for _ in range(times):
        decision = _route(policy, candidates)
        assert decision.worker in {each.name for each in candidates}
        assert decision.reason


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_least_loaded_without_kv_never_takes_a_fuller_worker(tokens):
    """No other candidate has fewer tokens in flight than the chosen one."""
    candidates = [_candidate(str(index), count) for index, count in enumerate(tokens)]

    decision = _route(make_policy(RouterConfig(policy="least-loaded")), candidates)

    assert tokens[int(decision.worker)] == min(tokens)


def test_every_policy_of_a_manifest_is_known_and_an_unknown_one_is_refused():
    """The message names the value and what can be chosen."""
    with pytest.raises(ValidationError, match=r"policy\n  not one of .*least-loaded"):
        RouterConfig(policy="fastest")
    with pytest.raises(ConfigError, match=r"policy 'fastest': choose from .*least-loaded, .*round-robin"):
        make_policy(RouterConfig().model_copy(update={"policy": "fastest"}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("round-robin", "RoundRobin"), ("least-loaded", "LeastLoaded"), ("dualmap", "LeastLoaded")],
)
def test_decode_workers_are_chosen_by_load(name, expected):
    """A policy that reads prompts knows nothing of decode: the least loaded worker is taken."""
    assert type(decode_policy(RouterConfig(policy=name))).__name__ == expected


async def test_a_workers_own_metrics_say_how_much_it_caches(harness):
    """1,000 blocks of 16 tokens are some 31 of 512, not the 8,192 that are assumed before the first scrape."""
    worker, router = await harness.served("aggregated")
    index = router.server.core.entry_queue.workers.index_of(worker.name)
    await router.until(lambda: index.capacity == 31)


@pytest.mark.parametrize(
    ("given", "told"),
    [({"depth": "2"}, r"depth: policy dualmap has .*"), ({"start_depth": "x"}, r"start_depth 'x': .*")],
)
def test_a_parameter_that_a_policy_does_not_take_is_refused_by_name(given, told):
    """With what it takes, and what is wrong with the value."""
    with pytest.raises(ConfigError, match=rf"router\.policyParameters: {told}"):
        make_policy(RouterConfig(policy="dualmap", policy_parameters=given))
