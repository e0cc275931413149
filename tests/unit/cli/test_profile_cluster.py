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
    follow,
    read_result,
    request_of,
    result_data,
    write_files,
    write_result,
)
from penstock.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError
from penstock.engine.profiles.performance import graph_performance
from penstock.performance.recommend import Targets

TARGETS = Targets(3000, 150, 0.2, 0.02)
FLAGS = ClusterFlags(kubernetes=True)
LINES = ["Suggested prefill TP:1 (TTFT 1.00 ms, throughput 2.00 tokens/s/GPU)"]


class Api:
    """An API server with one object at a time, and the statuses that a request goes through."""

    def __init__(self, *statuses, live=None):
        self.statuses = list(statuses)
        self.live = live
        self.created = []
        self.applied = []

    async def get(self, kind, name, *, namespace):
        """Return the request with its next status, or the ConfigMap."""
        if kind.kind == "ProfileRequest":
            if not self.created or self.statuses[0] is None:
                raise NotFoundError("gone")
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            return {"status": status}
        if self.live is None:
            raise NotFoundError("none")
        return self.live

    async def create(self, obj, *, field_manager):
        """Keep the request, unless one is there."""
        if self.live is not None:
            raise ConflictError("exists")
        self.created.append(obj)

    async def apply(self, obj, *, field_manager):
        """Note what is applied."""
        self.applied.append((field_manager, obj))


def status(phase, message, **more):
    """A request's status."""
    return {"phase": phase, "conditions": [{"type": "Complete", "message": message}], **more}


def wait(api, graph, **timing):
    """Follow a request; return its status and what was told."""
    told = []
    timing = {"poll_s": 0.0, "unseen_s": 30.0, **timing}
    request = request_of(graph, TARGETS, FLAGS, sizes=(), max_gpus=None)
    found = asyncio.run(follow(api, request, "serving", tell=told.append, **timing))
    return found, told


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


def test_dry_run_prints_a_request_that_is_valid(build, tmp_path):
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
        "--dry-run",
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
        (["--config", "{file}", "--namespace", "x"], "--namespace: only with --kubernetes or --config-map"),
    ],
)  # fmt: skip
def test_flags_without_effect_are_refused(build, tmp_path, arguments, part):
    """Each by its name."""
    file = tmp_path / "graph.yaml"
    file.write_text(yaml.safe_dump(build().to_manifest()))
    with pytest.raises(ConfigError, match=part):
        profile.main([each.format(file=file) for each in arguments], standalone_mode=False)


def test_each_new_word_is_told_once_and_the_recommendation_returned(build):
    """Until it has succeeded."""
    done = status("Succeeded", "done", recommendation={"summary": LINES})
    api = Api({}, status("Profiling", "runs"), status("Profiling", "runs"), done)
    found, told = wait(api, build())
    assert found == done
    assert told[1:] == ["Profiling: runs", "Succeeded: done"]
    assert api.created[0]["metadata"] == {"name": "llama", "namespace": "serving"}


@pytest.mark.parametrize(
    ("statuses", "error", "part"),
    [
        ([status("Failed", "out of memory")], ClusterError, "serving/llama: out of memory"),
        ([None], ClusterError, "was deleted; apply it again"),
        ([{}], ConfigError, "no operator has looked at it for 0 s; see penstock doctor"),
    ],
)
def test_a_request_that_comes_to_nothing_is_an_error(build, statuses, error, part):
    """Failed, deleted, or seen by nobody."""
    with pytest.raises(error, match=part):
        wait(Api(*statuses), build(), unseen_s=0.0)


def test_a_request_of_that_name_is_not_replaced(build):
    """It may be somebody else's."""
    with pytest.raises(ConfigError, match="exists already; kubectl delete gpr llama, or choose another"):
        wait(Api({}, live={"data": {}}), build())


# ---------------------------------------------------------------- the ConfigMap


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
    api = Api(live=live)
    asyncio.run(write_result(api, "fast", "serving", {"profile.json": "{}"}))
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
        asyncio.run(write_result(api, "fast", "serving", {"profile.json": "{}"}))
    assert api.applied == []


def test_a_result_comes_back_as_files(tmp_path):
    """Those that a result has, and nothing that somebody added."""
    api = Api(live={"data": {"profile.json": "{}", "../evil": "x"}})
    data = asyncio.run(read_result(api, "fast", "serving"))
    assert [path.name for path in write_files(data, tmp_path / "out")] == ["profile.json"]
    assert (tmp_path / "out" / "profile.json").read_text() == "{}"
