"""`penstock demo` may run its graph with another policy."""

from importlib import resources
from pathlib import Path

import pytest

from penstock.api.manifests import load_graph
from penstock.cli.demo import with_policy
from penstock.router.policy.registry import policy_names


@pytest.mark.parametrize("policy", policy_names())
def test_only_the_policy_differs(tmp_path, policy):
    """The file is a graph like the first but for the router's policy."""
    with resources.as_file(resources.files("penstock.cli") / "data" / "demo.yaml") as manifest:
        changed = load_graph(with_policy(Path(manifest), policy, tmp_path))
        own = load_graph(Path(manifest))
    assert changed.spec.router.policy == policy
    router = own.spec.router.model_copy(update={"policy": policy})
    assert changed.spec == own.spec.model_copy(update={"router": router})
