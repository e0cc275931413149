"""Dynamo's planner component becomes the graph's planner section."""

from __future__ import annotations

import json

import pytest
import yaml

from penstock.runtimes.dynamo.importer import import_dgd


def converted(planner, gpus=1):
    """Convert a prefill and a decode worker beside this planner; return the spec and the paths of what is not carried."""
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


def test_planner_options_are_carried():
    """The document's options keep their values; workers open up to scaling."""
    spec, notes = planner(
        "--environment=kubernetes", "--adjustment-interval=60", "--max-gpu-budget", "6", "--min-gpu-budget=-1",
        "--decode-kv-scale-up-threshold=0.8", "--no-operation", "--ttft=200", "--itl", "10",
    )  # fmt: skip
    assert spec["planner"] == {
        "noOperation": True,
        "adjustmentIntervalSeconds": 60,
        "maxGpuBudget": 6,
        "minGpuBudget": 0,
        "decodeKvScaleUpThreshold": 0.8,
        "sla": {"ttftSeconds": 0.2, "itlSeconds": 0.01},
    }
    assert spec["services"]["decode"]["scaling"] == {}
    assert notes == ["spec.services.Planner.extraPodSpec.mainContainer.args"]


def test_a_planner_with_targets_and_a_profile_plans_by_them():
    """Mode sla, and the place of the profile, which is to be checked."""
    spec, notes = planner("--ttft=200", "--itl=10", "--profile-results-dir=/profiles")
    assert spec["planner"] == {
        "mode": "sla",
        "sla": {"ttftSeconds": 0.2, "itlSeconds": 0.01, "profile": "/profiles"},
    }
    assert notes == ["spec.services.Planner.extraPodSpec.mainContainer.args"]


def test_a_planners_json_is_read():
    """Dynamo 1.1 and later take one object; what a graph's planner has no key for is listed by its name."""
    config = {
        "environment": "kubernetes",
        "throughput_adjustment_interval_seconds": 60,
        "ttft": 300,
        "enable_load_scaling": True,
    }
    spec, notes = planner("--config", json.dumps(config))
    assert spec["planner"]["adjustmentIntervalSeconds"] == 60
    assert spec["planner"]["sla"]["ttftSeconds"] == 0.3
    assert len(notes) == 2  # the switch, and mode sla, which needs a profile


@pytest.mark.parametrize("config", ["{", "[1]", "3"])
def test_a_planners_json_that_is_no_object_is_listed(config):
    """Nothing of it is carried."""
    spec, notes = planner("--config", config)
    assert "adjustmentIntervalSeconds" not in spec.get("planner", {})
    assert len(notes) == 1


def test_planner_options_that_are_not_ours_are_listed():
    """An unknown option, and a value that is no number, are named."""
    _, notes = planner("--profile-results-dir=/p", "--adjustment-interval=fast")
    assert notes == ["spec.services.Planner.extraPodSpec.mainContainer.args"] * 2


def test_a_planner_that_is_no_python_command_is_listed():
    """A planner behind a script keeps the defaults and is named."""
    container = {"command": ["/start.sh"], "args": ["--adjustment-interval=60"]}
    spec, notes = converted({"extraPodSpec": {"mainContainer": container}})
    assert "planner" not in spec
    prefix = "spec.services.Planner.extraPodSpec.mainContainer"
    assert sorted(notes) == [f"{prefix}.args", f"{prefix}.command"]


def test_budget_opens_when_the_start_exceeds_it():
    """A deployment above the default budget is carried without a ceiling, and says so."""
    spec, notes = converted({}, gpus=4)
    assert spec["planner"] == {"maxGpuBudget": None}
    assert notes == ["spec.services"]


@pytest.mark.parametrize("suffix", ["", "_ms"])
def test_targets_have_an_older_and_a_newer_name(suffix):
    """Dynamo 1.6 has the unit in the name; with a folder of a profile the planner plans by them."""
    config = {
        f"ttft{suffix}": 200,
        f"itl{suffix}": 10,
        "profile_results_dir": "/p",
        "decode_engine_num_gpu": 1,
    }
    spec, notes = planner("--config", json.dumps(config))
    assert spec["planner"] == {
        "decodeEngineNumGpu": 1,
        "mode": "sla",
        "sla": {"ttftSeconds": 0.2, "itlSeconds": 0.01, "profile": "/p"},
    }
    assert len(notes) == 1


def test_a_hierarchy_of_planners_is_told():
    """The graph's planner decides alone."""
    config = {"environment": "global-planner", "mode": "decode"}
    result_notes = planner("--config", json.dumps(config))[1]
    assert len(result_notes) == 2


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
