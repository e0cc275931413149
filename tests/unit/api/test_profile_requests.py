"""ProfileRequests in manifests: what is valid, and every problem with its line."""

from __future__ import annotations

import pytest

from penstock.api import ProfileRequest
from penstock.api.manifests import parse_manifests

HEAD = """\
apiVersion: penstock.dev/v1alpha1
kind: ProfileRequest
metadata: {name: fast}
spec:
  isl: 3000
  osl: 150
"""
TEMPLATE = """\
  template:
    model: {name: m}
    runtime: simulated
    services:
      worker: {role: aggregated}
"""


def problems(text):
    """Line, path and message of everything wrong."""
    return [(each.line, each.path, each.message) for each in parse_manifests(text)[1]]


def test_a_request_names_a_graph_or_describes_one():
    """Beside a graph in one file."""
    manifests, found = parse_manifests(f"{HEAD}  graph: llama\n---\n{HEAD}{TEMPLATE}".replace("fast", "a", 1))
    assert found == []
    assert [(each.name, each.spec.graph) for each in manifests.profile_requests] == [
        ("a", "llama"),
        ("fast", None),
    ]


@pytest.mark.parametrize(
    ("more", "path", "part"),
    [
        ("", "spec.graph", "both or neither of graph and template"),
        (f"  graph: llama\n{TEMPLATE}", "spec.graph", "both or neither of graph and template"),
        ("  graph: llama\n  maxGpus: 2\n  tensorParallel: [1, 4]\n", "spec.tensorParallel", "4 exceeds maxGpus 2"),
        ("  graph: llama\n  ttftSecond: 1\n", "spec.ttftSecond", "did you mean ttftSeconds"),
        ("  graph: llama\n  podTemplate: {spec: {nodeSelectr: {}}}\n", "spec.podTemplate.spec.nodeSelectr", "did you mean nodeSelector"),
        (TEMPLATE.replace("aggregated", "prefill"), "spec.template.services", "no decode service"),
        (TEMPLATE.replace("model:", "modell:"), "spec.template.modell", "did you mean model"),
    ],
)  # fmt: skip
def test_each_broken_rule_blames_its_key(more, path, part):
    """Also below template, as in a graph of its own."""
    found = problems(HEAD + more)
    assert (path, True) in [(each[1], part in each[2]) for each in found]
    assert all(line is not None for line, _, _ in found)


def test_a_name_that_leaves_no_room_for_the_jobs_is_refused():
    """52 characters fit."""
    assert problems(HEAD.replace("fast", "a" * 52) + "  graph: llama\n") == []
    [(_, path, message)] = problems(HEAD.replace("fast", "a" * 53) + "  graph: llama\n")
    assert path == "metadata.name"
    assert "has 53 characters" in message


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ({}, (1,)),
        ({"maxGpus": 6}, (1, 2, 4)),
        ({"maxGpus": 8}, (1, 2, 4, 8)),
        ({"maxGpus": 8, "tensorParallel": [8, 2, 8]}, (2, 8)),
    ],
)
def test_sizes_are_powers_of_two_unless_said(spec, sizes):
    """Each once, the smallest first."""
    data = {"metadata": {"name": "a"}, "spec": {"graph": "g", "isl": 1, "osl": 1, **spec}}
    assert ProfileRequest.model_validate(data).spec.sizes == sizes
