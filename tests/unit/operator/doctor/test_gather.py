"""What the doctor asks Prometheus."""

from __future__ import annotations

import re

import pytest

from penstock.operator.doctor.gather import pod_selector

GRAPH = {
    "metadata": {"name": "chat", "namespace": "serving"},
    "spec": {"services": {"prefill": {}, "decode": {}}},
}


@pytest.mark.parametrize(
    ("pod", "is_own"),
    [
        ("chat-decode-6b9f7c5d8-x2x7z", True),
        ("chat-prefill-0-1", True),
        ("chat-2-decode-6b9f7c5d8-x2x7z", False),
        ("chat-router-6b9f7c5d8-x2x7z", False),
    ],
)
def test_pods_of_a_graph_with_a_longer_name_are_not_its_own(pod, is_own):
    """Another graph's healthy workers would hide that this one's are not scraped."""
    selector = pod_selector(GRAPH)
    assert selector.startswith('namespace="serving",')
    expression = re.search(r'pod=~"(.*)"', selector)
    assert (re.fullmatch(expression[1], pod) is not None) is is_own
