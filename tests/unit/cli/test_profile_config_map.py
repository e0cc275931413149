"""`penstock profile --config-map`: the ConfigMap that keeps a result."""

from __future__ import annotations

import asyncio

import pytest

from penstock.cli.profile import MAX_BYTES, apply_result, profile, result_data
from penstock.core.errors import ConfigError, NotFoundError

LINES = ["Suggested prefill TP:1 (TTFT 1.00 ms, throughput 2.00 tokens/s/GPU)"]


class Api:
    """An API server with one ConfigMap at most."""

    def __init__(self, live=None):
        self.live = live
        self.applied = []

    async def get(self, kind, name, *, namespace):
        """Return the ConfigMap."""
        if self.live is None:
            raise NotFoundError("none")
        return self.live

    async def apply(self, obj, *, field_manager):
        """Note what is applied."""
        self.applied.append((field_manager, obj))


def test_a_namespace_without_a_config_map_is_refused():
    """By its name."""
    with pytest.raises(ConfigError, match="--namespace: has an effect only with --config-map"):
        profile.main(
            ["--from", "h200-llama-3.1-8b-tp1", "--itl-slo", "50ms", "--namespace", "x"],
            standalone_mode=False,
        )


@pytest.fixture(name="files")
def made_files(tmp_path):
    """What a profiler left."""
    texts = {
        "profile.json": "{}",
        "graph.yaml": "kind: GraphDeployment\n",
        "decode_performance.png": "picture",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return [tmp_path / name for name in texts]


def test_a_result_is_profile_graph_and_words(files):
    """Pictures and arrays stay where they are."""
    data = result_data(files, LINES)
    assert set(data) == {"profile.json", "graph.yaml", "recommendation.txt"}
    assert data["recommendation.txt"] == f"{LINES[0]}\n"


def test_a_result_beyond_a_config_maps_size_is_refused_by_its_size(files):
    """The API server's own words name no remedy."""
    files[1].write_text("x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="a ConfigMap holds 1,048,576; measure fewer sizes"):
        result_data(files, LINES)


@pytest.mark.parametrize("live", [None, {"metadata": {}}, {"data": {"profile.json": "old"}}])
def test_a_result_is_applied_by_its_own_manager(live):
    """To a ConfigMap that is not there, empty, or of an earlier result."""
    api = Api(live=live)
    asyncio.run(apply_result(api, "fast", "serving", {"profile.json": "{}"}))
    [(manager, obj)] = api.applied
    assert manager == "penstock-profiler"
    assert (obj["metadata"], obj["data"]) == (
        {"name": "fast", "namespace": "serving"},
        {"profile.json": "{}"},
    )


def test_a_config_map_of_other_content_is_left_alone():
    """A typo must not cost a router its configuration."""
    api = Api(live={"data": {"graph.yaml": "", "keys": ""}, "binaryData": {"blob": ""}})
    with pytest.raises(ConfigError, match="ConfigMap serving/fast holds blob, keys; choose another name"):
        asyncio.run(apply_result(api, "fast", "serving", {"profile.json": "{}"}))
    assert api.applied == []
