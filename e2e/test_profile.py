"""A graph of mode sla waits for its profile, a ProfileRequest measures it, and then the planner plans by it."""

from __future__ import annotations

import json

import pytest
import yaml
from images import ROOT
from kube import Graph, Kube, wait_for
from traffic import Load

from penstock.performance.profile import read_profile

NAME = "llama-sla"
"""Of graph, request and ConfigMap."""

SMALL = {
    "model": {"contextTokens": 4096},
    "engine": {"kvBlocks": 512, "streamIntervalTokens": 8},
    "planner": {"maxGpuBudget": 4, "adjustmentIntervalSeconds": 5, "sla": {"profile": NAME}},
}
"""8,192 tokens of KV per worker: a dozen streams fill it."""

KINDS = "jobs,pods,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"
LABEL = "penstock.dev/profile"


def request() -> dict:
    """The sample, with lengths that the small graph serves."""
    found = yaml.safe_load((ROOT / "manifests" / "samples" / "profile-request.yaml").read_text())
    found["spec"] |= {"isl": 1000, "osl": 100, "slo": {"ttft": "1s", "itl": "100ms"}, "timeoutSeconds": 300}
    return found


def status_of(kube: Kube, graph: Graph) -> dict:
    """The request's status."""
    found: dict = kube.get("gpr", NAME, *graph.scope).get("status", {})
    return found


def remains(kube: Kube, graph: Graph) -> list[str]:
    """Objects that carry the request's label."""
    return [each["metadata"]["name"] for each in kube.get(KINDS, *graph.scope, f"--selector={LABEL}={NAME}")]


@pytest.mark.nightly
def test_a_profile_as_a_job_makes_mode_sla_plan(kube, deploy):
    """Missing, measured, kept in a ConfigMap, planned by; and the request leaves nothing behind."""
    graph = deploy("sla", **SMALL)
    condition = wait_for(
        "the condition says that the profile is missing",
        lambda: (found := graph.condition("PlannerActive")).get("reason") == "ProfileMissing" and found,
    )
    assert condition["status"] == "False"
    assert f"ConfigMap {NAME}" in condition["message"]
    assert graph.is_ready()

    kube.apply(request(), namespace=graph.namespace)
    wait_for(
        "the profile is measured",
        lambda: status_of(kube, graph).get("phase") in {"Succeeded", "Failed"},
        300,
    )
    status = status_of(kube, graph)
    assert status["phase"] == "Succeeded", json.dumps(status["conditions"])
    assert [line.split(" ", 2)[0] for line in status["recommendation"]["summary"]] == ["Suggested"] * 4
    assert (status["recommendation"]["prefillTensorParallel"], status["configMap"]) == (1, NAME)
    kept = kube.get("configmap", NAME, *graph.scope)["data"]
    assert read_profile(kept["profile.json"]).decode.kv_tokens == 8192
    written = yaml.safe_load(kept["graph.yaml"])
    assert written["spec"]["planner"]["sla"]["profile"] == NAME

    wait_for(
        "the planner plans by the profile", lambda: graph.condition("PlannerActive").get("status") == "True"
    )
    load = Load(graph, "heavy", concurrency=24, max_tokens=500)
    wait_for("a second decode worker is ready", lambda: graph.ready("decode") >= 2, 180)
    assert load.stop().lost == []
    assert graph.gpus() <= 4

    kube.kubectl("delete", "gpr", NAME, *graph.scope)
    wait_for("nothing of the request is left", lambda: not remains(kube, graph))
    wait_for(
        "the condition says that the profile is gone",
        lambda: graph.condition("PlannerActive").get("reason") == "ProfileMissing",
    )
    assert graph.ready("decode") >= 1
