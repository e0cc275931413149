"""Values of production-stack and llm-d and KServe's objects become graphs, and what they lose is listed."""

from __future__ import annotations

import pytest

from penstock.api.manifests.importing import ImportResult, import_graph
from penstock.core.errors import InvalidSpecError

STACK = """
servingEngineSpec:
  runtimeClassName: ""
  containerPort: 8000
  modelSpec:
    - name: chat-8b
      repository: vllm/vllm-openai
      tag: v0.11.0
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      replicaCount: 2
      requestCPU: 10
      requestMemory: 16Gi
      requestGPU: 2
      pvcStorage: 50Gi
      vllmConfig:
        enableChunkedPrefill: true
        enablePrefixCaching: false
        maxModelLen: 32000
        tensorParallelSize: 2
        gpuMemoryUtilization: 0.9
        extraArgs: ["--enforce-eager", "--port", "8000"]
      lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "60", workerPort: 8001}
      env:
        - {name: LMCACHE_LOG_LEVEL, value: DEBUG}
        - {name: CUDA_VISIBLE_DEVICES, value: "0"}
      hf_token: hf_abcdefgh
      keda:
        enabled: true
        minReplicaCount: 1
        maxReplicaCount: 4
        triggers: [{type: prometheus}]
routerSpec:
  replicaCount: 2
  routingLogic: session
  sessionKey: x-user-id
  engineScrapeInterval: 15
"""

STACK_PAIR = """
servingEngineSpec:
  enableEngine: true
  modelSpec:
    - {name: llama-prefill, repository: lmcache/vllm-openai, tag: v1, modelURL: meta-llama/Llama-3.1-8B-Instruct, replicaCount: 1,
       lmcacheConfig: {enabled: true, kvRole: kv_producer, nixlRole: sender}}
    - {name: llama-decode, repository: lmcache/vllm-openai, tag: v1, modelURL: meta-llama/Llama-3.1-8B-Instruct, replicaCount: 3,
       lmcacheConfig: {enabled: true, kvRole: kv_consumer, nixlRole: receiver}}
routerSpec: {routingLogic: disaggregated_prefill}
"""

LLMD = """
multinode: false
modelArtifacts:
  name: facebook/opt-125m
  uri: hf://{{ .Values.modelArtifacts.name }}
  size: 20Gi
  authSecretName: llm-d-hf-token
routing:
  servicePort: 8000
  httpRoute: {create: true}
decode:
  create: true
  replicas: 2
  parallelism: {tensor: 2, data: 1}
  terminationGracePeriodSeconds: 60
  tolerations: [{key: gpu, operator: Exists}]
  containers:
    - name: vllm
      image: ghcr.io/llm-d/llm-d-cuda:v0.4.0
      modelCommand: vllmServe
      args: [--enforce-eager, --max-model-len=16384, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
      env:
        - {name: UCX_TLS, value: "cuda_ipc,cuda_copy,tcp"}
        - {name: VLLM_NIXL_SIDE_CHANNEL_PORT, value: "5557"}
      ports: [{containerPort: 5557, protocol: TCP}]
      resources: {limits: {memory: 16Gi, nvidia.com/gpu: "2"}, requests: {cpu: "16", nvidia.com/gpu: "2"}}
      mountModelVolume: true
      volumeMounts: [{name: metrics-volume, mountPath: /.config}]
  volumes: [{name: metrics-volume, emptyDir: {}}]
prefill:
  replicas: 1
  containers:
    - {name: vllm, image: "ghcr.io/llm-d/llm-d-cuda:v0.4.0", modelCommand: vllmServe, args: [--enforce-eager]}
"""

KSERVE = """
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: qwen2-7b, namespace: serving, annotations: {k8s.v1.cni.cncf.io/networks: roce}}
spec:
  replicas: 1
  model: {uri: "hf://Qwen/Qwen2.5-7B-Instruct", name: qwen}
  router: {route: {}, gateway: {}, scheduler: {}}
  parallelism: {tensor: 2}
  template:
    containers:
      - name: main
        env:
          - {name: VLLM_ADDITIONAL_ARGS, value: "--max-model-len 8192 --kv_transfer_config '{}' --enforce-eager"}
          - {name: UCX_PROTO_INFO, value: "y"}
          - {name: VLLM_NIXL_SIDE_CHANNEL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        resources: {limits: {cpu: "4", nvidia.com/gpu: "2", rdma/roce_gdr: 1}}
        livenessProbe: {httpGet: {path: /health, port: 8000}}
  prefill:
    replicas: 3
    template: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: "1"}}}]}
"""


def losses(result: ImportResult) -> dict[str, str]:
    """Return why each path was not carried."""
    return {each.path: each.why for each in result.unconverted}


def test_production_stack_becomes_a_graph() -> None:
    """GPUs, length, flags, KV offload and bounds have keys of their own; the router's policy is translated."""
    result = import_graph(STACK)
    spec = result.graph.spec

    assert (result.graph.name, spec.model.name, spec.model.context_tokens) == (
        "chat-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        32000,
    )
    (worker,) = spec.workers.values()
    assert (worker.role, worker.replicas, worker.gpus_per_replica) == ("aggregated", 2, 2)
    assert worker.image == "vllm/vllm-openai:v0.11.0"
    assert worker.args == (
        *("--gpu-memory-utilization", "0.9", "--enable-chunked-prefill"),
        *("--no-enable-prefix-caching", "--enforce-eager"),
    )
    assert [each.name for each in worker.env] == ["LMCACHE_LOG_LEVEL"]
    assert worker.scaling is not None
    assert (worker.scaling.min_replicas, worker.scaling.max_replicas) == (1, 4)
    assert (spec.router.policy, spec.router.session_header) == ("prefix-cost", "x-user-id")
    assert (spec.planner.enabled, spec.planner.max_gpu_budget) == (True, 8)
    assert spec.engine.kv_offload is not None


def test_what_production_stack_loses_is_listed_and_no_secret_is_shown() -> None:
    """Each loss says what to do; a token is never repeated."""
    result = import_graph(STACK)
    found = losses(result)
    entry = "servingEngineSpec.modelSpec[0]"

    assert found.keys() >= {
        f"{entry}.pvcStorage",
        f"{entry}.vllmConfig.extraArgs",
        f"{entry}.env[1]",
        f"{entry}.hf_token",
        f"{entry}.keda.triggers",
        f"{entry}.lmcacheConfig.workerPort",
        "routerSpec.engineScrapeInterval",
    }
    assert "hf_abcdefgh" not in "".join(map(str, result.unconverted)) + result.graph.model_dump_json()


def test_a_pair_of_production_stack_becomes_prefill_and_decode() -> None:
    """By the roles of their KV transfer, which the runtime sets up itself."""
    result = import_graph(STACK_PAIR)

    workers = {each.role: each.replicas for each in result.graph.spec.workers.values()}
    assert workers == {"prefill": 1, "decode": 3}
    assert result.graph.name == "llama-3-1-8b-instruct"
    assert "servingEngineSpec.modelSpec[0].lmcacheConfig" in losses(result)


def test_one_of_several_models_is_chosen_by_name() -> None:
    """A graph has one model; the others are listed."""
    two = STACK.replace("routerSpec:", "    - {name: other, modelURL: a/b}\nrouterSpec:")
    with pytest.raises(InvalidSpecError, match=r"holds 2 models.*--name with one of chat-8b, other"):
        import_graph(two)

    result = import_graph(two, name="chat-8b")
    assert result.graph.name == "chat-8b"
    assert "other" in str(losses(result).keys()) or "servingEngineSpec.modelSpec[1]" in losses(result)


def test_llmd_becomes_a_graph() -> None:
    """Two services in one image; memory, tolerations and volumes go into the pod template."""
    result = import_graph(LLMD, name="opt")
    spec = result.graph.spec
    decode, prefill = spec.workers["decode"], spec.workers["prefill"]

    assert (result.graph.name, spec.model.name, spec.model.context_tokens) == (
        "opt",
        "facebook/opt-125m",
        16384,
    )
    assert (decode.replicas, decode.gpus_per_replica, decode.args) == (2, 2, ("--enforce-eager",))
    assert (prefill.replicas, prefill.gpus_per_replica) == (1, 1)
    assert [each.name for each in decode.env] == ["UCX_TLS"]
    assert decode.termination_grace_period_seconds == 60
    pod = decode.pod_template["spec"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["containers"][0]["resources"] == {"limits": {"memory": "16Gi"}, "requests": {"cpu": "16"}}
    assert not spec.planner.enabled
    found = losses(result)
    assert found.keys() >= {"routing", "modelArtifacts.size", "modelArtifacts.authSecretName"}
    assert found["decode.containers[0].ports"] == "is set by the runtime"


def test_kserve_becomes_a_graph() -> None:
    """The template is decode's where there is a prefill; further flags are taken out of their variable."""
    result = import_graph(KSERVE)
    graph, spec = result.graph, result.graph.spec
    decode, prefill = spec.workers["decode"], spec.workers["prefill"]

    assert (graph.name, graph.metadata.namespace) == ("qwen2-7b", "serving")
    assert (spec.model.name, spec.model.served_name) == ("Qwen/Qwen2.5-7B-Instruct", "qwen")
    assert spec.model.context_tokens == 8192
    assert (decode.replicas, decode.gpus_per_replica, decode.args) == (1, 2, ("--enforce-eager",))
    assert [each.name for each in decode.env] == ["UCX_PROTO_INFO"]
    assert (prefill.replicas, prefill.gpus_per_replica) == (3, 1)
    found = losses(result)
    assert found.keys() >= {"spec.router.gateway", "spec.router.route", "spec.router.scheduler"}
    assert any("annotations" in path for path in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KSERVE.replace("hf://Qwen", "s3://Qwen"), "is not a model on Hugging Face or on a claim"),
        (KSERVE.replace("uri:", "url:"), "names no uri"),
        (LLMD.replace("  replicas: 2", "  replicas: 0"), "creates no decode worker"),
        (LLMD.replace("  name: facebook/opt-125m\n", ""), "has no name"),
        ("servingEngineSpec: {modelSpec: []}", "names no model"),
        ("servingEngineSpec: {modelSpec: [{name: a}]}", "names no modelURL"),
    ],
)
def test_what_no_graph_can_run_is_refused(text: str, message: str) -> None:
    """With the reason, instead of a graph that serves nothing."""
    with pytest.raises(InvalidSpecError, match=message):
        import_graph(text)


def test_a_model_on_a_claim_and_a_script_are_listed() -> None:
    """Their files and flags are for a person to place."""
    text = KSERVE.replace("hf://Qwen/Qwen2.5-7B-Instruct", "pvc://models/qwen").replace(
        "name: main\n        env:",
        "name: main\n        command: [/bin/sh, -c]\n        args: [vllm serve x]\n        env:",
    )
    result = import_graph(text)

    assert result.graph.spec.model.name == "/models/qwen"
    found = losses(result)
    assert "mount the claim models" in found["spec.model.uri"]
    assert "script of a shell" in found["spec.template.containers[0].args"]
