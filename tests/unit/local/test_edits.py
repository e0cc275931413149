"""A manifest that is edited under a running graph."""

from dataclasses import replace

import pytest

from penstock.cli.doctor_local import edit_findings
from penstock.local.edits import kept_path, waiting_edits

GRAPH = """\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  runtime: simulated
  model: {name: llama, servedName: llama}
  engine: {profile: h200-llama-3.1-8b-tp1}
  services:
    frontend: {role: router}
    prefill: {role: prefill, replicas: 1}
    decode: {role: decode, replicas: 1}
  router: {policy: prefix-cost}
"""


@pytest.fixture
def arbiter(tmp_path, state_of):
    """Of a graph whose manifest is as at its start."""
    file, kept = tmp_path / "graph.yaml", kept_path(tmp_path, "llama")
    file.write_text(GRAPH)
    kept.write_text(GRAPH)
    return replace(state_of("llama").arbiter, graph=str(file), log_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("", "", ()),
        ("prefix-cost", "prefix-cost, admission: {mode: token-capacity}", ()),
        ("prefix-cost", "prefix-cost, tiers: {enabled: true}", ("router.tiers.enabled",)),
        ("{policy: prefix-cost}", "{policy: round-robin}", ("router.policy",)),
        ("prefill, replicas: 1", "prefill, replicas: 2", ("services.prefill.replicas",)),
        ("  router: {policy", "  planner: {maxGpuBudget: 4}\n  router: {policy", ("planner.maxGpuBudget",)),
    ],
)
def test_edits_that_no_running_process_takes_over_are_named(arbiter, tmp_path, old, new, keys):
    """By key; what a running router follows is not among them."""
    (tmp_path / "graph.yaml").write_text(GRAPH.replace(old, new) if old else GRAPH)
    assert waiting_edits(arbiter) == keys
    (*found,) = edit_findings(arbiter)
    assert len(found) == bool(keys)
    if keys:
        assert f"take effect at the next start: {keys[0]}" in found[0].message
        is_for_router = keys == ("router.policy",)
        remedy = "penstock restart" if is_for_router else "penstock down"
        assert found[0].remedy.startswith(f"{remedy} --namespace llama")


@pytest.mark.parametrize("text", ["spec: {", None])
def test_an_edit_that_cannot_be_used_is_a_finding(arbiter, tmp_path, text):
    """So is a manifest that is gone: what serves is told apart from what is in the file."""
    file = tmp_path / "graph.yaml"
    file.unlink() if text is None else file.write_text(GRAPH + text)
    (found,) = edit_findings(arbiter)
    assert "still serves with the manifest it was started with" in found.message
    assert found.remedy == f"penstock validate {file}"
