"""Dynamo's planner component becomes the graph's planner section."""

from __future__ import annotations

import json

import pytest
import yaml

from penstock_dynamo.importer import import_dgd


def converted(planner, gpus=1):
    """Convert a prefill and a decode worker alongside this planner; return the spec and the paths of what is not carried."""
    container = {"mainContainer": {"args": ["--model", "Q"]}}
    services = {
        role: {"componentType": "worker", "subComponentType": role, "extraPodSpec": container}
        for role in ("prefill", "decode")
    }
    services["decode"] |= {"replicas": 2, "resources": {"limits": {"gpu": str(gpus)}}}
    services["Planner"] = {"componentType": "planner", **planner}
    manifest = {
        "kind": "DynamoGraphDeployment",
        "apiVersion": "nvidia.com/v1alpha1",
        "metadata": {"name": "chat"},
    }
    result = import_dgd(yaml.safe_dump({**manifest, "spec": {"services": services}}, sort_keys=False))
    return result.graph.to_manifest()["spec"], [each.path for each in result.unconverted]


def planner(*args):
    """Convert the example with a planner of these arguments."""
    container = {"command": ["python3", "-m"], "args": ["dynamo.planner", *args]}
    return converted({"extraPodSpec": {"mainContainer": container}})


ARGS = "spec.services.Planner.extraPodSpec.mainContainer.args"
SLO = {"ttft": "200ms", "itl": "10ms"}


def of(**config):
    """The arguments of a planner that takes one object, as Dynamo 1.1 and later do."""
    return ("--config", json.dumps(config))


@pytest.mark.parametrize(
    ("args", "expected", "slo", "losses"),
    [
        (
            (
                *("--environment=kubernetes", "--adjustment-interval=60", "--max-gpu-budget", "6"),
                *("--min-gpu-budget=-1", "--decode-kv-scale-up-threshold=0.8", "--no-operation"),
                *("--ttft=200", "--itl", "10"),
            ),
            {
                "noOperation": True,
                "adjustmentIntervalSeconds": 60,
                "maxGpuBudget": 6,
                "minGpuBudget": 0,
                "decodeKvScaleUpThreshold": 0.8,
            },
            SLO,
            1,
        ),
        (
            ("--ttft=200", "--itl=10", "--profile-results-dir=/profiles"),
            {"mode": "sla", "sla": {"profile": "/profiles"}},
            SLO,
            1,
        ),
        (
            of(environment="kubernetes", throughput_adjustment_interval_seconds=60, ttft=300, a=True),
            {"adjustmentIntervalSeconds": 60},
            {"ttft": "300ms"},
            2,
        ),
        *(
            (
                of(
                    **{f"ttft{unit}": 200, f"itl{unit}": 10},
                    profile_results_dir="/p",
                    decode_engine_num_gpu=1,
                ),
                {"mode": "sla", "sla": {"profile": "/p"}},
                SLO,
                1,
            )
            for unit in ("", "_ms")
        ),
        (of(environment="global-planner", mode="decode"), {}, {}, 2),
        (("--profile-results-dir=/p", "--adjustment-interval=fast"), {}, {}, 2),
        *((("--config", text), {}, {}, 1) for text in ("{", "[1]", "3")),
    ],
)
def test_options_of_a_planner_are_carried_or_listed(args, expected, slo, losses):
    """By older names and newer ones; targets make mode sla where they come with a profile, which is to be checked."""
    spec, notes = planner(*args)
    assert spec.get("planner", {}) == expected
    assert spec.get("slo", {}) == slo
    assert spec["services"]["decode"]["scaling"] == {}
    assert notes == [ARGS] * losses


def test_a_planner_that_is_no_python_command_is_listed():
    """A planner behind a script keeps the defaults and is named."""
    container = {"command": ["/start.sh"], "args": ["--adjustment-interval=60"]}
    spec, notes = converted({"extraPodSpec": {"mainContainer": container}})
    assert "planner" not in spec
    assert sorted(notes) == [ARGS, ARGS.replace("args", "command")]


def test_budget_opens_when_the_start_exceeds_it():
    """A deployment above the default budget is carried without a ceiling, and says so."""
    spec, notes = converted({}, gpus=4)
    assert spec["planner"] == {"maxGpuBudget": None}
    assert notes == ["spec.services"]


def test_the_pod_of_dynamos_planner_is_listed_by_its_keys():
    """One line for each, however much is in it."""
    planner = {
        "replicas": 1,
        "livenessProbe": {"exec": {"command": ["a", "b"]}},
        "extraPodSpec": {
            "mainContainer": {"image": "i", "args": ["--adjustment-interval=60"]},
            "volumes": [{"name": "v"}],
        },
    }
    _, notes = converted(planner)
    prefix = "spec.services.Planner"
    assert notes == [
        f"{prefix}.replicas",
        f"{prefix}.livenessProbe",
        f"{prefix}.extraPodSpec.mainContainer.image",
        f"{prefix}.extraPodSpec.volumes",
    ]
