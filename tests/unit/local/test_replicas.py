"""Adding and withdrawing replicas: victims, idempotence, the GPU budget at every instant."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock.core.errors import ClusterError
from penstock.core.local_state import EntryState
from penstock.local.statefile import (
    ArbiterInfo,
    ProcessEntry,
    StateFile,
    allocate,
    choose_victim,
    remove_replica,
    replicas_of,
    retire,
    scale,
)
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget, target_state


@pytest.fixture
def pool(state_of, entry_of):
    """Return a function that makes a file of decode workers from name -> state, in order."""

    def make(budget=8, **states):
        state = state_of("n", budget=budget)
        for order, (suffix, value) in enumerate(states.items()):
            gpus = () if value in {"failed", "stopped"} else (order,)
            name = "n_decode" if suffix == "base" else f"n_decode{suffix}"
            entry = entry_of("decode", state=EntryState(value), gpus=gpus, order=order)
            state = state.with_entry(name, entry)
        return state

    return make


@pytest.mark.parametrize(
    ("states", "loads", "victim"),
    [
        ({"base": "ready", "_1": "ready"}, {"n_decode": 10, "n_decode_1": 20}, "n_decode"),
        ({"base": "ready", "_1": "ready"}, {"n_decode": 20, "n_decode_1": 20}, "n_decode_1"),
        ({"base": "ready", "_1": "ready"}, {}, "n_decode_1"),
        ({"base": "ready", "_1": "ready"}, {"n_decode": 99}, "n_decode"),
        ({"base": "ready", "_1": "starting"}, {"n_decode": 0}, "n_decode_1"),
        ({"base": "ready", "_1": "starting", "_2": "requested"}, {}, "n_decode_2"),
        ({"base": "starting", "_1": "ready"}, {"n_decode_1": 0}, "n_decode"),
    ],
)
def test_the_victim_is_the_one_whose_removal_costs_least(pool, states, loads, victim):
    """Not serving first, then fewest tokens in flight; ties and unknown loads go to the newest."""
    assert choose_victim(replicas_of(pool(**states), "decode"), loads) == victim


def test_scaling_down_marks_a_serving_replica_draining_and_keeps_its_gpus(pool):
    """The GPUs stay taken until the process has ended."""
    outcome = scale(pool(base="ready", _1="ready"), "decode", 1, {})
    assert outcome.removed == ("n_decode_1",)
    assert outcome.state.entries["n_decode_1"].state is EntryState.DRAINING
    assert outcome.state.gpus_in_use() == {0, 1}


def test_a_requested_replica_without_a_process_goes_at_once(pool):
    """Withdrawing what has not begun frees its GPUs immediately."""
    state = remove_replica(pool(base="ready", _1="requested"), "n_decode_1")
    assert list(state.entries) == ["n_decode"]


def test_draining_workers_count_against_the_budget_and_the_shortage_is_explained(pool):
    """What can be granted is; the rest is refused with the bound."""
    outcome = scale(pool(budget=3, base="ready", _1="draining"), "decode", 3, {})
    assert outcome.added == ("n_decode_2",)
    assert "2 of maxGpuBudget 3" not in (outcome.refusal or "")
    assert "3 of maxGpuBudget 3" in outcome.refusal


def test_a_failed_replica_is_none_and_its_name_is_used_again(pool):
    """Level-triggered: asking for two while one has failed starts that one afresh."""
    outcome = scale(pool(base="ready", _1="failed"), "decode", 2, {})
    assert outcome.added == ("n_decode_1",)
    assert outcome.state.entries["n_decode_1"].reason is None


@given(
    budget=st.integers(1, 6),
    size=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 5)), max_size=25),
    ends=st.integers(0, 100),
)
def test_the_gpus_of_existing_workers_never_exceed_the_budget(budget, size, steps, ends):
    """Through any sequence of scalings and ended drains, ids stay exclusive and inside the budget."""
    arbiter = ArbiterInfo("n", gpus=6, budget=budget)
    stopped = {
        f"n_{role}": ProcessEntry(role, role, ("c",), state=EntryState.STOPPED, gpus_per_replica=size)
        for role in ("prefill", "decode")
    }
    state = StateFile(arbiter, stopped)
    for number, (role, replicas) in enumerate(steps):
        state = scale(state, role, replicas, {}).state
        for name, entry in list(state.entries.items()):
            if entry.state is EntryState.REQUESTED:
                state = state.change(name, state=EntryState.READY, pid=1)
            elif entry.state is EntryState.DRAINING and (number + ends) % 3 == 0:
                state = retire(state, name)
        held = [gpu for entry in state.entries.values() for gpu in entry.gpus]
        assert len(held) == len(set(held)) <= budget


@pytest.mark.parametrize(
    ("wanted", "in_use", "expected"),
    [
        (0, [], ()),
        (1, [], (0,)),
        (1, [0, 1], (2,)),
        (2, [], (0, 1)),
        (2, [1], (2, 3)),
        (2, [1, 3, 5, 7], (0, 2)),
        (2, [2, 3, 4], (0, 1)),
        (1, [0, 1, 3, 4], (2,)),
        (4, [0], (1, 2, 3, 4)),
        (8, [], tuple(range(8))),
    ],
)
def test_ids_are_neighbours_where_possible_and_small_gaps_fill_first(wanted, in_use, expected):
    """Neighbours are preferred, the smallest run that fits is used, else the lowest ids."""
    assert allocate(wanted, in_use, gpus=8, budget=8) == expected


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
    """Requested and starting are starting; draining and failed are not replicas; the router is not a pool."""
    for suffix, value in enumerate(("requested", "starting", "draining", "failed"), start=1):
        state = state.with_entry(
            f"n_decode_{suffix}", entry_of("decode", state=EntryState(value), reason="why")
        )
    observed = target_state(state)
    pool = observed.pools[Role.DECODE]
    assert (pool.ready, pool.starting, pool.draining, observed.failures) == (1, 2, 1, {Role.DECODE: "why"})
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
    assert target_state(changed).is_adjusting is expected


async def test_scaling_up_and_down_edits_the_file_and_repeats_harmlessly(target):
    """Two calls are one; without a router's answer the newest goes."""
    for _ in range(2):
        await target.scale(Role.DECODE, 2, decision_id="d1")
    state = StateStore.of("n").read()
    assert state.entries["n_decode_1"].state is EntryState.REQUESTED
    assert (await target.observe()).is_adjusting
    for _ in range(2):
        await target.scale(Role.DECODE, 1, decision_id="d2")
    assert "n_decode_1" not in StateStore.of("n").read().entries


@pytest.mark.parametrize(
    ("role", "replicas", "words"),
    [(Role.AGGREGATED, 1, "no aggregated service"), (Role.DECODE, -1, "0 or more")],
)
async def test_impossible_numbers_are_refused(target, role, replicas, words):
    """A role that the graph lacks and a negative number change nothing."""
    with pytest.raises(ClusterError, match=words):
        await target.scale(role, replicas, decision_id="d1")


async def test_a_graph_that_is_being_stopped_is_not_scaled(target, state):
    """Nothing is added behind the stop's back."""
    StateStore.of("n").write(replace(state, arbiter=replace(state.arbiter, stopping=True)))
    with pytest.raises(ClusterError, match="being stopped"):
        await target.scale(Role.DECODE, 2, decision_id="d1")


async def test_without_a_file_the_backend_cannot_be_read():
    """A missing or broken statefile is a ClusterError for the planner, which holds."""
    target = LocalTarget(StateStore.of("absent"))
    with pytest.raises(ClusterError, match="penstock up"):
        await target.observe()
    StateStore.of("absent").path.write_text("{")
    with pytest.raises(ClusterError, match="not JSON"):
        await target.observe()
    await target.close()
