"""The planner process against a real API server: what it writes, when it writes nothing, and who takes over."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest
from accounts import PLANNER, account
from operating import set_status, until
from patience import LIMIT_S, within
from planning import INTERVAL_S, is_now
from reserved_ports import reserved_port

from penstock.api import Role
from penstock.core.errors import ConfigError, ConflictError, NotFoundError
from penstock.core.http.client import ConnectionPool
from penstock.core.stamps import seconds
from penstock.kube.kinds import GRAPH_DEPLOYMENT, LEASE, SCALING_ADAPTER
from penstock_planner.cluster.fleet import parse
from penstock_planner.cluster.watch import Watch
from penstock_planner.ledger import Ledger
from penstock_planner.replay import replay
from penstock_planner.targets.kubernetes import KubernetesTarget

pytestmark = pytest.mark.cluster

D, P = Role.DECODE, Role.PREFILL


async def test_a_pressed_role_is_scaled_by_its_adapter_and_users_are_told(world):
    """The number, the decision's id, an Event with its sentence, the status; and the ledger can be replayed."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=3)
    async with world.planning():
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")
        world.kv = 0.7

        async def is_told():
            return (await world.status()).get("planner", {}).get(
                "gpus"
            ) == 3 and await world.reason() == "Observing"

        await until(is_told, "the adjustment is over")
        status = await world.status()
    decided = next(
        r for r in world.ledger().records if r["type"] == "decision" and r["decision"]["gpus_after"] == 3
    )
    decision_id = decided["decision"]["id"]
    adapter = await world.adapter("decode")
    assert adapter["metadata"]["annotations"]["penstock.dev/decision-id"] == decision_id
    sentence = "decode 1 -> 2: KV 0.95 > 0.90"
    assert (await world.events())[f"{sentence} ({decision_id})"] == ("ScaledUp", "Normal", "llama")
    assert abs(seconds(status["planner"].pop("decisionTime")) - decided["wall_s"]) <= within(2)
    assert status["planner"] == {"lastDecision": sentence, "decisionId": decision_id, "gpus": 3, "budget": 3}
    assert replay(world.ledger()).differences == ()
    assert list((world.folder / world.namespace / "llama").glob("events.out.tfevents.*"))


async def test_nothing_is_written_while_nothing_changes(world, api_server):
    """Not by a planner that decides every second, and not by the next one that starts."""
    await world.make_graph()
    async with world.planning():
        await until(lambda: is_now(world.reason(), "Observing"), "it observes")
        mark = api_server.audit_mark()
        await asyncio.sleep(3 * INTERVAL_S)
    async with world.planning():
        await asyncio.sleep(3 * INTERVAL_S)
    assert [r for r in world.ledger().records if r["type"] == "decision"]
    writes = api_server.audit_writes(after=mark)
    assert [w for w in writes if w["objectRef"].get("namespace") == world.namespace] == []


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        ({"spec": {"paused": True}}, {"spec": {"paused": None}}),
        (
            {"metadata": {"annotations": {"penstock.dev/reconcile": "disabled"}}},
            {"metadata": {"annotations": {"penstock.dev/reconcile": None}}},
        ),
    ],
    ids=["spec.paused", "annotation"],
)
async def test_a_paused_graph_is_decided_for_and_not_scaled(world, pause, resume):
    """The pressed role keeps its number until the pause ends, and a running planner sees both changes."""
    await world.make_graph(maxGpuBudget=4)

    async def change(patch):
        patch = {"metadata": {}, **patch}
        await world.client.patch(
            GRAPH_DEPLOYMENT, "llama", patch, namespace=world.namespace, field_manager="t"
        )

    async with world.planning():
        await until(lambda: is_now(world.reason(), "Observing"), "it observes")
        await change(pause)
        await until(lambda: is_now(world.reason(), "Paused"), "the pause is seen")
        world.kv = 0.95
        await asyncio.sleep(3 * INTERVAL_S)
        assert await world.desired("decode") == 1
        await change(resume)
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")
    held = [r["decision"] for r in world.ledger().records if r["type"] == "decision"]
    assert any(each["no_operation"] for each in held)


async def test_an_edit_by_hand_is_told_kept_for_an_interval_and_planned_from(world):
    """KV 0.7 asks for nothing: three stay three, whoever set them."""
    await world.make_graph()
    async with world.planning():
        await until(lambda: is_now(world.reason(), "Observing"), "it observes")
        await world.edit("decode", 3)

        async def is_told():
            told = [
                note for note, (reason, *_) in (await world.events()).items() if reason == "ReplicasEdited"
            ]
            return [note for note in told if "set by kubectl-scale" in note and note.endswith("(1 -> 3)")]

        await until(is_told, "the edit is told")
        await asyncio.sleep(2 * INTERVAL_S)
        assert await world.desired("decode") == 3
        assert (await world.status())["planner"]["decisionId"]
        world.kv = 0.1
        await until(lambda: is_now(world.desired("decode"), 2), "planned from three")


async def test_a_new_leader_takes_over_without_repeating_a_decision(world):
    """Two candidates with one log folder; the first one ends in the middle of an interval."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=8)
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        await first.enter_async_context(world.planning())
        await until(lambda: is_now(world.desired("decode"), 2), "the first one leads")
        await until(world.events, "its Event is written, which follows the replicas")
        await stack.enter_async_context(world.planning())
        await first.aclose()
        await until(lambda: is_now(world.desired("decode"), 3), "the second one leads")
        await until(lambda: is_now(world.desired("decode"), 4), "and continues")
        lease = await world.client.get(LEASE, "penstock-planner", namespace=world.namespace)
    assert lease["spec"]["leaseTransitions"] >= 1
    records = world.ledger().records
    ids = [r["decision"]["id"] for r in records if r["type"] == "decision"]
    assert ids == sorted(set(ids))
    assert [r["type"] for r in records].count("header") == 2
    ups = [note for note, (reason, *_) in (await world.events()).items() if reason == "ScaledUp"]
    assert sorted(note.split(":")[0] for note in ups) == ["decode 1 -> 2", "decode 2 -> 3", "decode 3 -> 4"]


async def test_without_its_ledger_a_planner_goes_on_behind_the_ids_that_the_cluster_knows(world, tmp_path):
    """The pod's volume is gone: no id means two decisions."""
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=8)
    async with world.planning():
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")
        await until(lambda: is_now(world.reason(), "Adjusting"), "the status knows")
    known = (await world.status())["planner"]["decisionId"]
    world.folder = tmp_path / "elsewhere"
    async with world.planning():
        await until(lambda: is_now(world.desired("decode"), 3), "decode is 3")
    first = next(r for r in world.ledger().records if r["type"] == "decision")
    assert int(first["decision"]["id"][1:]) > int(known[1:])
    assert replay(world.ledger()).differences == ()


async def test_graphs_come_change_and_go_while_the_planner_runs(world):
    """One added, one set to look only, one disabled, one that no planner can run, one deleted."""
    async with world.planning():
        await world.make_graph()
        await until(lambda: is_now(world.reason(), "Observing"), "the graph is planned")
        await world.make_graph("other", enabled=False)
        await until(lambda: is_now(world.reason("other"), "Disabled"), "the other one is not")
        for change, reason in (
            ({"noOperation": True}, "NoOperation"),
            ({"noOperation": False, "enabled": False}, "Disabled"),
            ({"enabled": True, "mode": "sla", "sla": {"profile": "absent"}}, "ProfileMissing"),
            ({"mode": "load", "sla": {"profile": None}}, "Observing"),
        ):
            await world.change(planner=change)
            await until(lambda reason=reason: is_now(world.reason(), reason), f"{change} is {reason}")
        conditions = (await world.status())["conditions"]
        live = await world.client.get(GRAPH_DEPLOYMENT, "llama", namespace=world.namespace)
        assert [c["observedGeneration"] for c in conditions] == [live["metadata"]["generation"]]
        await world.client.delete(GRAPH_DEPLOYMENT, "llama", namespace=world.namespace)

        async def is_released():
            ledger = Ledger(world.folder / world.namespace / "llama" / "ledger.jsonl")
            try:
                ledger.tail()
            except ConfigError:
                return False
            ledger.close()
            return True

        await until(is_released, "its ledger is free")
        assert await world.reason("other") == "Disabled"


async def test_what_the_process_is_told_overrides_every_graph(world):
    """No-operation by flag: pressed, decided, recorded, not acted on."""
    world.kv = 0.95
    await world.make_graph()
    async with world.planning(overrides={"no-operation": True}):
        await until(lambda: is_now(world.reason(), "NoOperation"), "it only looks")
        await asyncio.sleep(2 * INTERVAL_S)
        assert await world.desired("decode") == 1
    assert any(r["type"] == "decision" for r in world.ledger().records)
    assert await world.events() == {}


async def test_only_the_named_graph_is_planned(world):
    """--graph-name, with a Lease of its own."""
    await world.make_graph()
    await world.make_graph("other")
    async with world.planning(graph="other"):
        await until(lambda: is_now(world.reason("other"), "Observing"), "the named one is planned")
        assert await world.reason() is None
        lease = await world.client.get(LEASE, "penstock-planner-other", namespace=world.namespace)
    assert lease["spec"]["holderIdentity"]
    with pytest.raises(NotFoundError):
        await world.client.get(LEASE, "penstock-planner", namespace=world.namespace)


async def test_the_command_plans_with_few_rights_and_ends_on_sigterm(world, api_server):
    """As a ServiceAccount that may do nothing else: scaled, told, healthy, exit 0."""
    kubeconfig = account(api_server, world.namespace, "planner", PLANNER)
    port = reserved_port()
    world.kv = 0.95
    await world.make_graph(maxGpuBudget=3)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from penstock.cli.main import main; main()"),
        *("planner", "run", "--environment", "kubernetes", "--namespace", world.namespace),
        *("--kubeconfig", str(kubeconfig), "--log-dir", str(world.folder), "--metrics-port", str(port)),
        stderr=asyncio.subprocess.PIPE,
    )
    pool = ConnectionPool()
    try:
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")

        async def is_told():
            return "decode 1 -> 2" in (await world.status()).get("planner", {}).get("lastDecision", "")

        await until(is_told, "the status tells the decision")
        assert (await pool.request("GET", f"http://127.0.0.1:{port}/healthz")).status == 200
        page = (await pool.request("GET", f"http://127.0.0.1:{port}/metrics")).body.decode()
    finally:
        await pool.close()
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert f'action="up",graph="llama",namespace="{world.namespace}",reason="above_threshold"' in page
    assert process.returncode == 0, log.decode()
    assert "Forbidden" not in log.decode()
    assert [reason for reason, *_ in (await world.events()).values()] == ["ScaledUp"]


async def test_a_stale_look_conflicts_and_a_status_write_does_not(world, client):
    """The precondition is the server's own: resourceVersion on /scale."""
    world.obeys = False
    await world.make_graph()
    watch = Watch(client, namespace=world.namespace)
    task = asyncio.create_task(watch.run())
    await watch.synced()
    graph = parse(watch.graph((world.namespace, "llama")))
    target = KubernetesTarget(client, graph, watch.of((world.namespace, "llama")))
    await target.observe()
    task.cancel()
    await asyncio.wait({task})
    status = {"replicas": 1, "selector": "a=b"}
    await set_status(client, SCALING_ADAPTER, "llama-decode", world.namespace, status)
    await target.scale(D, 2, decision_id="d000001")
    assert await world.desired("decode") == 2
    await world.edit("prefill", 3)
    with pytest.raises(ConflictError, match="replicas are 3, not 1 as expected"):
        await target.scale(P, 2, decision_id="d000002")
    assert await world.desired("prefill") == 3


REFUSED = "the API server refuses its pods: exceeded quota: q, requested: pods=1, used: pods=4"


async def _refuse(world):
    """Say as the operator does that no further pod of decode can be created."""
    refused = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": REFUSED}
    status = {"conditions": [{**refused, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    await set_status(world.client, SCALING_ADAPTER, "llama-decode", world.namespace, status)


async def test_a_replica_whose_pod_is_refused_is_withdrawn_with_the_servers_reason(world):
    """No pod ever exists: the operator's condition on the adapter is all there is to go by."""
    world.obeys, world.kv = False, 0.95
    await world.make_graph()
    async with world.planning(unschedulable_s=0.5):
        await until(lambda: is_now(world.desired("decode"), 2), "decode is 2")
        await _refuse(world)
        await until(lambda: is_now(world.desired("decode"), 1), "withdrawn")

        async def told():
            events = await world.events()
            return [note for note, (reason, *_) in events.items() if reason == "ScaleUpRolledBack"]

        (note,) = await until(told, "the Event")
    assert REFUSED in note


async def test_pods_refused_at_the_floor_cost_no_write_and_one_event(world, api_server):
    """Nothing serves, and nothing flaps: the number stays, the condition says why, tries become rare."""
    world.obeys = False
    await world.make_graph()
    [pod] = await world.pods("decode")
    await world.delete_pod(pod)
    await _refuse(world)
    mark = api_server.audit_mark()
    async with world.planning(unschedulable_s=0.5):
        await until(lambda: is_now(world.reason(), "BackingOff"), "the condition says why")
        await asyncio.sleep(12 * INTERVAL_S)
        [said] = [c for c in (await world.status())["conditions"] if c["type"] == "PlannerActive"]
        events = await world.events()
    assert (said["status"], REFUSED in said["message"]) == ("False", True)
    assert await world.desired("decode") == 1
    assert sorted(reason for reason, *_ in events.values()) == ["ScaleUpFailed", "ScaledUp"]
    writes = [each["objectRef"] for each in api_server.audit_writes(after=mark)]
    own = [each for each in writes if each.get("namespace") == world.namespace]
    assert [each for each in own if each.get("subresource") == "scale"] == []
    assert len(own) <= 20


async def _rival(world):
    """Want four decode replicas for ever, as a HorizontalPodAutoscaler does."""
    while True:
        if await world.desired("decode") != 4:
            await world.edit("decode", 4, manager="kube-controller-manager")
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("managed_by", ["planner", "external"])
async def test_another_autoscaler_is_not_fought(world, api_server, managed_by):
    """Idle decode workers, which the planner would remove: it yields for longer each time, or for good."""
    world.kv, scaling = 0.1, {"minReplicas": 1, "maxReplicas": 4, "managedBy": managed_by}
    await world.make_graph()
    await world.change(services={"decode": {"scaling": scaling}})
    writer = asyncio.create_task(_rival(world))
    mark = api_server.audit_mark()
    async with world.planning():

        async def is_told():
            [told] = [
                c for c in (await world.status()).get("conditions", []) if c["type"] == "PlannerActive"
            ] or [None]
            expected = "ScaledBy" if managed_by == "planner" else "Observing"
            return told and told["reason"] == expected and "decode is scaled by hpa (" in told["message"]

        await until(is_told, "the condition names the writer")
        await asyncio.sleep(12 * INTERVAL_S)
        events = await world.events()
    writer.cancel()
    await asyncio.wait({writer})
    scales = [
        each
        for each in api_server.audit_writes(after=mark)
        if each["objectRef"].get("namespace") == world.namespace
        and each["objectRef"].get("subresource") == "scale"
        and "fieldManager=penstock-planner" in each["requestURI"]
    ]
    assert len(scales) <= (4 if managed_by == "planner" else 0)
    told = [note for note, (reason, *_) in events.items() if reason == "ReplicasEdited"]
    assert len(told) <= (1 if managed_by == "planner" else 0)
