from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api import GraphDeployment, PlannerConfig, ServiceSpec
from penstock.api.fields import model_at
from penstock.api.manifests import load_graph
from penstock.api.manifests.reference import markdown
from penstock.runtimes import RuntimeContext, process_specs

ROOT = Path(__file__).parents[3]
SAMPLES = [
    path
    for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
    if "kind: GraphDeployment" in path.read_text(encoding="utf-8")
]


def test_the_reference_is_current():
    """docs/manifest.md is what the models say; renew it with `python -m penstock.api.manifests.reference`."""
    assert (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("spec", "planner"), PlannerConfig),
        (("spec", "services", "any"), ServiceSpec),
        (("spec", "env", 3), "EnvVar"),
        (("spec", "services"), None),
        (("spec", "nothing"), None),
        (("spec", "runtime", "x"), None),
    ],
)
def test_the_model_at_a_path(path, expected):
    """Maps and lists are stepped through; a path to nothing gives None."""
    found = model_at(GraphDeployment, path)
    assert found is expected or (found is not None and found.__name__ == expected)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_each_sample_is_valid_and_becomes_processes(path):
    """A sample can be loaded and rendered, with a router, workers and a planner unless it asks for none."""
    graph = load_graph(path)
    context = RuntimeContext(python="py", graph_file=str(path), discovery="/s.json", namespace=graph.name)
    roles = {spec.role for spec in process_specs(graph, context)}
    assert "router" in roles
    assert ("planner" in roles) is graph.spec.planner.enabled
    assert roles & {"prefill", "decode", "aggregated"}
