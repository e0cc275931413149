"""Pod templates: process, place, resources and hooks."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from certificates import write_certificates

from penstock.core.errors import InvalidSpecError

POOLS = {
    "a100": {
        "nodeSelector": {"pool": "a100", "arch": "amd64"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "gpuResourceName": "amd.com/gpu",
        "cacheMount": "/models",
    }
}
POOLED = {"nodePools": POOLS, "services": {"decode": {"nodePool": "a100"}}}


def values(container):
    """Literal variables by name."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def refs(container):
    """Variables that Kubernetes fills, by name."""
    return {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}


def test_worker_command(container):
    """A vLLM worker gets its lease, the priority order and its ports; the user's arguments come last."""
    found = container(
        "prefill",
        router={"tiers": {"enabled": True}},
        lease={"durationSeconds": 12, "decoderBlocksTtlSeconds": 60},
        services={"prefill": {"args": ["--dtype", "half"]}},
    )
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"kv_lease_duration": 12},
    }
    assert [*found["command"], *found["args"]] == [
        "vllm", "serve", "meta/llama", "--served-model-name", "llama", "--host", "0.0.0.0", "--port", "8000",
        "--enable-prompt-tokens-details", "--tensor-parallel-size", "1", "--scheduling-policy", "priority",
        "--kv-transfer-config", json.dumps(transfer, separators=(",", ":")), "--dtype", "half",
    ]  # fmt: skip
    channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
    assert values(found).items() >= {**channel, "VLLM_HOST_IP": "$(POD_IP)"}.items()


def test_address_comes_before_those_who_use_it(container):
    """Kubernetes expands $(POD_IP) only in variables after it."""
    for runtime in ("vllm", "dynamo", "simulated"):
        names = [each["name"] for each in container("decode", runtime=runtime)["env"]]
        assert names[:2] == ["POD_IP", "POD_NAME"]


def test_dynamo_finds_its_like_by_the_api_server(container):
    """A namespace per graph, discovery by Kubernetes, and who and where the pod is."""
    found = container("decode", runtime="dynamo")
    assert {name: each["fieldRef"]["fieldPath"] for name, each in refs(found).items()} == {
        "POD_IP": "status.podIP",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
    }
    place = {"DYN_TCP_RPC_HOST": "$(POD_IP)", "DYN_SYSTEM_PORT": "8000"}
    discovery = {"DYN_NAMESPACE": "serving-llama", "DYN_DISCOVERY_BACKEND": "kubernetes"}
    assert values(found).items() >= {**discovery, **place}.items()


def test_users_variables_win_and_secrets_stay_references(container):
    """A name occurs once, whoever set it; Secrets are named, never read."""
    token = {"secretKeyRef": {"name": "hf", "key": "token"}}
    found = container(
        "decode",
        env=[
            {"name": "HF_TOKEN", "valueFrom": token},
            {"name": "A", "value": "graph"},
            {"name": "HOME", "value": "/h"},
        ],
        envFrom=[{"secretRef": {"name": "more"}, "prefix": "X_"}],
        services={
            "decode": {
                "env": [{"name": "A", "value": "service"}, {"name": "VLLM_HOST_IP", "valueFrom": token}],
                "envFrom": [{"configMapRef": {"name": "c", "optional": True}}],
            }
        },
    )
    names = [each["name"] for each in found["env"]]
    assert len(names) == len(set(names))
    assert values(found).items() >= {"A": "service", "HOME": "/h"}.items()
    assert refs(found)["HF_TOKEN"] == refs(found)["VLLM_HOST_IP"] == token
    assert found["envFrom"] == [
        {"prefix": "X_", "secretRef": {"name": "more"}},
        {"configMapRef": {"name": "c", "optional": True}},
    ]


@pytest.mark.parametrize(
    ("changes", "service", "expected"),
    [
        ({"runtime": "vllm"}, "frontend", "own:1"),
        ({"runtime": "vllm"}, "decode", "vllm/vllm-openai:v0.32.0"),
        ({"runtime": "simulated"}, "frontend", "own:1"),
        ({"runtime": "simulated"}, "decode", "own:1"),
        ({"runtime": "dynamo"}, "frontend", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1"),
        ({"runtime": "simulated", "image": "graph:2"}, "decode", "graph:2"),
        ({"runtime": "vllm", "image": "graph:2"}, "frontend", "own:1"),
        ({"services": {"frontend": {"image": "router:3"}}}, "frontend", "router:3"),
    ],
)
def test_operators_image_is_the_default_of_penstocks_own_processes(
    objects, context, changes, service, expected
):
    """Where the graph names none; the pull policy is every container's."""
    own = dataclasses.replace(context, penstock_image="own:1", image_pull_policy="Never")
    template = objects(context=own, **changes)["Deployment", f"llama-{service}"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (expected, "Never")


def test_node_pool_places_and_names_the_gpus(template):
    """Selector, taints and resource are the pool's; requests equal limits."""
    found = template("decode", **POOLED, planner={"enabled": False})
    spec = found["spec"]
    assert spec["nodeSelector"] == {"arch": "amd64", "pool": "a100"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"] == {"amd.com/gpu": "1"}
    assert resources["requests"].items() >= resources["limits"].items()


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"runtime": "vllm"}, {"nvidia.com/gpu": "1"}),
        ({"runtime": "simulated"}, None),
        ({"runtime": "simulated", **POOLED}, {"amd.com/gpu": "1"}),
        ({"runtime": "dynamo"}, {"nvidia.com/gpu": "1"}),
        ({"runtime": "dynamo", "engine": {"mocker": True}}, None),
        ({"runtime": "dynamo", "engine": {"mocker": True}, **POOLED}, {"amd.com/gpu": "1"}),
    ],
)
def test_modelled_gpus_are_asked_for_only_in_a_pool(template, changes, asked):
    """Workers without real GPUs run on a cluster without them, and count all the same."""
    found = template("decode", **changes)
    resources = found["spec"]["containers"][0].get("resources", {})
    assert resources.get("limits") == asked
    assert found["metadata"]["annotations"]["penstock.dev/gpus"] == "1"


@pytest.mark.parametrize("planner", [{"maxGpuBudget": None}, {"enabled": False}])
def test_workers_wait_for_the_budget_only_where_there_is_one(template, planner):
    """The gate is on worker pods of a graph with a ceiling."""
    assert template("decode")["spec"]["schedulingGates"] == [{"name": "penstock.dev/gpu-budget"}]
    assert "schedulingGates" not in template("decode", planner=planner)["spec"]


@pytest.mark.parametrize(
    ("router", "name", "flag"),
    [
        ({"auth": {"apiKeysSecret": "of-a-user"}}, "api-keys", "--api-keys-file"),
        ({"tiers": {"enabled": True, "keysSecret": "of-a-user"}}, "tier-keys", "--tier-keys-file"),
        ({"gateway": {"enabled": True, "tls": {"secret": "of-a-user"}}}, "gateway-tls", "--ext-proc-tls"),
    ],
)
def test_keys_are_mounted_not_read(template, router, name, flag):
    """The Secret is a folder in routers, given by its flag before the user's own; workers do not see it."""
    changes = {"router": router, "services": {"frontend": {"args": ["--x"]}}}
    spec = template("frontend", **changes)["spec"]
    assert {"name": name, "secret": {"secretName": "of-a-user"}} in spec["volumes"]
    (container,) = spec["containers"]
    assert container["args"][-3:] == [flag, f"/etc/penstock-{name}", "--x"]
    mount = {"name": name, "mountPath": f"/etc/penstock-{name}", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert "of-a-user" not in json.dumps(template("decode", **changes))


def test_without_tiers_nobody_reads_their_keys(template):
    """The Secret may be there already."""
    router = {"tiers": {"enabled": False, "keysSecret": "tier-secret"}}
    assert "tier-secret" not in json.dumps(template("frontend", router=router))


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"cacheMount": "/models"}, {"hostPath": {"path": "/models", "type": "Directory"}}),
        (
            {"cacheMount": "/models", "cacheClaim": "weights"},
            {"persistentVolumeClaim": {"claimName": "weights"}},
        ),
    ],
)
def test_model_cache_is_a_folder_of_the_node_or_a_claim(template, cache, volume):
    """Mounted at the path that the pool names, which is where models are looked for."""
    spec = template("decode", nodePools={"p": cache}, services={"decode": {"nodePool": "p"}})["spec"]
    assert {"name": "model-cache", **volume} in spec["volumes"]
    (container,) = spec["containers"]
    assert {"name": "model-cache", "mountPath": "/models"} in container["volumeMounts"]
    assert values(container)["HF_HOME"] == "/models"


def test_engines_get_shared_memory_and_a_home(template):
    """Engines talk through /dev/shm and write caches below a home that user 1000 owns."""
    spec = template("decode")["spec"]
    assert spec["volumes"] == [
        {"name": "tmp", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    (container,) = spec["containers"]
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/tmp", "/home/penstock", "/dev/shm"]
    assert values(container).items() >= {"HOME": "/home/penstock", "USER": "penstock"}.items()
    assert container["securityContext"]["readOnlyRootFilesystem"] is False


@pytest.mark.parametrize(("startup_s", "failures"), [(600, 300), (1, 1), (7, 4), (86400, 43200)])
def test_a_slow_load_is_waited_for(container, startup_s, failures):
    """Period times failures is at least the start-up time-out."""
    probe = container("decode", services={"decode": {"startupTimeoutSeconds": startup_s}})["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (2, failures)
    assert probe["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize(("liveness_s", "failures"), [(600, 60), (605, 61), (1, 1)])
def test_a_services_own_liveness_limit_sets_the_failures(container, liveness_s, failures):
    """Period times failures is at least the limit."""
    probe = container("decode", services={"decode": {"livenessTimeoutSeconds": liveness_s}})["livenessProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (10, failures)


@pytest.mark.parametrize(
    ("runtime", "service", "hook"),
    [
        ("vllm", "frontend", "sleep"),
        ("vllm", "decode", "exec"),
        ("dynamo", "frontend", "sleep"),
        ("dynamo", "decode", "exec"),
        ("simulated", "decode", "sleep"),
    ],
)
def test_who_aborts_at_sigterm_gets_it_when_idle(container, runtime, service, hook):
    """Workers of vLLM and Dynamo wait in the hook; the others finish their requests themselves."""
    assert list(container(service, runtime=runtime)["lifecycle"]["preStop"]) == [hook]


@pytest.mark.parametrize(("is_ipv6", "engines"), [(False, "0.0.0.0"), (True, "::")])
def test_pods_are_reached_in_clusters_of_either_family(objects, context, is_ipv6, engines):
    """Penstock's own processes listen on both; another engine on the pods' own family, by which its hook asks it, too."""
    context = dataclasses.replace(context, is_ipv6=is_ipv6)

    def container(service, runtime):
        found = objects(context=context, runtime=runtime)["Deployment", f"llama-{service}"]
        return found["spec"]["template"]["spec"]["containers"][0]

    def host(found):
        return found["args"][found["args"].index("--host") + 1]

    assert {host(container(*each)) for each in (("frontend", "vllm"), ("decode", "simulated"))} == {"::"}
    for runtime in ("vllm", "sglang"):
        worker = container("decode", runtime)
        assert host(worker) == engines
        script = worker["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert ("[::1]" in script, "127.0.0.1" in script) == (is_ipv6, not is_ipv6)


@pytest.mark.parametrize("policy", ["", "PreferDualStack"])
def test_services_get_the_family_policy_of_the_installation(objects, context, policy):
    """Nothing is said unless it is set: the cluster's default holds."""
    found = objects(context=dataclasses.replace(context, ip_family_policy=policy))
    services = [each["spec"] for (kind, _), each in found.items() if kind == "Service"]
    assert {each.get("ipFamilyPolicy", "") for each in services} == {policy}


@pytest.mark.parametrize("token", [None, "token"])
def test_workers_that_speak_https(objects, tmp_path, token):
    """Probed by https, marked for operator, planner and Prometheus; a router gets the token alone, and the authorities."""
    write_certificates(tmp_path)
    tls = {"caBundle": (tmp_path / "ca.crt").read_text(), "secret": "workers", "tokenKey": token}
    found = objects(runtime="vllm", engine={"tls": tls})
    worker, router = (
        found["Deployment", f"llama-{name}"]["spec"]["template"] for name in ("decode", "frontend")
    )
    (container,) = worker["spec"]["containers"]
    assert worker["metadata"]["annotations"]["penstock.dev/scheme"] == "https"
    assert "penstock.dev/scheme" not in router["metadata"]["annotations"]
    schemes = [
        container[f"{name}Probe"]["httpGet"].get("scheme") for name in ("startup", "readiness", "liveness")
    ]
    assert schemes == ["HTTPS"] * 3
    assert "scheme" not in router["spec"]["containers"][0]["livenessProbe"]["httpGet"]
    (hook,) = container["lifecycle"].values()
    program = hook["exec"]["command"][2]
    assert all(part in program for part in ('urlopen("https://127.0.0.1:8000/metrics"', "context=ssl."))
    compile(program, "hook", "exec")

    def mounted(template):
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        secret = volumes.get("worker-tls", {"secret": {"items": []}})["secret"]
        return [each["key"] for each in secret["items"]]

    assert mounted(worker) == ["tls.crt", "tls.key"]
    assert mounted(router) == ([] if token is None else ["token"])
    graph = yaml.safe_load(found["ConfigMap", "llama-router"]["data"]["graph.yaml"])
    kept = {key: value for key, value in tls.items() if value is not None}
    assert graph["spec"]["engine"]["tls"] == kept


def test_prefill_and_decode_prefer_one_zone(template):
    """A preference, because a zone that is full must not stop a scale-up."""
    affinity = template("decode")["spec"]["affinity"]["podAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"


def test_routers_spread_over_hosts_and_zones(template):
    """So that one node's end leaves a router. Zones are not a second constraint: that would end the first one without zones."""
    spec = template("frontend")["spec"]
    (spread,) = spec["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    (preferred,) = spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert term["labelSelector"] == spread["labelSelector"]


def overlaid(template, patch, service="decode", **changes):
    """The template of a service with a podTemplate."""
    return template(service, services={service: {"podTemplate": patch, **changes}})


def test_overlay_cannot_break_what_selectors_budget_and_rollouts_need(template):
    """Own labels, the counted GPUs and the gate stand, whatever the overlay says."""
    plain = template("decode")
    patch = {
        "metadata": {
            "labels": {"penstock.dev/graph": "x", "penstock.dev/serving": None, "team": "a"},
            "annotations": {"penstock.dev/gpus": "0", "note": "b"},
        },
        "spec": {"schedulingGates": [{"$patch": "replace"}, {"name": "mine"}]},
    }
    found = overlaid(template, patch)
    assert found["metadata"] == {
        "labels": {**plain["metadata"]["labels"], "team": "a"},
        "annotations": {"penstock.dev/gpus": "1", "note": "b"},
    }
    assert found["spec"]["schedulingGates"] == [{"name": "penstock.dev/gpu-budget"}, {"name": "mine"}]


def gpus(name, number, container="main", key="containers"):
    """An overlay that asks for GPUs."""
    limits = {"limits": {name: number}, "requests": {name: number}}
    return {"spec": {key: [{"name": container, "resources": limits}]}}


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (gpus("nvidia.com/gpu", "2"), "nvidia.com/gpu 2 of main, but the budget counts 1"),
        (gpus("amd.com/gpu", 3), "amd.com/gpu 3 of main, but the budget counts 1"),
        (gpus("nvidia.com/gpu", 1, "side"), "nvidia.com/gpu 1 of side, but the budget counts 0"),
        (gpus("nvidia.com/gpu", 4, "load", "initContainers"), "4 of load, but the budget counts 1"),
        ({"spec": {"containers": [{"name": "main", "$patch": "delete"}]}}, "removes container main"),
        ({"spec": None}, "removes container main"),
    ],
)
def test_overlay_may_not_ask_for_uncounted_gpus(template, patch, words):
    """The refusal says where and what to do instead."""
    with pytest.raises(InvalidSpecError, match=words) as caught:
        overlaid(template, patch)
    assert caught.value.problems[0].path.startswith("spec.services.decode.podTemplate.spec.")


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"spec": {"initContainers": "x"}}, "spec.initContainers: is not a list"),
        ({"spec": {"schedulingGates": 3}}, "spec.schedulingGates: is not a list"),
        ({"metadata": {"annotations": "x"}}, "metadata.annotations: is not a map"),
    ],
)
def test_overlay_of_the_wrong_shape_is_refused(template, patch, path):
    """Also where the template has nothing to compare it with."""
    with pytest.raises(InvalidSpecError, match=f"spec.services.decode.podTemplate.{path}"):
        overlaid(template, patch)


@pytest.mark.parametrize(
    "patch", [gpus("nvidia.com/gpu", None), gpus("nvidia.com/gpu", 1, "load", "initContainers")]
)
def test_overlay_may_ask_for_no_gpu_or_the_same(template, patch):
    """A CPU build of vLLM needs none; what counts is the annotation."""
    found = overlaid(template, patch)
    assert found["metadata"]["annotations"]["penstock.dev/gpus"] == "1"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"args": ["--tensor-parallel-size", "4"]},
            "over 4 GPUs .tensor 4 x pipeline 1., but the budget counts 1",
        ),
        ({"args": ["-tp=2", "-pp", "2"], "gpusPerReplica": 2}, "over 4 GPUs .* set gpusPerReplica: 4"),
        (
            {
                "podTemplate": {
                    "spec": {"containers": [{"name": "main", "args": ["--tensor_parallel_size=8"]}]}
                }
            },
            "over 8 GPUs",
        ),
    ],
)
def test_an_engine_may_not_be_split_over_uncounted_gpus(template, changes, words):
    """A claim holds GPUs that no resource counts: a budget of 8 would admit 32."""
    with pytest.raises(InvalidSpecError, match=words) as caught:
        template("decode", services={"decode": changes})
    assert caught.value.problems[0].path == "spec.services.decode.args"


def test_gpus_of_a_claim_count_and_are_not_asked_for_twice(template):
    """As docs/kubernetes.md writes them by hand: the claim, none of the device plugin's, and their number."""
    resources = {
        "claims": [{"name": "gpu"}],
        **{kind: {"nvidia.com/gpu": "0"} for kind in ("limits", "requests")},
    }
    patch = {
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "four-gpus"}],
            "containers": [{"name": "main", "resources": resources}],
        }
    }
    found = overlaid(template, patch, gpusPerReplica=4)
    assert found["metadata"]["annotations"]["penstock.dev/gpus"] == "4"
    requests = {"cpu": "6", "memory": "20Gi", "nvidia.com/gpu": "0"}
    assert found["spec"]["containers"][0]["resources"] == {**resources, "requests": requests}
    assert "--tensor-parallel-size 4" in " ".join(found["spec"]["containers"][0]["args"])
