"""`penstock profile` on Kubernetes: the request, the wait for it, and the ConfigMap that keeps a result."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest
import yaml
from click.testing import CliRunner

from penstock.api.manifests import load_manifests
from penstock.cli.profile import profile
from penstock.cli.profile_cluster import (
    MAX_BYTES,
    ClusterFlags,
    request_of,
    result_data,
    write_result,
)
from penstock.core.errors import ConfigError, NotFoundError
from penstock.engine.profiles.performance import graph_performance
from penstock.performance.recommend import Targets

TARGETS = Targets(3000, 150, 0.2, 0.02)
FLAGS = ClusterFlags(kubernetes=True)
LINES = ["Suggested prefill TP:1 (TTFT 1.00 ms, throughput 2.00 tokens/s/GPU)"]


class Api:
    """An API server with at most one ConfigMap."""

    def __init__(self, live):
        self.live = live
        self.applied = []

    async def get(self, _kind, _name, *, namespace):
        """Return the ConfigMap."""
        if self.live is None:
            raise NotFoundError("none")
        return self.live

    async def apply(self, obj, *, field_manager):
        """Note what is applied."""
        self.applied.append((field_manager, obj))


@pytest.mark.parametrize(
    ("sizes", "max_gpus", "expected"),
    [((), None, ((1, 2), 2)), ((1, 4), None, ((1, 4), 4)), ((), 4, ((1, 2, 4), 4)), ((2,), 4, ((2,), 4))],
)
def test_a_request_measures_the_graph_of_the_file(build, sizes, max_gpus, expected):
    """Its whole specification, lengths and targets; the largest worker bounds the GPUs where nothing else does."""
    graph = build(services={"prefill": {"gpusPerReplica": 2}})
    request = request_of(graph, TARGETS, FLAGS, sizes=sizes, max_gpus=max_gpus)
    assert (request.name, request.config_map) == ("llama", "llama")
    assert request.spec.template == graph.spec.to_manifest()
    assert (request.spec.isl, request.spec.osl) == (3000, 150)
    assert (request.spec.ttft_seconds, request.spec.itl_seconds) == (0.2, 0.02)
    assert (request.spec.sizes, request.spec.max_gpus) == expected


def test_a_request_that_is_valid_is_printed(build, tmp_path):
    """Ready for kubectl apply."""
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(build().to_manifest()))
    arguments = [
        "--config",
        str(file),
        "--isl",
        "3000",
        "--kubernetes",
        "--request-name",
        "fast",
    ]
    printed = CliRunner().invoke(profile, arguments)
    assert printed.exit_code == 0, printed.output
    [request] = load_manifests(printed.output).profile_requests
    assert (request.name, request.spec.isl) == ("fast", 3000)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kubernetes"], "--kubernetes: give the graph to measure with --config"),
        (["--kubernetes", "--config", "{file}", "--kv-tokens", "8"], "--kv-tokens: decides how this machine measures"),
        (["--config", "{file}", "--request-name", "x"], "--request-name: only with --kubernetes"),
        (["--kubernetes", "--config", "{file}", "--context", "x"], "--context: only with --config-map"),
        (["--config", "{file}", "--namespace", "x"], "--namespace: only with --kubernetes or --config-map"),
    ],
)  # fmt: skip
def test_flags_without_effect_are_refused(build, tmp_path, arguments, part):
    """Each by its name."""
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(build().to_manifest()))
    with pytest.raises(ConfigError, match=part):
        profile.main([each.format(file=file) for each in arguments], standalone_mode=False)


@pytest.fixture(name="files")
def made_files(build, tmp_path):
    """What a profiler left."""
    texts = {
        "profile.json": json.dumps(asdict(graph_performance(build().spec))),
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


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "profile.json: not JSON"), (" " * MAX_BYTES, "not JSON"), (None, "cannot be read")],
)
def test_what_is_no_profile_is_not_kept(files, text, part):
    """A planner would refuse it later."""
    files[0].unlink()
    if text is not None:
        files[0].write_text(text)
    with pytest.raises(ConfigError, match=part):
        result_data(files, LINES)


def test_a_result_beyond_a_config_maps_size_is_refused_by_its_size(files):
    """The API server's own words name no remedy."""
    files[1].write_text("x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="a ConfigMap holds 1,048,576; measure fewer sizes"):
        result_data(files, LINES)


@pytest.mark.parametrize("live", [None, {"metadata": {}}, {"data": {"profile.json": "old"}}])
def test_a_result_is_applied_by_its_own_manager(live):
    """To a ConfigMap that is not there, empty, or of an earlier result."""
    api = Api(live)
    asyncio.run(write_result(api, "fast", "serving", {"profile.json": "{}"}))
    [(manager, obj)] = api.applied
    assert manager == "penstock-profiler"
    assert (obj["metadata"], obj["data"]) == (
        {"name": "fast", "namespace": "serving"},
        {"profile.json": "{}"},
    )


def test_a_config_map_of_other_content_is_left_alone():
    """A typo must not cost a router its configuration."""
    api = Api({"data": {"graph.yaml": "", "keys": ""}, "binaryData": {"blob": ""}})
    with pytest.raises(ConfigError, match="ConfigMap serving/fast holds blob, keys; choose another name"):
        asyncio.run(write_result(api, "fast", "serving", {"profile.json": "{}"}))
    assert api.applied == []
