"""Workers that go from one role to the other on one machine: who, when, and what becomes of those that cannot."""

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.core.errors import ClusterError
from penstock.core.local_state import EntryState
from penstock.local.plan import Drain, ObservedProcess, ProcessAction, ProcessStep, plan
from penstock.local.statefile import replicas_of, scale, switch, switched
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget, target_state
from penstock.router.discovery.statefile import parse_statefile
from penstock_planner.decide.demand.observation import PoolCounts

D, P = Role.DECODE, Role.PREFILL
NOW = 1000.0


@pytest.fixture
def fleet(state_of, entry_of):
    """A file of a prefill worker and three decode workers, whose second is draining to take prefill's role."""
    state = state_of("n", gpus=4)
    for order, (name, role) in enumerate(
        (("prefill", "prefill"), ("decode", "decode"), ("decode_1", "decode"), ("decode_2", "decode"))
    ):
        entry = entry_of(
            role,
            role,
            state=EntryState.READY,
            gpus=(order,),
            order=order,
            pid=order + 1,
            started=f"b/{order}",
            url=f"http://127.0.0.1:{8000 + order}",
            served=True,
        )
        state = state.with_entry(f"n_{name}", replace(entry, gpus_per_replica=1))
    return state


def _names(state, role):
    return sorted(replicas_of(state, role))


def test_the_idlest_worker_that_holds_no_service_drains_for_the_other_role(fleet):
    """The base entry has the command that starts the next decode worker, so that it stays, however idle it is."""
    loads = {"n_decode": 0.0, "n_decode_1": 9.0, "n_decode_2": 5.0}
    outcome = switch(fleet, "decode", "prefill", {"decode": 2, "prefill": 2}, loads)
    assert outcome.switching == ("n_decode_2",)
    assert _names(outcome.state, "prefill") == ["n_decode_2", "n_prefill"]
    assert _names(outcome.state, "decode") == ["n_decode", "n_decode_1"]
    assert target_state(outcome.state).pools == {
        P: PoolCounts(ready=1, starting=1, gpus=1, switching=1),
        D: PoolCounts(ready=2, gpus=1),
    }
    again = switch(outcome.state, "decode", "prefill", {"decode": 2, "prefill": 2}, loads)
    assert (again.state, again.switching) == (outcome.state, ())


def test_one_that_has_drained_serves_its_new_role_under_its_name_once_it_answers(fleet):
    """Routers see it leave decode and join prefill; process, address and GPUs stay."""
    draining = switch(fleet, "decode", "prefill", {"decode": 2, "prefill": 2}, {"n_decode_2": 0.0}).state
    after = switched(draining, "n_decode_2")
    entry = after.entries["n_decode_2"]
    assert (entry.service, entry.role, entry.state, entry.pid) == (
        "prefill",
        "prefill",
        EntryState.STARTING,
        4,
    )
    assert (entry.gpus, entry.url, entry.served) == ((3,), "http://127.0.0.1:8003", False)
    assert _names(after, "prefill") == ["n_decode_2", "n_prefill"]
    assert switched(after, "n_decode_2") == after


def test_the_last_ready_worker_of_a_role_stays(fleet):
    """Nothing changes in part: the planner hears why and decides again."""
    outcome = switch(fleet, "prefill", "decode", {"prefill": 0, "decode": 4}, {})
    assert (outcome.state, outcome.switching) == (fleet, ())
    assert outcome.refusal == "prefill has no ready worker to spare for decode"


def test_a_switch_that_is_taken_back_is_a_drain(fleet):
    """Of what does not serve yet it goes before a worker that does; its GPU is free once its process has ended."""
    draining = switch(fleet, "decode", "prefill", {"decode": 2, "prefill": 2}, {"n_decode_2": 0.0}).state
    outcome = scale(draining, "prefill", 1, {})
    entry = outcome.state.entries["n_decode_2"]
    assert (outcome.removed, entry.state, entry.takes) == (("n_decode_2",), EntryState.DRAINING, None)
    assert switched(outcome.state, "n_decode_2") == outcome.state
    assert target_state(outcome.state).pools[D].draining == 1


@pytest.mark.parametrize(
    ("observed", "step"),
    [
        (ObservedProcess(pid=4), ProcessStep.BEGIN_DRAIN),
        (ObservedProcess(pid=4, drain=Drain(NOW - 9, acknowledged=True, idle=False)), None),
        (ObservedProcess(pid=4, drain=Drain(NOW - 9, router_away=True)), None),
        (ObservedProcess(pid=4, drain=Drain(NOW - 9, acknowledged=True, idle=True)), ProcessStep.SWITCH),
        (ObservedProcess(pid=4, drain=Drain(NOW - 45, acknowledged=True, idle=False)), ProcessStep.TERMINATE),
        (ObservedProcess(pid=4, drain=Drain(NOW - 45), terminated_s=NOW - 1), None),
        (ObservedProcess(), ProcessStep.SWITCH),
    ],
)
def test_a_worker_switches_when_idle_and_is_ended_and_started_anew_when_it_never_is(fleet, observed, step):
    """Grace 900 simulated seconds are 45 real ones at speed 20; a process that has died starts in the new role."""
    state = switch(fleet, "decode", "prefill", {"decode": 2, "prefill": 2}, {"n_decode_2": 0.0}).state
    entry = replace(state.entries["n_decode_2"], grace_s=900.0)
    state = replace(state.with_entry("n_decode_2", entry), arbiter=replace(state.arbiter, speed=20.0))
    others = {name: ObservedProcess(pid=1, healthy_s=NOW) for name in state.entries if name != "n_decode_2"}
    expected = () if step is None else (ProcessAction(step, "n_decode_2"),)
    assert plan(state, {**others, "n_decode_2": observed}, NOW) == expected


async def test_the_planner_s_request_is_written_once_and_a_stopping_graph_refuses_it(fleet):
    """As `scale`: what is repeated changes nothing."""
    store = StateStore.of("n")
    store.write(fleet)
    target = LocalTarget(store)
    for _ in range(2):
        await target.switch(D, P, replicas={D: 2, P: 2}, decision_id="d000001")
    seen = await target.observe()
    assert (seen.pools[P].switching, seen.pools[D].ready, seen.is_adjusting) == (1, 2, True)
    with pytest.raises(ClusterError, match="no ready worker to spare"):
        await target.switch(D, P, replicas={D: 0, P: 4}, decision_id="d000002")
    assert await target.observe() == seen
    state = store.read()
    store.write(replace(state, arbiter=replace(state.arbiter, stopping=True)))
    with pytest.raises(ClusterError, match="being stopped"):
        await target.switch(D, P, replicas={D: 1, P: 3}, decision_id="d000003")
    await target.close()


def test_a_router_sees_the_role_that_the_file_says(fleet):
    """Draining in its old role, then there in the new one."""
    store = StateStore.of("n")
    draining = switch(fleet, "decode", "prefill", {"decode": 2, "prefill": 2}, {"n_decode_2": 0.0}).state
    found = []
    for state in (draining, switched(draining, "n_decode_2")):
        store.write(state)
        workers, _ = parse_statefile(store.path.read_bytes())
        found += [(each.role, each.draining) for each in workers if each.name == "n_decode_2"]
    assert found == [(D, True), (P, False)]
