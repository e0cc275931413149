"""The planner's target on a statefile, without any process."""

import pytest

from penstock.api import Role
from penstock.core.errors import ClusterError
from penstock.core.local_state import EntryState
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget, target_state


@pytest.fixture
def state(state_of, entry_of):
    """Return a disaggregated graph with one worker of each role, both ready."""
    made = state_of("n", budget=4)
    for order, (service, role) in enumerate(
        (("frontend", "router"), ("prefill", "prefill"), ("decode", "decode"))
    ):
        gpus = () if role == "router" else (order,)
        fields = {"state": EntryState.READY, "url": f"http://h:{order}", "gpus": gpus, "served": True}
        made = made.with_entry(f"n_{service}", entry_of(service, role, order=order, **fields))
    return made


@pytest.fixture
async def target(state):
    """Yield a target on that file."""
    store = StateStore.of("n")
    store.write(state)
    made = LocalTarget(store)
    yield made
    await made.close()


def test_pools_count_each_state_once(state, entry_of):
    """Requested and starting are starting; draining and failed are no replicas; the router is no pool."""
    for suffix, value in enumerate(("requested", "starting", "draining", "failed"), start=1):
        state = state.with_entry(
            f"n_decode_{suffix}", entry_of("decode", state=EntryState(value), reason="why")
        )
    observed = target_state(state)
    pool = observed.pools[Role.DECODE]
    assert (pool.ready, pool.starting, pool.draining, pool.failed) == (1, 2, 1, ("why",))
    assert set(observed.pools) == {Role.PREFILL, Role.DECODE}
    assert [endpoint.name for endpoint in observed.endpoints] == ["n_prefill", "n_decode"]


@pytest.mark.parametrize(
    ("entry_state", "served", "expected"),
    [
        ("ready", True, False),
        ("requested", False, True),
        ("starting", False, True),
        ("starting", True, False),
        ("draining", True, True),
        ("failed", False, False),
    ],
)
def test_a_crash_restart_is_no_adjustment_but_a_first_start_and_a_drain_are(
    state, entry_state, served, expected
):
    """The planner is blocked only while something it asked for is under way."""
    changed = state.change("n_decode", state=EntryState(entry_state), served=served)
    assert target_state(changed).adjusting is expected


async def test_scaling_up_and_down_edits_the_file_and_repeats_harmlessly(target):
    """Two calls are one; without a router's answer the newest goes."""
    for _ in range(2):
        await target.scale(Role.DECODE, 2, decision_id="d1")
    state = StateStore.of("n").read()
    assert state.entries["n_decode_1"].state is EntryState.REQUESTED
    assert (await target.observe()).adjusting
    for _ in range(2):
        await target.scale(Role.DECODE, 1, decision_id="d2")
    assert "n_decode_1" not in StateStore.of("n").read().entries


@pytest.mark.parametrize(
    ("role", "replicas", "words"),
    [(Role.AGGREGATED, 1, "no aggregated service"), (Role.DECODE, -1, "0 or more")],
)
async def test_impossible_wishes_are_refused(target, role, replicas, words):
    """A role that the graph lacks and a negative number change nothing."""
    with pytest.raises(ClusterError, match=words):
        await target.scale(role, replicas, decision_id="d1")


async def test_a_graph_that_is_being_stopped_is_not_scaled(target, state):
    """Nothing is added behind the stop's back."""
    from dataclasses import replace

    StateStore.of("n").write(replace(state, arbiter=replace(state.arbiter, stopping=True)))
    with pytest.raises(ClusterError, match="being stopped"):
        await target.scale(Role.DECODE, 2, decision_id="d1")


async def test_without_a_file_the_backend_cannot_be_read():
    """A missing or broken statefile is a ClusterError for the planner, which holds."""
    target = LocalTarget(StateStore.of("nobody"))
    with pytest.raises(ClusterError, match="penstock up"):
        await target.observe()
    StateStore.of("nobody").path.write_text("{")
    with pytest.raises(ClusterError, match="not JSON"):
        await target.observe()
    await target.close()
