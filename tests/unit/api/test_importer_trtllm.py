"""Dynamo's TensorRT-LLM deployments become graphs of trtllm-serve before Penstock's router."""

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock_dynamo.importer import import_dgd

SHARED = ["--model-path", "Q/Q-8B", "--served-model-name", "q", "--max-seq-len", "8192"]
IMAGE = "registry.example/tensorrtllm-runtime:1.6.1"


def worker(*args, role=None, module="dynamo.trtllm", gpus="1", **main):
    """A component of v1beta1 with these arguments."""
    mode = ["--disaggregation-mode", role] if role else []
    container = {
        "name": "main",
        "image": IMAGE,
        "command": ["python3", "-m", module],
        "args": [*SHARED, *args, *mode],
        "workingDir": "/workspace",
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        **main,
    }
    return {"type": role or "worker", "podTemplate": {"spec": {"containers": [container]}}}


def imported(**components):
    """Convert components; return the spec, and the values and reasons of what was not carried."""
    frontend = {
        "name": "frontend",
        "type": "frontend",
        "podTemplate": {"spec": {"containers": [{"name": "main", "image": IMAGE}]}},
    }
    manifest = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "backendFramework": "trtllm",
            "components": [frontend, *({"name": name, **each} for name, each in components.items())],
        },
    }
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    return result.graph.to_manifest()["spec"], [(each.value, each.why) for each in result.unconverted]


def test_prefill_and_decode_keep_their_files():
    """What a graph states is carried, the engine's file goes into its variable, and Dynamo's flags are reported."""
    spec, notes = imported(
        prefill=worker(
            "--extra-engine-args", "./configs/prefill.yaml", "--publish-kv-events", role="prefill", gpus="2"
        ),
        decode=worker(
            "--extra-engine-args=./configs/decode.yaml",
            "--free-gpu-memory-fraction",
            "0.8",
            "--tensor-parallel-size",
            "2",
            "--override-engine-args",
            '{"a": 1}',
            role="decode",
            gpus="2",
        ),
    )

    assert spec["runtime"] == "trtllm"
    assert spec["model"] == {"name": "Q/Q-8B", "servedName": "q", "contextTokens": 8192}
    services = spec["services"]
    for role in ("prefill", "decode"):
        assert services[role]["gpusPerReplica"] == 2
        assert services[role]["env"] == [
            {"name": "TRTLLM_SERVE_CONFIG_FILE", "value": f"./configs/{role}.yaml"}
        ]
        assert services[role]["podTemplate"]["spec"]["containers"][0]["workingDir"] == "/workspace"
    assert "args" not in services["prefill"]
    assert services["decode"]["args"] == ["--kv_cache_free_gpu_memory_fraction", "0.8"]
    said = " ".join(f"{value} {why}" for value, why in notes)
    for word in (
        "--publish-kv-events",
        "merged by Dynamo's wrapper alone",
        "TensorRT-LLM 1.3",
        "Dynamo's frontend",
    ):
        assert word in said


def test_one_server_for_both_stages_and_another_split():
    """A tensor parallelism that is not the replica's GPUs stays, by the server's own spelling; a flag alone is reported."""
    spec, notes = imported(
        worker=worker("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--enable-x", gpus="4")
    )

    assert spec["services"]["worker"]["role"] == "aggregated"
    assert spec["services"]["worker"]["args"] == [
        "--tensor_parallel_size",
        "2",
        "--pipeline_parallel_size",
        "2",
    ]
    assert ('"--enable-x"', "--enable-x is a flag of Dynamo's wrapper around TensorRT-LLM") in notes


def test_a_script_that_starts_it_is_read():
    """As with Dynamo's other workers."""
    spec, _ = imported(
        worker=worker(command=["/bin/sh", "-c"], args=["python3 -m dynamo.trtllm --model-path Q/Q-8B"])
    )

    assert (spec["runtime"], spec["model"]) == ("trtllm", {"name": "Q/Q-8B"})


def test_two_engines_are_no_graph():
    """A graph has one runtime."""
    with pytest.raises(InvalidSpecError, match="another engine than the TensorRT-LLM workers alongside it"):
        imported(prefill=worker(role="prefill"), decode=worker(role="decode", module="dynamo.vllm"))
