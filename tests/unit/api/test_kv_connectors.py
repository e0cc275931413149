"""How workers hand KV over and publish it: connectors, stores and events on their command lines."""

from __future__ import annotations

import dataclasses
import json

import pytest
from processes import after, by_service

from penstock.api import Environment, GraphDeployment
from penstock.runtimes import build as building
from penstock.runtimes import filled_argv
from penstock.runtimes.engine_flags import granted_lease_s, kv_events_endpoint, kv_replay_endpoint
from penstock.runtimes.protocol import KV_EVENTS_SUFFIX


def config(name, *inner):
    """Return the JSON of --kv-transfer-config."""
    extra = {"connectors": [{"kv_connector": each} for each in inner]}
    return json.dumps({"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra})


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], None),
        (["--seed", "1"], None),
        (["--kv-transfer-config", config("NixlConnector")], None),
        ([f"--kv_transfer_config={config('MultiConnector', 'OffloadingConnector', 'NixlConnector')}"], None),
        (["--kv-transfer-config", "$(CONFIG)"], None),
        (["--kv-transfer-config", config("LMCacheConnectorV1")], "LMCacheConnectorV1"),
        (["--kv-transfer-config", config("MultiConnector", "OffloadingConnector")], "MultiConnector"),
        (["--kv-transfer-config", config("NixlConnector"), "--kv-transfer-config.kv_connector", "X"], "X"),
    ],
)
def test_a_connector_that_hands_nothing_over_is_warned_of(build, args, named):
    """The router reads what NIXL's prefill answers; with any other decode computes each prompt again in silence."""
    graph = build(runtime="vllm", services={"prefill": {"args": args}})
    found = list(building.connector_warnings(graph))
    assert [each.path for each in found] == ["spec.services.prefill.args"] * (named is not None)
    assert all(
        each.message.startswith(f"connector {named} gives the router no kv_transfer_params") for each in found
    )


@pytest.mark.parametrize(
    ("args", "remedy"),
    [
        (["--kv-transfer-config", config("MooncakeConnector")], None),
        (["--kv-transfer-config", config("NixlConnector")], "name MooncakeConnector in it"),
    ],
)
def test_mooncakes_graph_wants_mooncakes_connector(build, args, remedy):
    """And one of its workers' arguments alone is told to say so in the graph."""
    mooncake = build(runtime="vllm", engine={"kvConnector": "mooncake"}, services={"prefill": {"args": args}})
    found = list(building.connector_warnings(mooncake))
    assert [remedy in each.message for each in found] == ([] if remedy is None else [True])
    plain = build(
        runtime="vllm",
        services={"prefill": {"args": ["--kv-transfer-config", config("MooncakeConnector")]}},
    )
    assert [
        each.message.endswith("set engine.kvConnector: mooncake")
        for each in building.connector_warnings(plain)
    ] == [True]


def test_mooncakes_workers_get_its_connector(build, context):
    """Without a lease, and with the port of the server that introduces a prefill engine."""
    specs = by_service(build(runtime="vllm", engine={"kvConnector": "mooncake"}), context)
    configs = {
        role: json.loads(after(specs[role].argv, "--kv-transfer-config")) for role in ("prefill", "decode")
    }
    assert configs == {
        "prefill": {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
        "decode": {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"},
    }
    assert specs["prefill"].env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "{side_channel_port}"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in specs["prefill"].env


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_kv_that_gpus_have_no_room_for_is_kept_beside_the_way_from_prefill_to_decode(
    build, context, connector
):
    """One MultiConnector, whose first passes on as without it, and whose lease is still read back; no warning."""
    engine = {"kvConnector": connector}
    kept = build(runtime="vllm", engine={**engine, "kvOffload": {"gigabytes": 16}})
    plain = by_service(build(runtime="vllm", engine=engine), context)
    for name, spec in by_service(kept, context).items():
        if name not in {"prefill", "decode"}:
            continue
        config, alone = (json.loads(after(each.argv, "--kv-transfer-config")) for each in (spec, plain[name]))
        assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", "kv_both")
        first, second = config["kv_connector_extra_config"]["connectors"]
        assert first == alone
        assert second == {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 16_000_000_000},
        }
        assert granted_lease_s(spec.argv) == granted_lease_s(plain[name].argv)
        assert spec.env == plain[name].env
    assert list(building.connector_warnings(kept)) == []


def test_lmcache_gets_its_share_of_host_memory_in_each_process_of_a_replica(build, context):
    """Of an aggregated worker it is the one connector; a variable of the manifest wins, as of any."""
    remote = [{"name": "LMCACHE_REMOTE_URL", "value": "lm://x:1"}]
    graph = GraphDeployment.model_validate(
        {
            "metadata": {"name": "llama"},
            "spec": {
                "runtime": "vllm",
                "model": {"name": "meta/llama"},
                "engine": {"kvOffload": {"gigabytes": 8.589934592, "store": "lmcache"}},
                "services": {"both": {"role": "aggregated", "gpusPerReplica": 4, "env": remote}},
            },
        }
    )
    worker = by_service(graph, context)["both"]
    config = json.loads(after(worker.argv, "--kv-transfer-config"))
    assert config == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    given = {name: value for name, value in worker.env.items() if name.startswith("LMCACHE")}
    assert given == {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        "LMCACHE_REMOTE_URL": "lm://x:1",
    }


def test_sglang_publishes_what_its_caches_hold(build, context):
    """As vLLM: on sockets alongside the statefile, or at the graph's port in a pod; pages are as long as the router takes them."""
    graph = build(runtime="sglang", router={"kvEventsPort": 5557})
    prefill, decode = (by_service(graph, context)[name] for name in ("prefill", "decode"))
    config = json.loads(after(prefill.argv, "--kv-events-config"))
    assert config["endpoint"] == "ipc:///state/llama.{kv_events_port}" + KV_EVENTS_SUFFIX
    assert prefill.ports == ("port", "side_channel_port", "kv_events_port")
    assert after(prefill.argv, "--page-size") == "16"
    assert "--kv-events-config" not in decode.argv
    pods = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    there = by_service(graph, pods)["prefill"]
    assert json.loads(after(there.argv, "--kv-events-config"))["endpoint"] == "tcp://*:5557"
    assert there.ports == ("port", "side_channel_port")
    own = build(runtime="sglang", router={"kvEventsPort": 5557}, engine={"blockTokens": 64})
    assert after(by_service(own, context)["prefill"].argv, "--page-size") == "64"


def test_vllm_publishes_kv_events_in_a_cluster_where_the_router_follows_them(build, context):
    """Prefill workers only: on the port that the graph names; on one host on a socket that its network cannot read."""
    cluster = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    graph = build(runtime="vllm", router={"kvEventsPort": 5557})
    specs = by_service(graph, cluster)

    assert json.loads(after(specs["prefill"].argv, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
    assert "--kv-events-config" not in specs["decode"].argv
    local = by_service(graph, context)["prefill"]
    assert kv_events_endpoint(filled_argv(local, {"kv_events_port": 7})) == "ipc:///state/llama.7.kv"
    assert kv_replay_endpoint(filled_argv(local, {"kv_events_port": 7})) == "ipc:///state/llama.7.kr"
    assert local.ports == ("port", "kv_events_port", "side_channel_port")


def test_simulated_workers_publish_kv_events_where_the_router_follows_them(build, context):
    """In a cluster on the graph's port; on one host each on a port of its own, for this host alone."""
    graph = build(router={"kvEventsPort": 5557})
    local = by_service(graph, context)
    cluster = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    remote = by_service(graph, cluster)["prefill"]

    filled = filled_argv(local["prefill"], {"port": 1, "kv_events_port": 2, "kv_replay_port": 3})
    assert kv_events_endpoint(filled) == "tcp://127.0.0.1:2"
    assert kv_replay_endpoint(filled) == "tcp://127.0.0.1:3"
    assert local["prefill"].ports == ("port", "kv_events_port", "kv_replay_port")
    assert (kv_events_endpoint(remote.argv), kv_replay_endpoint(remote.argv)) == (
        "tcp://*:5557",
        "tcp://*:5558",
    )
    assert remote.ports == local["decode"].ports == ("port",)
    assert "--kv-events-config" not in local["decode"].argv
    assert "--kv-events-config" not in by_service(build(), context)["prefill"].argv
