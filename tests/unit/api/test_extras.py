"""Optional packages that a graph's processes need: named before a process ends for want of one."""

import pytest

from penstock.api.manifests import parse_manifests
from penstock.runtimes import build
from penstock.runtimes.build import missing_extras

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


def missing(more):
    """Return path and message of each setting of a graph with ``more`` where no package is installed."""
    manifests, problems = parse_manifests(GRAPH.format(more=more), "tiny.yaml")
    assert not problems
    return {each.path: each.message for each in missing_extras(manifests.graphs[0])}


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
def test_settings_whose_package_is_missing_are_named_with_the_command_that_installs_it(
    more, expected, monkeypatch
):
    """Prometheus for the planner, tokenizer and KV events for the router."""
    assert missing(more) == {}
    monkeypatch.setattr(build, "find_spec", lambda _name: None)
    found = missing(more)
    assert list(found) == list(expected)
    for path, extra in expected.items():
        assert found[path].endswith(f"not installed here; pip install 'penstock[{extra}]'")
