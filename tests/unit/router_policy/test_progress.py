"""The throughput of a worker, and what it should have computed of its running prompt, which does not count as pending."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import arrival, placement, send

from penstock.api import Tier, TiersConfig
from penstock.router.policy.policies import MinTtft, PrefixCost
from penstock.router.policy.routing_policy import Arrival, PrefillThroughput, WorkerLoad


def busy(policy=None, *, tokens=(8000, 4000), tokens_per_s=10_000.0):
    """One worker that was given prompts at 0 s, the first of them at once being computed."""
    queues = placement(policy or PrefixCost(), ("a",), tokens_per_s=tokens_per_s)
    for item, count in enumerate(tokens):
        send(queues, item, arrival(item, tokens=count))
    return queues


@pytest.mark.parametrize(
    ("now_s", "pending"), [(-1.0, 12_000), (0.0, 12_000), (0.3, 9000), (0.8, 4000), (5.0, 4000)]
)
def test_the_running_prompt_shrinks_and_no_other(now_s, pending):
    """At 10,000 tokens/s 3,000 of 8,000 are computed after 0.3 s; the second waits until the first's end is told.

    A clock that steps back computes nothing.
    """
    assert busy().workers.load_of("a", now_s)[0] == pending


def test_without_a_throughput_nothing_is_assumed():
    """A prompt counts in full until it ends."""
    assert busy(tokens_per_s=None).workers.load_of("a", 1.0)[0] == 12_000


def test_the_next_prompt_begins_at_the_end_of_the_one_before():
    """Not when it was dispatched: 8,000 tokens ended at 1 s, and 0.1 s later 1,000 of the next are computed."""
    queues = busy(tokens=(8000, 4000))
    queues.prefilled(0, 1.0, measured=False)
    assert queues.workers.load_of("a", 1.1)[0] == 3000


@pytest.mark.parametrize(("now_s", "left"), [(0.0, 12_000), (0.3, 9000), (5.0, 4000)])
def test_what_a_worker_has_not_computed_has_no_blocks_in_its_reading(now_s, left):
    """All of both prompts but the part of the first that should be computed; nothing of a worker that is not known."""
    queues = busy()
    assert queues.uncomputed_tokens("a", now_s) == left
    assert queues.uncomputed_tokens("other", now_s) == 0


@pytest.mark.parametrize(
    ("running", "asking", "before"),
    [
        ((Tier.STANDARD, Tier.BACKGROUND), Tier.PREMIUM, 8000),
        ((Tier.STANDARD, Tier.BACKGROUND), Tier.STANDARD, 8000),
        ((Tier.STANDARD, Tier.BACKGROUND), Tier.BACKGROUND, 12_000),
        ((Tier.BACKGROUND, Tier.STANDARD), Tier.PREMIUM, 8000),
        ((Tier.BACKGROUND, Tier.STANDARD), Tier.STANDARD, 12_000),
        ((Tier.PREMIUM, Tier.PREMIUM), Tier.SYSTEM, 8000),
    ],
)
def test_a_request_overtakes_the_prompts_of_lower_tiers_in_the_engine(running, asking, before):
    """All but the one that is being computed, of 8,000 tokens, the first; the second has 4,000."""
    queues = placement(PrefixCost(), ("a",), tokens_per_s=10_000.0, tiers=TiersConfig(enabled=True))
    for item, (tier, count) in enumerate(zip(running, (8000, 4000), strict=True)):
        send(queues, item, arrival(item, tokens=count, tier=tier))
    assert queues.workers.eligible["a"].pending_for(arrival(9, tokens=10, tier=asking)) == before


@pytest.mark.parametrize(("is_computed", "computed", "held"), [(True, 8000, 1), (False, 0, 0)])
def test_a_prompt_is_computed_at_its_end_where_the_answer_says_so(is_computed, computed, held):
    """A complete answer tells at once that its prompt was computed and that it has left; the next begins then."""
    queues = busy(tokens=(8000, 4000))
    queues.release(0, 1.0, is_computed=is_computed)

    assert queues.prompt_tokens.computed == computed
    assert queues.workers.index_of("a").held(Arrival((0,), 8000).prefix) == held
    assert queues.workers.load_of("a", 1.1)[0] == (3000 if is_computed else 0)


@pytest.mark.parametrize("policy", [MinTtft, PrefixCost])
def test_a_nearly_computed_prompt_does_not_send_the_next_one_away(policy):
    """Worker a has 8,000 tokens begun at 0 s, b 3,000 at 0.75 s: at 0.76 s a has less left."""
    queues = busy(policy(), tokens=(8000,))
    queues.set_workers([WorkerLoad("a"), WorkerLoad("b")], 0.0)
    queues.submit("b's", Arrival((7,), 3000, avoid=frozenset({"a"})), 0.75)
    list(queues.dispatch(0.75))
    queues.submit("r", Arrival((8,), 100), 0.76)
    assert queues.worker_of("r") == "a"


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=6), st.floats(0, 20))
def test_pending_never_falls_below_what_waits_behind(tokens, now_s):
    """Whatever the time: between the tokens behind the first prompt and all."""
    pending = busy(tokens=tuple(tokens)).workers.load_of("a", now_s)[0]
    assert sum(tokens[1:]) <= pending <= sum(tokens)


@pytest.mark.parametrize(
    ("then", "least", "most"),
    [
        ([(10_000, 1.0), (1, 0.02)] * 50, 9_610, 10_000),
        ([(1000, 0.1)] * 50 + [(1000, 0.2)] * 20, 5_000, 6_500),
    ],
    ids=["a token takes a launch", "a slower worker shows within tens of prefills"],
)
def test_the_throughput_is_tokens_over_seconds_of_many_prefills(then, least, most):
    """A prompt of one token that takes 20 ms of overhead hardly moves it; the mean of ratios would halve."""
    throughput = PrefillThroughput()
    for measured in then:
        throughput.learn(*measured)

    assert least < throughput.tokens_per_s < most


def test_hits_that_were_not_expected_make_no_worker_look_fast():
    """The router expects 1,000 tokens, the worker had 900 of them: 100 tokens in 0.1 s are 1,000 a second."""
    queues = placement(MinTtft(), ("a",), tokens_per_s=None)
    send(queues, "r", arrival(1, 2, tokens=1000))

    queues.prefilled("r", 0.1, cached_tokens=900)

    assert queues.workers.eligible["a"].throughput.tokens_per_s == pytest.approx(1000.0)
