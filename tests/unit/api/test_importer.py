from __future__ import annotations

import textwrap

import pytest
import yaml

from penstock.core.errors import InvalidSpecError
from penstock_dynamo.importer import import_dgd
from penstock_dynamo.importer.command import parse_command

HEAD = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata: {name: chat}\n"

DISAGGREGATED = HEAD + textwrap.dedent("""\
    spec:
      services:
        Frontend:
          componentType: frontend
          replicas: 1
          extraPodSpec:
            mainContainer: {image: "repo/vllm-runtime:1.6"}
        VllmDecodeWorker:
          componentType: worker
          subComponentType: decode
          envFromSecret: hf-token
          replicas: 2
          resources: {limits: {gpu: "1"}}
          extraPodSpec:
            mainContainer:
              image: repo/vllm-runtime:1.6
              command: [python3, -m, dynamo.vllm]
              args: [--model, Qwen/Small, --is-decode-worker]
        VllmPrefillWorker:
          componentType: worker
          subComponentType: prefill
          replicas: 1
          resources: {limits: {gpu: "2"}}
          extraPodSpec:
            mainContainer:
              image: repo/vllm-runtime:1.6
              command: [python3]
              args: [-m, dynamo.vllm, --model, Qwen/Small, --disaggregation-mode=prefill, --enforce-eager]
    """)


def worker(container=None, pod=None, **extra):
    """An aggregated graph of one worker, whose component, container and pod hold more."""
    main = {"command": ["python3"], "args": ["-m", "dynamo.vllm", "--model", "Q"], **(container or {})}
    body = {"componentType": "worker", **extra, "extraPodSpec": {"mainContainer": main, **(pod or {})}}
    return HEAD + yaml.safe_dump({"spec": {"services": {"Worker": body}}})


def converted(text):
    """The converted spec, and path and line of what was not carried."""
    result = import_dgd(text)
    return result.graph.to_manifest()["spec"], [(each.path, each.line) for each in result.unconverted]


def test_disaggregated_example():
    """The form that Dynamo's examples have is carried completely."""
    result = import_dgd(DISAGGREGATED)
    assert result.unconverted == ()
    assert result.graph.to_manifest() == {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"name": "Qwen/Small"},
            "runtime": "dynamo",
            "image": "repo/vllm-runtime:1.6",
            "services": {
                "frontend": {"role": "router", "replicas": 1},
                "vllm-decode-worker": {
                    "role": "decode",
                    "replicas": 2,
                    "envFrom": [{"secretRef": {"name": "hf-token"}}],
                },
                "vllm-prefill-worker": {
                    "role": "prefill",
                    "replicas": 1,
                    "gpusPerReplica": 2,
                    "args": ["--enforce-eager"],
                },
            },
            "router": {"policy": "round-robin"},
            "planner": {"enabled": False},
        },
    }


def test_nothing_is_dropped_in_silence():
    """A key that is not understood is listed with its line, at any depth."""
    text = DISAGGREGATED + textwrap.dedent("""\
          checkpoint: {enabled: true}
      topologyConstraint: {packDomain: rack}
    status: {state: successful}
    """)
    result = import_dgd(text)
    assert [(each.line, each.path) for each in result.unconverted] == [
        (32, "spec.services.VllmPrefillWorker.checkpoint.enabled"),
        (33, "spec.topologyConstraint.packDomain"),
        (34, "status"),
    ]


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"dynamoNamespace": "x"}, "dynamoNamespace"),
        ({"livenessProbe": {"httpGet": {"path": "/"}}}, "livenessProbe"),
        ({"ingress": {"enabled": True}}, "ingress"),
        ({"modelRef": {"name": "Q"}}, "modelRef"),
        ({"experimental": {"gpuMemoryService": {}}}, "experimental.gpuMemoryService"),
        ({"frontendSidecar": {"image": "i"}}, "frontendSidecar"),
        ({"runtimeVersionOverride": "1.4.0"}, "runtimeVersionOverride"),
        ({"resources": {"limits": {"gpu": "half"}}}, "resources.limits.gpu"),
        ({"sharedMemory": {"disabled": True}}, "sharedMemory"),
        ({"envs": ["A=b"]}, "envs[0]"),
        ({"envs": {"A": "b"}}, "envs"),
        ({"container": {"envFrom": [{"x": 1}]}}, "extraPodSpec.mainContainer.envFrom[0]"),
        ({"pod": {"affinity": {"podAffinity": {"x": [{"matchLabels": {"nvidia.com/dynamo-component": "a"}}]}}}}, "extraPodSpec.affinity.podAffinity.x[0]"),
        ({"container": {"env": [{"name": "DYN_SYSTEM_PORT", "value": "9090"}]}}, "extraPodSpec.mainContainer.env[0]"),
        ({"container": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['grove.io/x']"}}}]}}, "extraPodSpec.mainContainer.env[0]"),
        ({"container": {"ports": [{"name": "system", "containerPort": 9090}]}}, "extraPodSpec.mainContainer.ports"),
        ({"container": {"livenessProbe": {"httpGet": {"port": 9090}}}}, "extraPodSpec.mainContainer.livenessProbe"),
        ({"extraPodMetadata": {"labels": {"nvidia.com/dynamo-x": "a"}}}, "extraPodMetadata.labels.nvidia.com/dynamo-x"),
        ({"container": {"args": ["-m", "dynamo.vllm", "--model", "Q", "--load-format", "gms"]}}, "extraPodSpec.mainContainer.args"),
        ({"container": {"args": ["-m", "dynamo.vllm", "--model", "Q", "--store-kv", "mem"]}}, "extraPodSpec.mainContainer.args"),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_hold_is_listed(extra, path):
    """Each setting without a counterpart is named once."""
    _, notes = converted(worker(**extra))
    assert [found for found, _ in notes] == [f"spec.services.Worker.{path}"]


def test_workers_of_different_models_are_told():
    """A graph serves one model; the other is listed."""
    text = DISAGGREGATED.replace(
        "[-m, dynamo.vllm, --model, Qwen/Small", "[-m, dynamo.vllm, --model, Qwen/Large"
    )
    result = import_dgd(text)
    assert result.graph.spec.model.name == "Qwen/Small"
    assert [(each.value, "the graph keeps 'Qwen/Small'" in each.why) for each in result.unconverted] == [
        ('"Qwen/Large"', True)
    ]


def test_what_a_script_does_beside_its_command_is_listed():
    """The command that starts the worker is carried, with the variables set for it; the rest of the script is not."""
    manifest = yaml.safe_load(DISAGGREGATED)
    container = manifest["spec"]["services"]["VllmPrefillWorker"]["extraPodSpec"]["mainContainer"]
    container["command"] = ["/bin/sh", "-c"]
    container["args"] = ["ldconfig\nA=1 DYN_NAMESPACE=x python3 -m dynamo.vllm --seed 1 | tee log"]
    result = import_dgd(yaml.safe_dump(manifest, sort_keys=False))
    prefix = "spec.services.VllmPrefillWorker.extraPodSpec.mainContainer"
    assert [(each.path, each.value) for each in result.unconverted] == [
        (f"{prefix}.command", '"x"'),
        (f"{prefix}.args", '"ldconfig\\nA=1 DYN_NAMESPACE=x python3 -m dynamo.vllm --see…'),
    ]
    service = result.graph.to_manifest()["spec"]["services"]["vllm-prefill-worker"]
    assert service["args"] == ["--seed", "1"]
    assert service["env"] == [{"name": "A", "value": "1"}]


MAIN = "spec.services.Worker.extraPodSpec.mainContainer"


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        (
            DISAGGREGATED.replace("v1alpha1", "v1"),
            "apiVersion",
            "nvidia.com/v1 is neither nvidia.com/v1alpha1",
        ),
        ("kind: Other\n", "", "0 DynamoGraphDeployment documents"),
        (DISAGGREGATED + "---\n" + DISAGGREGATED, "", "2 DynamoGraphDeployment documents"),
        ("a: [\n", "", "malformed YAML"),
        (
            HEAD + "spec: {services: {Worker: {componentType: worker}}}\n",
            f"{MAIN}.args",
            "names no model, nor does another worker; add --model",
        ),
        (
            worker({"command": ["sh", "-c"], "args": ["M=$(cat /m)\npython3 -m dynamo.vllm --model /m/$M"]}),
            f"{MAIN}.args",
            "that only the container's shell knows, --model /m/$M; write its name after the flag",
        ),
        (HEAD + "spec: {services: {F: {componentType: frontend}}}\n", "spec.services", "hold no worker"),
        (HEAD + "spec: {services: {}}\n", "spec.services", "hold no worker"),
        (worker(subComponentType="prefill"), "(converted) spec.services", "no decode service"),
        (
            DISAGGREGATED.replace("spec:\n", "spec:\n  backendFramework: other\n", 1),
            "spec.backendFramework",
            "names an engine that no graph runs",
        ),
        (
            worker(
                {
                    "image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.3.1",
                    "command": [],
                    "args": ["--model", "Q"],
                }
            ),
            f"{MAIN}.image",
            "is of another engine than vLLM",
        ),
        (worker({"args": ["-m", "dynamo.mine", "--model", "Q"]}), f"{MAIN}.command", "starts dynamo.mine"),
        (
            worker({"args": ["-m", "dynamo.vllm.omni", "--model", "Q"]}),
            f"{MAIN}.command",
            "starts dynamo.vllm.omni",
        ),
        (
            worker({"command": ["dynamo-vllm-sidecar"], "args": ["-x"]}),
            f"{MAIN}.command",
            "runs dynamo-vllm-sidecar",
        ),
        (worker({"command": ["sleep"], "args": ["infinity"]}), f"{MAIN}.command", "runs sleep"),
        (
            DISAGGREGATED.replace('1.6"}', '1.6", args: [--active-decode-blocks-threshold, most]}', 1),
            "(converted) spec.router.admission.activeDecodeBlocksThreshold",
            "where a number is needed",
        ),
        (
            worker({"command": ["sh", "-c"], "args": ["./start.sh; ./wait.sh"]}),
            f"{MAIN}.command",
            "is a script that starts Dynamo by no command",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(text, path, part):
    """Another version, kind, engine or program, or what no graph can express; at its own place, with its remedy."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(text, "dgd.yaml")
    problem = next(each for each in caught.value.problems if each.path == path)
    assert part in problem.message
    assert problem.file == "dgd.yaml"
    assert (problem.line is None) == (not path.startswith(("spec", "api")) and "YAML" not in part)


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        (["python3", "-m", "dynamo.vllm"], ["--a", "1"], ("dynamo.vllm", ["--a", "1"])),
        (["python3"], ["-m", "dynamo.vllm", "--a"], ("dynamo.vllm", ["--a"])),
        (["/opt/venv/bin/python"], ["-m", "m"], ("m", [])),
        ([], ["--a"], (None, ["--a"])),
        ([], [], (None, [])),
        (["sh", "script.sh"], [], None),
        (["python3", "script.py"], [], None),
    ],
)
def test_command_lines(command, args, expected):
    """A Python module is recognised in each way that Dynamo's examples start one."""
    found = parse_command([*command, *args])
    assert (found and (found.module, found.words)) == expected
