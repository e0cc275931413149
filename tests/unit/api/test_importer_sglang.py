"""Dynamo's SGLang deployments become graphs of SGLang's own servers before Penstock's router."""

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock_dynamo.importer import import_dgd

SHARED = ["--model-path", "Q/Q-8B", "--served-model-name", "q", "--page-size", "16", "--trust-remote-code"]
OF_DYNAMO = ["--skip-tokenizer-init", "--host", "0.0.0.0", "--dyn-tool-call-parser", "hermes"]
MEETING = ["--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", "12345"]
IMAGE = "registry.example/sglang-runtime:1.6.1"


def worker(*args, role=None, module="dynamo.sglang", gpus="1", **extra):
    """A component of v1alpha1 with these arguments."""
    mode = ["--disaggregation-mode", role] if role else []
    main = {"image": IMAGE, "command": ["python3", "-m", module], "args": [*SHARED, *args, *mode]}
    typed = {"componentType": "worker"} | ({"subComponentType": role} if role else {})
    return {**typed, "resources": {"limits": {"gpu": gpus}}, "extraPodSpec": {"mainContainer": main}, **extra}


def imported(**services):
    """Convert components; return the spec, and the values and reasons of what was not carried."""
    frontend = {"componentType": "frontend", "extraPodSpec": {"mainContainer": {"image": IMAGE}}}
    manifest = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": "chat"},
        "spec": {"services": {"Frontend": frontend, **services}},
    }
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    return result.graph.to_manifest()["spec"], [(each.value, each.why) for each in result.unconverted]


def test_prefill_and_decode_meet_as_the_runtime_has_it():
    """What a graph states is carried, SGLang's own flags stay arguments, and Dynamo's are reported."""
    flags = [*OF_DYNAMO, *MEETING, "--tp", "2", "--mem-fraction-static", "0.82"]
    spec, notes = imported(
        prefill=worker(*flags, role="prefill", gpus="2"), decode=worker(*flags, role="decode", gpus="2")
    )

    assert spec["runtime"] == "sglang"
    assert spec["model"] == {"name": "Q/Q-8B", "servedName": "q"}
    assert spec["engine"]["blockTokens"] == 16
    for role in ("prefill", "decode"):
        service = spec["services"][role]
        assert (service["role"], service["gpusPerReplica"], service["image"]) == (role, 2, IMAGE)
        assert service["args"] == ["--trust-remote-code", "--mem-fraction-static", "0.82"]
    assert "image" not in spec["services"]["frontend"]
    said = " ".join(f"{value} {why}" for value, why in notes)
    for word in ("--skip-tokenizer-init", "12345", "0.0.0.0", "hermes", "SGLang 0.5.23", "Dynamo's frontend"):
        assert word in said


def test_one_server_for_both_stages_and_another_split():
    """A tensor parallelism that is not the replica's GPUs stays; so does another way of transfer."""
    spec, _ = imported(decode=worker("--tp", "2", "--kv-events-config", "{}", gpus="4"))

    assert spec["services"]["decode"]["role"] == "aggregated"
    assert spec["services"]["decode"]["args"] == ["--trust-remote-code", "--tensor-parallel-size", "2"]
    spec, _ = imported(
        prefill=worker("--disaggregation-transfer-backend", "mooncake", role="prefill"),
        decode=worker("--disaggregation-transfer-backend=mooncake", role="decode"),
    )
    assert spec["services"]["decode"]["args"][-2:] == ["--disaggregation-transfer-backend", "mooncake"]


def test_two_engines_are_no_graph():
    """A graph has one runtime."""
    with pytest.raises(InvalidSpecError, match="another engine than the SGLang workers alongside it"):
        imported(prefill=worker(role="prefill"), decode=worker(role="decode", module="dynamo.vllm"))
