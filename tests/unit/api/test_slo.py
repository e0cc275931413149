"""The graph's latency target: what manifests may say of it, and who overrides it."""

import pytest
import yaml

from penstock.api import GraphDeployment, ProfileRequest, RouterConfig, SloConfig
from penstock.api.fields import walk
from penstock.api.manifests.loading import parse_manifests
from penstock.api.renamed import RENAMED_KEYS

GRAPH = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "metadata": {"name": "g"},
    "spec": {
        "model": {"name": "m"},
        "runtime": "simulated",
        "services": {"worker": {"role": "aggregated"}},
    },
}
REQUEST = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "ProfileRequest",
    "metadata": {"name": "r"},
    "spec": {"graph": "g", "isl": 100, "osl": 10},
}


def problems(base, path, value):
    """Return what is wrong with a manifest that has one more key."""
    manifest = yaml.safe_load(yaml.safe_dump(base))
    *sections, key = path.split(".")
    place = manifest
    for each in sections:
        place = place.setdefault(each, {})
    place[key] = value
    return [(each.path, each.message) for each in parse_manifests(yaml.safe_dump(manifest))[1]]


@pytest.mark.parametrize("path", RENAMED_KEYS)
def test_a_former_key_is_refused_and_the_new_one_named(path):
    """Each key of the table, in the kind that had it."""
    base = REQUEST if path in {"spec.ttftSeconds", "spec.itlSeconds"} else GRAPH
    assert problems(base, path, 1) == [(path, f"no longer a key; {RENAMED_KEYS[path]}")]


def test_no_key_of_today_is_called_former():
    """The table would hide it."""
    for kind in (GraphDeployment, ProfileRequest):
        assert not RENAMED_KEYS.keys() & {entry.path for entry in walk(kind)}


def test_premium_and_standard_have_the_graphs_targets_where_they_have_none_of_their_own():
    """Background has no latency target but its own, since batch jobs wait; the attainment is the graph's for all."""
    section = {
        "premium": {"ttft": "200ms"},
        "standard": {"attainment": 0.9},
        "background": {"endToEnd": "2m"},
    }
    tiers = RouterConfig.model_validate({"tiers": {"slo": section}}).tiers
    found = tiers.under(SloConfig(ttft="3s", itl="40ms", attainment=0.95)).slo
    targets = [
        (each.ttft_seconds, each.itl_seconds, each.attainment, each.end_to_end_seconds)
        for each in (found.premium, found.standard, found.background)
    ]
    assert targets == [(0.2, 0.04, 0.95, 5.0), (3.0, 0.04, 0.9, 15.0), (None, None, 0.95, 120.0)]


def test_targets_are_written_as_they_may_be_read():
    """As text with a unit; a default is left out."""
    slo = SloConfig(ttft="1500ms", itl="50ms")
    assert slo.to_manifest() == {"ttft": "1.5s", "itl": "50ms"}
    assert SloConfig.model_validate(slo.to_manifest()) == slo
