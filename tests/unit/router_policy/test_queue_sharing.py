"""What routers that share queues know: prompts told in order and bounded, tokens passed on, workers chosen and not queued."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.api import RouterConfig
from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.queue_settings import QueueSettings
from penstock.router.core.queue_sharing import (
    PASSED_ON,
    PROMPTS,
    TOLD_KEYS,
    PromptLog,
    QueuedPrompt,
    QueueSharing,
)
from penstock.router.policy.arrival import Arrival
from penstock.router.policy.load import WorkerLoad
from penstock.router.policy.registry import make_policy, policy_names
from penstock.router.policy.routing_policy import AssignTime
from penstock.router.policy.shortlist import ALL_UP_TO
from penstock.router.policy.sticky import StickySessions


def prompt(number, blocks=1):
    """A prompt of its own."""
    return QueuedPrompt(f"w{number}", Arrival(tuple(range(number, number + blocks)), 512))


def queue_of(policy, workers):
    """A queue before so many workers."""
    queue = DispatchQueue(policy, QueueSettings())
    queue.set_workers([WorkerLoad(f"w{number}") for number in range(workers)], 0.0)
    return queue


@given(st.lists(st.integers(0, 50), max_size=12))
def test_each_prompt_is_told_once_and_in_order(steps):
    """To one who asks again and again."""
    log, added, told, at = PromptLog(), 0, [], 0
    for step in steps:
        for _ in range(step):
            log.add(prompt(added))
            added += 1
        at, found = log.since(at)
        told += found
    at, found = log.since(at)
    assert [each.worker for each in told + found] == [f"w{number}" for number in range(added)]
    assert log.since(at) == (at, [])


def test_the_log_is_bounded():
    """The oldest are dropped; who asks for them, or for what never was, gets those that are left."""
    log = PromptLog()
    for number in range(PROMPTS + 10):
        log.add(prompt(number))
    for asked in (0, 9, PROMPTS + 11, 1 << 60):
        at, found = log.since(asked)
        assert (at, found[0].worker, len(found)) == (PROMPTS + 10, "w10", PROMPTS)


def test_long_prompts_are_told_in_parts():
    """As many keys at a time as the bound allows, the rest when asked next; one longer than that alone."""
    log = PromptLog()
    for _ in range(3):
        log.add(prompt(0, TOLD_KEYS // 2))
    log.add(prompt(0, TOLD_KEYS + 1))
    parts, at = [], 0
    while len(parts) < 3:
        at, found = log.since(at)
        parts.append(len(found))
    assert (parts, at) == ([2, 1, 1], 4)


def test_what_was_passed_on_counts_until_others_were_asked():
    """Sent at 1 and 2 s; of an ask at 1.5 s the first has been told."""
    sharing = QueueSharing()
    sharing.passed_on("a", 100, 1.0)
    sharing.passed_on("a", 20, 2.0)
    sharing.passed_on("gone", 7, 2.0)
    assert sharing.untold(("a", "b"), 0.5) == {"a": 120, "b": 0}
    assert sharing.untold(("a", "b"), 1.5) == {"a": 20, "b": 0}
    assert sharing.untold(("a",), 2.5) == {"a": 0}


def test_what_was_passed_on_is_bounded():
    """Where no exchange ever succeeds."""
    sharing = QueueSharing()
    for _ in range(PASSED_ON + 5):
        sharing.passed_on("a", 1, 0.0)
    assert sharing.untold(("a",), 0.0) == {"a": PASSED_ON}


def test_a_lone_router_keeps_nothing_to_tell():
    """Nobody asks."""
    sharing = QueueSharing()
    sharing.queued("a", Arrival((1,), 512))
    assert sharing.log.since(0) == (0, [])
    sharing.is_on = True
    sharing.queued("", Arrival((1,), 512))
    sharing.queued("a", Arrival((), 512))
    sharing.queued("a", Arrival((1,), 512))
    assert sharing.log.since(0)[0] == 1


def test_choosing_queues_nothing():
    """Policies that assign on arrival name a worker, the others none."""
    for name in policy_names():
        queue = queue_of(make_policy(RouterConfig(policy=name)), 3)
        chosen = queue.choose(Arrival((1, 2), 1024), 0.0)
        assert (chosen != "") is (queue.policy.assigns is AssignTime.ON_ARRIVAL)
        assert (len(queue), queue.pending_tokens("w0", 0.0)) == (0, 0)
    assert (
        DispatchQueue(make_policy(RouterConfig(policy="prefix-cost")), QueueSettings()).choose(
            Arrival((1,), 512), 0.0
        )
        == ""
    )


def test_a_chosen_worker_is_kept_to_unless_it_failed_the_request_or_is_gone():
    """Else the policy chooses, which prefers idle workers to the busy one."""
    queue = queue_of(make_policy(RouterConfig(policy="prefix-cost")), 2)
    queue.set_peer_tokens("w1", 50_000)
    cases = [("w1", frozenset(), "w1"), ("w1", frozenset({"w1"}), "w0"), ("w9", frozenset(), "w0")]
    for item, (worker, avoid, expected) in enumerate(cases):
        queue.submit(item, Arrival((item,), 512, avoid=avoid, worker=worker), 0.0)
        assert queue.worker_of(item) == expected


def test_a_worker_that_joins_relieves_those_chosen_before_it():
    """What waits is assigned again, by what is true now."""
    queue = queue_of(make_policy(RouterConfig(policy="prefix-cost")), 1)
    for item in range(4):
        queue.submit(item, Arrival((item,), 4000, worker="w0"), 0.0)
    queue.set_workers(map(WorkerLoad, ["w0", "w1"]), 1.0)
    assert sorted(queue.worker_of(item) for item in range(4)) == ["w0", "w0", "w1", "w1"]


def test_a_prompt_told_is_known_in_small_and_large_fleets():
    """The next prompt with its beginning goes there; beyond the bound by the shortlist, which does not ask all."""
    for workers in (4, 4 * ALL_UP_TO):
        queue = queue_of(make_policy(RouterConfig(policy="prefix-cost")), workers)
        holder = f"w{workers - 1}"
        chain = tuple(range(100, 120))
        assert queue.learn(holder, Arrival(chain, 0)) == 0
        assert queue.choose(Arrival((*chain, 7), 21 * 512), 0.0) == holder
    assert queue.learn("unknown", Arrival(chain, 0)) == 0


def test_a_session_told_is_kept_to():
    """By a policy that follows sessions, also where its request was queued here and chosen elsewhere."""
    queue = queue_of(StickySessions(make_policy(RouterConfig(policy="prefix-cost"))), 4)
    queue.learn("w2", Arrival((1,), 0, session="s"))
    queue.submit("chosen elsewhere", Arrival((2,), 512, session="t", worker="w3"), 0.0)
    assert queue.choose(Arrival((9,), 512, session="s"), 0.0) == "w2"
    assert queue.choose(Arrival((9,), 512, session="t"), 0.0) == "w3"


def test_a_central_queue_shares_slots_by_what_others_have():
    """Half of 1,000 tokens each; less where the other router has more than its half."""
    for peers, expected in ((0, 1), (300, 1), (700, 0)):
        queue = DispatchQueue(
            make_policy(RouterConfig(policy="least-loaded")), QueueSettings(slot_tokens=1000)
        )
        queue.set_workers([WorkerLoad("w")], 0.0)
        queue.set_deciders(2, is_scattered=False)
        queue.submit("first", Arrival((), 300), 0.0)
        assert [each.item for each in queue.dispatch(0.0)] == ["first"]
        queue.set_peer_tokens("w", peers)
        queue.submit("second", Arrival((), 300), 0.0)
        assert len(list(queue.dispatch(0.0))) == expected
