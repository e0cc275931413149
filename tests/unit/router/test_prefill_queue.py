import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_graph.models import Role
from penstock_router.policy.candidate import Candidate
from penstock_router.policy.prefill_queue import PrefillQueue, Waiting, has_free_slot


def _queue_of(*items, max_requests=10, max_wait_s=60.0):
    queue = PrefillQueue(max_requests=max_requests, max_wait_s=max_wait_s)
    keys = [queue.join(Waiting(name, tokens, since_s)) for name, tokens, since_s in items]
    return queue, keys


@pytest.mark.parametrize(
    ("requests", "tokens", "slot_tokens", "expected"),
    [
        (0, 0, 8192, True),
        (1, 8191, 8192, True),
        (1, 8192, 8192, False),
        (1, 100_000, 8192, False),
        (0, 100_000, 8192, True),  # an idle worker always takes one
        (50, 10**9, None, True),
    ],
)
def test_a_worker_takes_more_below_its_slot_budget(requests, tokens, slot_tokens, expected):
    """Tokens in flight below the budget, or nothing in flight at all."""
    worker = Candidate("a", Role.PREFILL, requests, tokens)

    assert has_free_slot(worker, slot_tokens) is expected


def test_first_in_is_first_out_and_tokens_are_summed():
    """The head is the oldest; leaving takes its tokens along, once."""
    queue, keys = _queue_of(("a", 5, 0.0), ("b", 7, 1.0))

    assert (len(queue), queue.tokens, queue.head()[1].item) == (2, 12, "a")
    queue.leave(keys[0])
    queue.leave(keys[0])
    assert (len(queue), queue.tokens, queue.head()[1].item) == (1, 7, "b")
    queue.leave(keys[1])
    assert (len(queue), queue.tokens, queue.head()) == (0, 0, None)


def test_a_request_that_failed_on_its_worker_goes_to_the_front():
    """It was admitted before, so it waits behind nobody."""
    queue, _ = _queue_of(("a", 5, 0.0))

    queue.join(Waiting("again", 3, 9.0), front=True)

    assert queue.head()[1].item == "again"
    assert queue.oldest_s(10.0) == 10.0


def test_the_length_is_bounded():
    """Full at max_requests, not before."""
    queue, _ = _queue_of(("a", 5, 0.0), max_requests=2)
    assert not queue.is_full

    queue.join(Waiting("b", 5, 0.0))

    assert queue.is_full


def test_waits_end_at_their_bound():
    """Exactly max_wait_s is too long; the others stay in order."""
    queue, _ = _queue_of(("a", 5, 0.0), ("b", 7, 0.1), max_wait_s=60)

    assert queue.take_expired(59.9) == []
    assert [each.item for each in queue.take_expired(60.0)] == ["a"]
    assert (len(queue), queue.tokens) == (1, 7)
    assert queue.oldest_s(60.1) == pytest.approx(60.0)


def test_an_empty_queue_has_no_wait():
    """Zero, so that the gauge exists from the start."""
    assert _queue_of()[0].oldest_s(5.0) == 0.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "front", "leave", "expire"]), st.integers(0, 20)), max_size=60
    )
)
def test_counts_always_match_what_is_inside(steps):
    """Whatever the order of events, length and tokens are those of the waiting requests."""
    queue, keys, now_s = PrefillQueue(max_requests=5, max_wait_s=10), {}, 0.0
    for kind, number in steps:
        now_s += 1
        if kind in {"join", "front"}:
            keys[queue.join(Waiting(number, number, now_s), front=kind == "front")] = number
        elif kind == "leave" and keys:
            key = sorted(keys)[number % len(keys)]
            queue.leave(key)
            del keys[key]
        elif kind == "expire":
            for gone in queue.take_expired(now_s):
                key = next(key for key, tokens in keys.items() if tokens == gone.tokens)
                del keys[key]
        assert len(queue) == len(keys)
        assert queue.tokens == sum(keys.values())
