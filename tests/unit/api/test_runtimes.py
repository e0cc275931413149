from __future__ import annotations

import dataclasses
import json

import pytest
from certificates import write_certificates
from processes import after, by_service

from penstock.api import Environment, GraphDeployment, Role
from penstock.core.errors import ConfigError
from penstock.runtimes import build as building
from penstock.runtimes import masked_argv, masked_env, process_specs, runtime_of
from penstock.runtimes.engine_flags import granted_lease_s

LEASE = {"kv_lease_duration": 30, "decoder_kv_blocks_ttl": 480}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """The certificate of an authority, PEM."""
    folder = tmp_path_factory.mktemp("tls")
    write_certificates(folder)
    return (folder / "ca.crt").read_text()


CACHES = {
    "VLLM_CACHE_ROOT": "{cache_folder}/vllm",
    "TORCHINDUCTOR_CACHE_DIR": "{cache_folder}/inductor",
    "TRITON_CACHE_DIR": "{cache_folder}/triton",
}


@pytest.mark.parametrize(
    ("runtime", "engine", "is_own"),
    [("vllm", {}, True), ("dynamo", {}, True), ("dynamo", {"mocker": True}, False), ("simulated", {}, False)],
)
def test_what_an_engine_compiles_is_its_own_on_one_machine_and_its_pods_in_a_cluster(
    build, context, runtime, engine, is_own
):
    """Engines that share the folder die of what one of them left half written."""
    graph = build(runtime=runtime, engine=engine)
    cluster = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    for where, expected in ((context, CACHES if is_own else {}), (cluster, {})):
        env = by_service(graph, where)["decode"].env
        assert {name: value for name, value in env.items() if name in CACHES} == expected


def test_processes_come_routers_first_planner_last(build, context):
    """Every service and the planner is one kind of process, named by namespace and service."""
    specs = process_specs(build(services={"zz": {"role": "router"}}), context)
    assert [(spec.name, spec.role) for spec in specs] == [
        ("llama_frontend", "router"),
        ("llama_zz", "router"),
        ("llama_prefill", "prefill"),
        ("llama_decode", "decode"),
        ("llama_planner", "planner"),
    ]


def test_simulated_worker(build, context):
    """A simulated worker gets its role, profile and speed, and vLLM's own flags."""
    fast = dataclasses.replace(context, speed=20)
    graph = build(
        model={"contextTokens": 4096},
        engine={"profile": "a100-x.yaml", "kvBlocks": 100, "maxRunningRequests": 8, "maxBatchTokens": 2048, "blockTokens": 32},
        services={"prefill": {"profile": "h100-y.yaml"}},
    )  # fmt: skip
    specs = by_service(graph, fast)
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": LEASE}
    assert specs["decode"].argv == (
        "/py", "-m", "penstock.cli", "engine", "serve", "meta/llama", "--served-model-name", "llama",
        "--host", "127.0.0.1", "--port", "{port}", "--role", "decode", "--profile", "a100-x.yaml", "--speed", "20",
        "--max-model-len", "4096", "--block-size", "32", "--num-gpu-blocks-override", "100",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
        "--kv-transfer-config", json.dumps(config, separators=(",", ":")),
    )  # fmt: skip
    assert after(specs["prefill"].argv, "--profile") == "h100-y.yaml"
    assert json.loads(after(specs["prefill"].argv, "--kv-transfer-config"))["kv_role"] == "kv_producer"
    decode = specs["decode"]
    assert (decode.gpus, decode.ports, decode.health_path) == (1, ("port",), "/health")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        (
            {"engine": {"requestLimit": 64, "requestQueue": 8}},
            {"--engine-request-limit": "64", "--engine-request-queue": "8"},
        ),
        ({"services": {"decode": {"startupSeconds": 12.5}}}, {"--startup-seconds": "12.5"}),
        (
            {"router": {"tiers": {"enabled": True}}, "engine": {"preemption": {"maxPerRequest": 2}}},
            {"--scheduling-policy": "priority", "--preemption-config": '{"maxPerRequest":2}'},
        ),
    ],
)
def test_settings_reach_simulated_workers_where_they_are_given(build, context, changes, flags):
    """The limit with its queue, a cold start, tiers and the bounds of their preemption."""
    argv, plain = (by_service(each, context)["decode"].argv for each in (build(**changes), build()))
    assert {flag: after(argv, flag) for flag in flags} == flags
    assert set(flags).isdisjoint(plain)


def test_an_address_for_other_workers_is_given_where_it_differs_from_the_bound_one(build, context):
    """In a pod, which binds every address."""
    specs = by_service(build(), dataclasses.replace(context, host="0.0.0.0", peer_host="10.1.2.3"))
    assert specs["decode"].env == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3"}
    assert by_service(build(), context)["decode"].env == {}


def test_simulated_router_and_planner(build, context):
    """Router and planner get the manifest, the discovery file and the speed; ports only where they listen."""
    specs = by_service(build(), dataclasses.replace(context, log_dir="/logs/planner"))
    assert specs["frontend"].argv == (
        "/py", "-m", "penstock.cli", "router", "serve", "--graph", "/g.yaml",
        "--discovery", "/state/llama.json", "--host", "127.0.0.1", "--port", "{port}", "--speed", "1",
    )  # fmt: skip
    assert specs["planner"].argv == (
        "/py", "-m", "penstock.cli", "planner", "run", "--graph", "/g.yaml", "--namespace", "llama",
        "--environment", "local", "--speed", "1", "--metrics-port", "{port}", "--log-dir", "/logs/planner",
    )  # fmt: skip
    planner = specs["planner"]
    assert (planner.ports, planner.health_path, planner.gpus) == (("port",), None, 0)


def _connector(spec):
    """Return kv_connector_extra_config of a process."""
    return json.loads(spec.argv[spec.argv.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]


@pytest.mark.parametrize("runtime", ["vllm", "simulated", "dynamo"])
def test_each_service_gets_its_own_lease(build, context, runtime):
    """The graph's, or the service's own; the life of decoder blocks goes to decode alone."""
    graph = build(
        runtime=runtime,
        lease={"durationSeconds": 40, "decoderBlocksTtlSeconds": 300},
        services={"prefill": {"lease": {"durationSeconds": 60}}},
    )
    specs = by_service(graph, context)
    assert _connector(specs["prefill"]) == {"kv_lease_duration": 60}
    assert _connector(specs["decode"]) == {"kv_lease_duration": 40, "decoder_kv_blocks_ttl": 300}
    assert graph.spec.lease_seconds == 60


def test_vllm_worker(build, context):
    """A vLLM worker runs as it is: NIXL roles, lease and side channel, tensor parallelism from the GPUs."""
    graph = build(
        runtime="vllm",
        lease={"durationSeconds": 60, "decoderBlocksTtlSeconds": 100},
        services={"decode": {"gpusPerReplica": 4}},
        router={"tiers": {"enabled": True}},
        engine={"kvBufferDevice": "cpu", "streamIntervalTokens": 4},
    )
    specs = by_service(graph, context)
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": 60, "decoder_kv_blocks_ttl": 100},
        "kv_buffer_device": "cpu",
    }
    assert specs["decode"].argv == (
        "vllm", "serve", "meta/llama", "--served-model-name", "llama", "--host", "127.0.0.1",
        "--port", "{port}", "--enable-prompt-tokens-details", "--tensor-parallel-size", "4",
        "--stream-interval", "4", "--scheduling-policy", "priority", "--kv-transfer-config", json.dumps(config, separators=(",", ":")),
    )  # fmt: skip
    assert specs["decode"].env == {
        **CACHES,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "{side_channel_port}",
    }
    assert specs["decode"].ports == ("port", "side_channel_port")
    assert specs["decode"].gpus == 4
    assert specs["frontend"].argv[2:5] == ("penstock.cli", "router", "serve")


@pytest.mark.parametrize(
    ("runtime", "program"),
    [("vllm", ("/opt/venv/bin/vllm", "serve")), ("dynamo", ("/opt/venv/bin/python", "-m", "dynamo.vllm"))],
)
def test_programs_of_a_python_environment(build, context, runtime, program):
    """Workers run where the manifest says; Penstock's own processes stay in Penstock's environment."""
    graph = build(runtime=runtime, engine={"pythonEnvironment": "/opt/venv"})
    specs = by_service(graph, context)

    assert specs["decode"].argv[: len(program)] == program
    assert specs["planner"].argv[0] == "/py"


def test_vllm_aggregated_has_no_connector(build, context):
    """An aggregated worker hands nothing over."""
    plain = build(runtime="vllm").to_manifest()
    plain["spec"]["services"] = {"worker": {"role": "aggregated"}}
    worker = by_service(GraphDeployment.model_validate(plain), context)["worker"]
    assert "--kv-transfer-config" not in worker.argv
    assert (worker.ports, "VLLM_NIXL_SIDE_CHANNEL_PORT" in worker.env) == (("port",), False)


def test_several_nodes_become_pipeline_stages(build, context):
    """Tensor parallelism stays within a node."""
    graph = build(runtime="vllm", services={"decode": {"gpusPerReplica": 4, "nodesPerReplica": 2}})
    decode = by_service(graph, context)["decode"]
    assert after(decode.argv, "--tensor-parallel-size") == "2"
    assert after(decode.argv, "--pipeline-parallel-size") == "2"
    assert (decode.gpus, decode.nodes) == (4, 2)


def test_dynamo_vllm_worker(build, context):
    """Dynamo's worker finds the others by file, and serves its status on the port."""
    graph = build(runtime="dynamo", engine={"requestLimit": 8, "requestQueue": 4})
    prefill = by_service(graph, context)["prefill"]
    assert prefill.argv[:9] == (
        "/py", "-m", "dynamo.vllm", "--model", "meta/llama", "--served-model-name", "llama",
        "--disaggregation-mode", "prefill",
    )  # fmt: skip
    assert json.loads(after(prefill.argv, "--kv-transfer-config"))["kv_role"] == "kv_both"
    assert prefill.env == {
        "DYN_NAMESPACE": "llama",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": "/state/llama.discovery",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        **CACHES,
        "DYN_SYSTEM_PORT": "{port}",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "{side_channel_port}",
        "DYN_ENGINE_REQUEST_LIMIT": "8",
        "DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "4",
        "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "900",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "900",
    }


def test_dynamo_in_a_cluster_discovers_by_the_api_server(build, context):
    """On Kubernetes no folder is shared."""
    cluster = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    env = by_service(build(runtime="dynamo"), cluster)["decode"].env
    assert env["DYN_DISCOVERY_BACKEND"] == "kubernetes"
    assert "DYN_FILE_KV" not in env
    assert "DYN_SYSTEM_HOST" not in env  # a pod is reached at its address


def test_dynamo_frontend_routes_in_place_of_ours(build, context):
    """Policy and thresholds become the frontend's flags."""
    graph = build(
        runtime="dynamo",
        router={
            "policy": "kv-cost",
            "admission": {"mode": "token-capacity", "activePrefillTokensThreshold": None},
        },
    )
    frontend = by_service(graph, context)["frontend"]
    assert frontend.argv == (
        "/py", "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", "{port}",
        "--router-mode", "kv", "--migration-limit", "2", "--active-decode-blocks-threshold", "0.85",
    )  # fmt: skip
    assert frontend.health_path == "/live"
    assert frontend.env["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"] == "900"


def test_dynamo_mocker_follows_the_speed(build, context):
    """The mocker models time, so it takes a speed; its cold start and patience are real, so they shrink with it."""
    graph = build(
        runtime="dynamo",
        model={"contextTokens": 4096},
        engine={"mocker": True, "kvBlocks": 500},
        services={"prefill": {"startupSeconds": 12}},
    )
    specs = by_service(graph, dataclasses.replace(context, speed=5))
    assert specs["prefill"].argv == (
        "/py", "-m", "dynamo.mocker", "--model-path", "meta/llama", "--model-name", "llama",
        "--speedup-ratio", "5", "--disaggregation-mode", "prefill", "--bootstrap-ports", "{side_channel_port}",
        "--max-model-len", "4096", "--num-gpu-blocks-override", "500", "--startup-time", "2.4",
    )  # fmt: skip
    assert specs["prefill"].env["DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT"] == "180"
    assert specs["prefill"].env["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"] == '["generate"]'
    assert specs["prefill"].ports == ("port", "side_channel_port")
    assert specs["decode"].ports == ("port",)


@pytest.mark.parametrize("runtime", ["vllm", "dynamo"])
def test_real_engines_run_in_real_time(build, context, runtime):
    """A speed other than 1 is refused where workers cannot follow it."""
    with pytest.raises(ConfigError, match=f"--speed: 2, but workers of runtime {runtime} run in real time"):
        process_specs(build(runtime=runtime), dataclasses.replace(context, speed=2))


def test_user_arguments_and_environment_come_last(build, context):
    """Arguments follow the runtime's; the service's variables win over the graph's, those over the runtime's."""
    graph = build(
        runtime="vllm",
        env=[{"name": name, "value": "graph"} for name in "ABC"],
        envFrom=[{"secretRef": {"name": "all"}}],
        services={
            "decode": {
                "args": ["--seed", "1"],
                "env": [
                    {"name": "B", "value": "service"},
                    {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "c"}}},
                    {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "10.0.0.1"},
                ],
                "envFrom": [{"configMapRef": {"name": "mine"}}],
            }
        },
    )
    specs = by_service(graph, context)
    decode = specs["decode"]
    assert decode.argv[-2:] == ("--seed", "1")
    assert decode.env == {
        **CACHES,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "{side_channel_port}",
        "A": "graph",
        "B": "service",
    }
    assert [each.name for each in decode.env_sources] == ["C"]
    assert [each.to_manifest() for each in decode.env_from] == [
        {"secretRef": {"name": "all"}},
        {"configMapRef": {"name": "mine"}},
    ]
    assert specs["frontend"].env == {}


def test_sizes_and_limits_reach_the_process(build, context):
    """Replicas, bounds, grace and start-up time are the service's."""
    bounds = {"replicas": 2, "scaling": {"maxReplicas": 3}}
    times = {"terminationGracePeriodSeconds": 60, "startupTimeoutSeconds": 30}
    decode = by_service(build(services={"decode": {**bounds, **times}}), context)["decode"]
    assert (decode.replicas, decode.bounds, decode.grace_s, decode.startup_s) == (2, (1, 3), 60.0, 30.0)


@pytest.mark.parametrize(
    ("runtime", "setting", "expected"),
    [
        ("vllm", {}, 600.0),
        ("dynamo", {}, 600.0),
        ("simulated", {}, 60.0),
        ("vllm", {"livenessTimeoutSeconds": 300}, 300.0),
        ("simulated", {"livenessTimeoutSeconds": 5}, 5.0),
    ],
)
def test_a_real_engine_may_be_silent_ten_times_as_long(build, context, runtime, setting, expected):
    """A real engine may stall in one step and live; Penstock's own processes get a minute."""
    specs = by_service(build(runtime=runtime, services={"decode": setting}), context)
    assert specs["decode"].liveness_s == expected
    assert specs["frontend"].liveness_s == (600.0 if runtime == "dynamo" else 60.0)


def test_a_runtime_that_is_not_installed_is_refused():
    """With the names of those that are."""
    with pytest.raises(
        ConfigError, match="runtime 'absent': choose from dynamo, sglang, simulated, trtllm, vllm"
    ):
        runtime_of("absent")


def test_a_runtime_without_a_frontend_has_no_command_for_one(build, context):
    """Penstock's router is there."""
    spec = build().spec
    with pytest.raises(NotImplementedError):
        runtime_of("simulated").frontend(spec, spec.services["frontend"], context)


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "simulated"])
def test_workers_that_speak_https_get_their_certificate(build, context, runtime, authority):
    """Of the folder on one machine, of the mounted Secret in a pod; routers and planners stay as they are."""
    tls = {"caBundle": authority, "folder": "/certs"}
    graph, plain = build(runtime=runtime, engine={"tls": tls}), build(runtime=runtime)
    pods = dataclasses.replace(context, environment=Environment.KUBERNETES, discovery="kubernetes")
    for where, folder in ((context, "/certs"), (pods, "/etc/penstock-worker-tls")):
        found, without = by_service(graph, where), by_service(plain, where)
        argv = found["decode"].argv
        assert (after(argv, "--ssl-certfile"), after(argv, "--ssl-keyfile")) == (
            f"{folder}/tls.crt",
            f"{folder}/tls.key",
        )
        assert ("--enable-ssl-refresh" in argv) is (runtime != "simulated")
        assert {name: spec.scheme for name, spec in found.items() if spec.scheme != "http"} == {
            "prefill": "https",
            "decode": "https",
        }
        assert found["frontend"] == without["frontend"]
        assert "--ssl-certfile" not in without["decode"].argv


@pytest.mark.parametrize(
    ("text", "words"), [("-----BEGIN CERTIFICATE-----", "cannot be read"), ("x", "pattern"), ("", "pattern")]
)
def test_authorities_that_are_none_are_refused(build, text, words):
    """When the manifest is read, not when the first worker is reached."""
    with pytest.raises(ValueError, match=words):
        build(runtime="vllm", engine={"tls": {"caBundle": text}})


@pytest.mark.parametrize(("device", "memory"), [(None, "23Gi"), ("cpu", "19Gi")])
def test_a_pod_requests_the_memory_of_the_kv_that_it_keeps(build, device, memory):
    """Alongside its processes' own: 8 GiB with one GPU, 4 without."""
    engine = {"kvOffload": {"gigabytes": 16}, "kvBufferDevice": device}
    spec = build(runtime="vllm", engine=engine).spec
    assert runtime_of("vllm").pod_requests(spec, Role.DECODE, 1)["memory"] == memory


def test_secrets_are_masked_by_name():
    """Values of variables and flags whose name says secret are hidden, token counts are not."""
    env = {"HF_TOKEN": "hf_x", "OPENAI_API_KEY": "sk", "MONKEY": "m", "MAX_TOKENS": "8"}
    assert masked_env(env) == {"HF_TOKEN": "***", "OPENAI_API_KEY": "***", "MONKEY": "m", "MAX_TOKENS": "8"}
    argv = ("vllm", "--api-key", "sk", "--hf-token=hf_x", "--max-num-batched-tokens", "8", "--api-key", "--x")
    assert masked_argv(argv) == (
        "vllm", "--api-key", "***", "--hf-token=***", "--max-num-batched-tokens", "8", "--api-key", "--x",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        (
            {"planner": {"metrics": {"prometheusUrl": "http://p:9090"}}},
            {"planner.metrics.prometheusUrl": "prometheus"},
        ),
        ({"planner": {"enabled": False, "metrics": {"prometheusUrl": "http://p:9090"}}}, {}),
        ({"router": {"tokenizer": "simulated"}}, {}),
        ({"router": {"tokenizer": "/x/tokenizer.json"}}, {"router.tokenizer": "tokenizer"}),
        (
            {"router": {"tokenizer": "simulated", "kvEventsPort": 5557}},
            {"router.kvEventsPort": "kv-events"},
        ),
        ({"router": {"gateway": {"enabled": True}}}, {"router.gateway.enabled": "gateway"}),
    ],
)
def test_settings_whose_package_is_missing_are_named_with_the_command_that_installs_it(
    build, changes, expected, monkeypatch
):
    """Prometheus for the planner, tokenizer and KV events for the router; before a process ends for lack of one."""
    assert building.missing_extras(build(**changes)) == []
    monkeypatch.setattr(building, "find_spec", lambda _name: None)
    found = building.missing_extras(build(**changes))
    assert [each.path for each in found] == [f"spec.{path}" for path in expected]
    for each, extra in zip(found, expected.values(), strict=True):
        assert each.message.endswith(f"not installed here; pip install 'penstock[{extra}]'")


@pytest.mark.parametrize(
    ("argv", "lease_s"),
    [
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"kv_lease_duration": 40}}'], 40),
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"kv_lease_duration": "40"}}'], None),
        (["--kv-transfer-config", '{"kv_connector_extra_config": {"connectors": []}}'], None),
        (["--kv-transfer-config", '{"kv_connector_extra_config": []}'], None),
        (["--kv-transfer-config", "{"], None),
        (["--kv-transfer-config", "[]"], None),
        (["--kv-transfer-config"], None),
        ([], None),
    ],
)
def test_a_lease_is_read_back_where_a_command_names_one(argv, lease_s):
    """Others may have written the command."""
    assert granted_lease_s(argv) == lease_s
