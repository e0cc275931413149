"""A planner refuses a profile of another model or engine size than its graph runs."""

import json
from dataclasses import asdict

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.profiles.performance import SimulatedEngine, performance_of, planning_profile


@pytest.fixture
def profile_file(tmp_path):
    """Return a function that writes a profile of one GPU per role, changed, and returns its path."""
    engine = SimulatedEngine("h200-llama-3.1-8b-tp1")

    def write(**changes):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({**asdict(performance_of(engine, engine)), **changes}))
        return str(path)

    return write


@pytest.mark.parametrize("model", ["meta/llama", "llama", ""])
def test_a_profile_of_the_graphs_engines_is_taken(build, profile_file, model):
    """The publisher may be left out; a profile that does not say its model is taken at its word."""
    assert planning_profile(build().spec, profile_file(model=model)).prefill_gpus == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "meta/opt"}, "model: measured of meta/opt, but the graph serves meta/llama"),
        ({"model": "llama", "decode_gpus": 4}, "decode_gpus: measured with 4, but a replica has 1"),
    ],
)
def test_a_profile_of_others_is_refused(build, profile_file, changes, said):
    """With the file, the key and the remedy."""
    with pytest.raises(ConfigError, match=f"planner.sla.profile: .*profile.json: {said}"):
        planning_profile(build().spec, profile_file(**changes))
