"""Optional packages that a graph's processes need: named before a process ends for want of one."""

import pytest

from penstock.api.manifests import parse_manifests
from penstock.runtimes import extras
from penstock.runtimes.extras import needed_extras

GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: tiny}}
spec:
  model: {{name: m}}
  runtime: simulated
  services: {{frontend: {{role: router}}, worker: {{role: aggregated}}}}
  {more}
"""


def needs(more):
    """Return the settings that need packages, and the extras, of a graph with ``more``."""
    manifests, problems = parse_manifests(GRAPH.format(more=more), "tiny.yaml")
    assert not problems
    return {each.path: each.extra for each in needed_extras(manifests.graphs[0])}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {}),
        (
            "planner: {metrics: {prometheusUrl: 'http://p:9090'}}",
            {"spec.planner.metrics.prometheusUrl": "prometheus"},
        ),
        ("planner: {enabled: false, metrics: {prometheusUrl: 'http://p:9090'}}", {}),
        ("router: {tokenizer: simulated}", {}),
        ("router: {tokenizer: /x/tokenizer.json}", {"spec.router.tokenizer": "tokenizer"}),
        (
            "router: {tokenizer: simulated, kvEventsPort: 5557}",
            {"spec.router.kvEventsPort": "kv-events"},
        ),
        ("router: {gateway: {enabled: true}}", {"spec.router.gateway.enabled": "gateway"}),
    ],
)
def test_settings_that_import_an_extra_are_known(more, expected):
    """Prometheus for the planner, tokenizer and KV events for the router."""
    assert needs(more) == expected


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    """The path, the process, the package and pip's words."""
    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    manifests, _ = parse_manifests(
        GRAPH.format(more="planner: {metrics: {prometheusUrl: 'http://p:9090'}}"), "tiny.yaml"
    )
    (need,) = needed_extras(manifests.graphs[0])
    problem = need.problem()
    assert problem.path == "spec.planner.metrics.prometheusUrl"
    assert problem.message == (
        "the planner needs prometheus_api_client, not installed here; pip install 'penstock[prometheus]'"
    )
