"""Dynamo's newer version of its deployments, with native pod templates."""

from __future__ import annotations

import textwrap

import pytest

from penstock.core.errors import InvalidSpecError
from penstock.runtimes.dynamo.importer import import_dgd

BETA = textwrap.dedent("""\
    apiVersion: nvidia.com/v1beta1
    kind: DynamoGraphDeployment
    metadata: {name: chat}
    spec:
      env: [{name: LOG, value: debug}]
      components:
      - name: Frontend
        type: frontend
        replicas: 1
        podTemplate: {spec: {containers: [{name: main, image: "repo/vllm-runtime:1.6"}]}}
      - name: VllmDecodeWorker
        type: decode
        replicas: 2
        sharedMemorySize: 16Gi
        scalingAdapter: {}
        podTemplate:
          metadata: {labels: {team: chat}}
          spec:
            nodeSelector: {gpu: a100}
            containers:
            - name: main
              image: repo/vllm-runtime:1.6
              command: [python3, -m, dynamo.vllm]
              args: [--model, Qwen/Small, --disaggregation-mode, decode]
              envFrom: [{secretRef: {name: hf-token}}]
              workingDir: /workspace
              resources: {limits: {nvidia.com/gpu: "1"}, requests: {ephemeral-storage: 2Gi, cpu: "4"}}
            - {name: log, image: l}
      - name: VllmPrefillWorker
        type: prefill
        multinode: {nodeCount: 2}
        compilationCache: {pvcName: cache}
        podTemplate:
          spec:
            containers:
            - name: main
              image: repo/vllm-runtime:1.6
              command: [python3]
              args: [-m, dynamo.vllm, --model, Qwen/Small, --disaggregation-mode=prefill, -tp, "2"]
              resources: {limits: {nvidia.com/gpu: "1"}}
    """)


def test_the_newer_version_is_carried():
    """Components with native pod templates, as Dynamo's newer examples have them; losses at their own lines."""
    result = import_dgd(BETA)
    assert result.unconverted == ()
    spec = result.graph.to_manifest()["spec"]
    assert (spec["runtime"], spec["model"], spec["image"]) == (
        "dynamo",
        {"name": "Qwen/Small"},
        "repo/vllm-runtime:1.6",
    )
    assert spec["env"] == [{"name": "LOG", "value": "debug"}]
    assert spec["nodePools"] == {"a100": {"nodeSelector": {"gpu": "a100"}}}
    decode, prefill = (spec["services"][f"vllm-{role}-worker"] for role in ("decode", "prefill"))
    assert (decode["role"], decode["replicas"], decode["nodePool"], decode["scaling"]) == (
        "decode",
        2,
        "a100",
        {},
    )
    assert decode["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
    assert decode["podTemplate"]["metadata"] == {"labels": {"team": "chat"}}
    main, log = decode["podTemplate"]["spec"]["containers"]
    assert main["resources"] == {"requests": {"ephemeral-storage": "2Gi", "cpu": "4"}}
    assert (main["workingDir"], log["name"]) == ("/workspace", "log")
    assert decode["podTemplate"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "16Gi"
    assert (prefill["role"], prefill["gpusPerReplica"], prefill["nodesPerReplica"]) == ("prefill", 2, 2)
    assert "args" not in decode
    cache = prefill["podTemplate"]["spec"]["containers"][0]["volumeMounts"]
    assert cache == [{"name": "cache", "mountPath": "/root/.cache/vllm"}]


def test_another_engine_in_the_newer_version_is_refused_at_its_own_place():
    """The path is the one that the user wrote."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(BETA.replace("[python3, -m, dynamo.vllm]", "[python3, -m, dynamo.trtllm]"))
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == (
        "spec.components[1].podTemplate.spec.containers[0].command",
        23,
    )
