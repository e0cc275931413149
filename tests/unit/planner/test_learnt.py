"""What a planner has learnt is shown, starts another graph's planner, and can be forgotten."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from sla_load import FEW_POINTS

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.cli.planner import planner
from penstock.core.errors import ConfigError, LedgerError, NotFoundError
from penstock_planner.cluster.profiles import memory_of
from penstock_planner.core.ledger_history import LearnedStateInfo
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.explain import in_words
from penstock_planner.learnt import former_run, former_run_in_words, start_from
from penstock_planner.ledger import read_ledger
from penstock_planner.options import PlannerOptions
from penstock_planner.replay import replay

P = Role.PREFILL
GRAPH = Path(__file__).parents[3] / "manifests/samples/disaggregated.yaml"


def _busy(world):
    """Mode adaptive: a request per second, and four from a minute on, each half a second of a prefill worker."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE, metric_pulling_interval_s=1.0)

    def demand(now_s):
        rate = 1.0 if now_s < 1060 else 4.0
        return Demand(
            period_s=1.0,
            arrivals=rate,
            prompt_tokens=2000 * rate,
            uncached_tokens=2000 * rate,
            prefilled_tokens=2000 * rate,
            prefilling_workers=rate / 2,
            in_flight={P: rate},
        )

    world.load.demand = demand
    return world


@pytest.fixture(name="busy")
async def _busy_world(world):
    await _busy(world).run_until(200)
    return world


def _invoke(*arguments):
    return CliRunner().invoke(planner, ["memory", *map(str, arguments)], catch_exceptions=False)


def _exported(world, tmp_path):
    file = tmp_path / "memory.json"
    assert _invoke("export", "--log-dir", world.folder, file).exit_code == 0
    return file


def _options(file, **given):
    plain = {"memory": str(file), "mode": "adaptive", "served-model-name": "llama", **given}
    return PlannerOptions.model_validate(plain)


def _memory(record):
    return AdaptiveMemory.read(record["state"]["learned"])


def test_show_tells_what_was_learnt_by_role(busy):
    """Start-ups of 12 s, first seen a tick after their decision, 4,000 tokens/s, and the floor in the sentence that explain has."""
    text = _invoke("show", "--log-dir", busy.folder).stdout
    lines = dict(line.split(": ", 1) for line in text.splitlines()[1:])
    assert text.startswith("model llama\n")
    assert lines["prefill"].startswith("start-up time 11 s; 4,000 prompt tokens/s per worker; floor")
    newest = [record for record in read_ledger(busy.folder).records if record["type"] == "decision"][-1]
    assert lines["prefill"].split("per worker; ")[1] in in_words(newest)
    assert lines["decode"].startswith("start-up time 11 s; floor")
    assert lines["decode"].split("11 s; ")[1] in in_words(newest)
    plain = orjson.loads(_invoke("show", "--log-dir", busy.folder, "--json").stdout)
    assert (plain["version"], plain["model"], plain["gpus"]) == (4, "llama", {"prefill": 1, "decode": 1})
    assert -2 <= plain["memory"]["adaptive"]["pulled_s"] <= 0


async def test_another_graph_starts_with_what_was_learnt_and_nothing_of_this_traffic(
    busy, new_world, tmp_path
):
    """Start-up, throughput and floors hold from its first record on; replay repeats every decision."""
    learnt = _memory(busy.records("decision")[-1])
    other = _busy(new_world())
    memory = start_from(_options(_exported(busy, tmp_path)), None)
    await other.run_until(20, other.planner(memory=memory))
    begun = _memory(other.records("header")[0])
    assert begun.roles[P].startup_s == learnt.roles[P].startup_s
    assert begun.work.done_tokens / begun.work.busy_s == pytest.approx(4000)
    assert begun.hindsight[P].floor == learnt.hindsight[P].floor
    assert (begun.roles[P].ready, begun.pulled_s, begun.work.rate.seen_s) == (None, None, 0.0)
    assert replay(read_ledger(other.folder)).differences == ()


async def test_mode_sla_carries_its_corrections_too(world, new_world, tmp_path):
    """How prompts and tokens compared with the profile is shown, and known to the next planner at once."""
    for each in (world, other := new_world()):
        _busy(each)
        each.config = replace(each.config, mode=Mode.SLA, itl_slo_s=0.02, performance=FEW_POINTS)
    await world.run_until(60)
    shown = _invoke("show", "--log-dir", world.folder).stdout.splitlines()[-1]
    ratios = re.fullmatch(
        r"observed times as a multiple .*: prefill (\d\.\d\d), TTFT \d\.\d\d, ITL \d\.\d\d", shown
    )
    assert float(ratios[1]) != 1
    memory = start_from(_options(_exported(world, tmp_path), mode="sla"), None)
    await other.run_until(10, other.planner(memory=memory))
    learnt, begun = (
        each["state"]["learned"]["sla"]
        for each in (world.records("decision")[-1], other.records("header")[0])
    )
    assert (begun["prefill"], begun["variability"]) == (learnt["prefill"], learnt["variability"])
    assert begun["steady"]["seen_s"] == 0
    assert replay(read_ledger(other.folder)).differences == ()


async def test_what_a_ledger_remembers_wins(busy, new_world, tmp_path):
    """A restarted planner continues where it was, whatever file its command line names."""
    other = _busy(new_world())
    await other.run_until(40)
    memory = start_from(_options(_exported(busy, tmp_path)), None)
    await other.run_until(60, other.planner(memory=memory))
    assert _memory(other.records("header")[1]).roles[P].startup_s is None
    assert replay(read_ledger(other.folder)).differences == ()


async def test_reset_forgets_and_keeps_the_history(busy):
    """The next start has learnt nothing, ids continue, and every decision is still replayed."""
    made = replay(read_ledger(busy.folder)).decisions
    assert _invoke("reset", "--log-dir", busy.folder).exit_code == 0
    with pytest.raises(ConfigError, match="has not learnt anything"):
        _invoke("show", "--log-dir", busy.folder)
    await busy.run_until(230)
    ids = [record["decision"]["id"] for record in busy.records("decision")]
    assert ids == [f"d{number:06d}" for number in range(1, len(ids) + 1)]
    result = replay(read_ledger(busy.folder))
    assert (result.differences, result.decisions > made) == ((), True)
    assert _memory(busy.records("decision")[-1]).hindsight[P].seen_s < 60


def test_reset_is_refused_while_a_planner_runs(busy):
    """Its ledger is locked."""
    busy.ledger.tail()
    with pytest.raises(ConfigError, match="held by another planner"):
        _invoke("reset", "--log-dir", busy.folder)


@pytest.mark.parametrize("command", [["show"], ["reset"], ["export", "memory.json"]])
def test_a_folder_without_a_ledger_is_refused(tmp_path, command):
    """Nothing is made there."""
    with pytest.raises(LedgerError, match="cannot be read"):
        _invoke(*command, "--log-dir", tmp_path)
    assert list(tmp_path.iterdir()) == []


def _set(plain, path, value):
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = value


NESTED = functools.reduce(lambda inner, _: [inner], range(900), [])
"""More than can be written again, and less than cannot be read."""
HINDSIGHT = ("memory", "adaptive", "hindsight", "prefill")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 1, "version 1, this one reads 4"),
        (("model",), "other", "learnt from model other, this planner's is llama"),
        (("memory", "adaptive"), {"work": 3}, "work"),
        (("memory",), {}, "adaptive: Field required"),
        (
            ("memory", "adaptive", "roles", "prefill", "startups_s"),
            ["3"],
            "startups_s.0: Input should be a valid number",
        ),
        (("memory", "adaptive", "roles", "prefill", "startups_s"), [-3.0], "below 0"),
        (("memory", "x"), NESTED, "nested too deeply"),
        ((*HINDSIGHT, "idle_s"), [], "different lengths"),
        ((*HINDSIGHT, "floor"), 90, "different lengths"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(busy, tmp_path, path, value, message):
    """By version, model and shape; the message names what is wrong."""
    file = _exported(busy, tmp_path)
    plain = orjson.loads(file.read_bytes())
    _set(plain, path, value)
    file.write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match=message):
        start_from(_options(file), None)


def test_a_graph_of_other_workers_is_refused(busy, tmp_path):
    """The sample graph has one GPU a worker."""
    file, graph = _exported(busy, tmp_path), str(GRAPH)
    arguments = ["run", "--graph", graph, "--memory", str(file), "--dry-run"]
    assert CliRunner().invoke(planner, arguments, catch_exceptions=False).exit_code == 0
    plain = orjson.loads(file.read_bytes())
    plain["gpus"]["decode"] = 2
    file.write_bytes(orjson.dumps(plain))
    with pytest.raises(ConfigError, match=r"workers of decode 2 GPUs.* this graph's are decode 1 GPUs"):
        CliRunner().invoke(planner, arguments, catch_exceptions=False)


def test_a_trace_makes_a_memory_that_the_graphs_planner_starts_from(tmp_path):
    """Bursts of a minute in twenty: start-ups as said, throughput and a floor are known, and `run --memory` takes them."""
    file, graph = tmp_path / "m.json", tmp_path / "graph.yaml"
    trace = (
        "step:rate=0.1,peak=60,step_s=300,step_length_s=60,duration_s=1200,input_tokens=8000,output_tokens=20"
    )
    made = ["memory", "from-trace", trace, str(file), "--manifest", str(GRAPH), "--cold-start-s", "40"]
    shown = CliRunner().invoke(planner, made, catch_exceptions=False)
    started = start_from(_options(file), load_graph(GRAPH))
    known = AdaptiveMemory.read(started)
    assert known.startup_s(P, 0.0) == pytest.approx(40.0, abs=2.0)
    assert known.work.tokens_per_s
    assert "on time for" in shown.stdout
    graph.write_text(GRAPH.read_text().replace("  planner:", "  planner:\n    mode: load", 1))
    with pytest.raises(ConfigError, match=r"planner\.mode load does not learn; choose mode adaptive or sla"):
        CliRunner().invoke(planner, [*made[:5], str(graph)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="over before the first decision"):
        CliRunner().invoke(planner, [*made, "--limit", "1"], catch_exceptions=False)


def test_a_missing_file_ends_a_first_start_and_no_restart(busy, tmp_path):
    """A supervisor starts the planner with the same command line long after the file may have gone."""
    gone = tmp_path / "gone.json"
    with pytest.raises(ConfigError, match=r"gone.json"):
        start_from(_options(gone, **{"log-dir": str(tmp_path / "new")}), None)
    assert start_from(_options(gone, **{"log-dir": str(busy.folder)}), None) == {}


def test_a_mode_that_learns_nothing_refuses_the_flag_and_ignores_the_key(tmp_path):
    """A graph keeps its key when a flag chooses another mode; on a cluster a flag would be every graph's."""
    assert start_from(_options(tmp_path / "m.json", mode="load"), None) == {}
    run = ["run", "--memory", "m.json", "--dry-run"]
    with pytest.raises(ConfigError, match="--memory: mode load does not learn"):
        CliRunner().invoke(planner, [*run, "--mode", "load"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="--memory: holds the memory of one graph"):
        CliRunner().invoke(planner, [*run, "--environment", "kubernetes"], catch_exceptions=False)


class _ConfigMaps:
    """An API server with at most one ConfigMap, named memory."""

    def __init__(self, data=None):
        self._data = data

    async def get(self, _kind, name, *, namespace):
        if self._data is None:
            raise NotFoundError(f"configmaps {namespace}/{name} not found")
        return {"metadata": {}, "data": self._data}


async def test_on_kubernetes_the_export_lies_in_a_config_map(busy, tmp_path):
    """The same text under memory.json starts a planner with the same."""
    file = _exported(busy, tmp_path)
    options, graph = _options("memory"), load_graph(GRAPH)
    client = _ConfigMaps({"memory.json": file.read_text()})
    found = await memory_of(client, "serving", options, graph, has_ledger=False)
    assert found == start_from(_options(file), graph)
    assert found["adaptive"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "ConfigMap memory does not exist; create it"),
        ({}, "ConfigMap memory does not hold memory.json; create it"),
        ({"memory.json": "{"}, "ConfigMap memory: memory.json: not JSON"),
    ],
)
async def test_a_config_map_that_cannot_be_used_keeps_a_new_graph_waiting(data, message):
    """The message says what to run; once there is a ledger a ConfigMap that has gone is passed over."""
    inputs = (_ConfigMaps(data), "serving", _options("memory"), load_graph(GRAPH))
    with pytest.raises(ConfigError, match=f"spec.planner.memory: {message}"):
        await memory_of(*inputs, has_ledger=False)
    if data is None:
        assert await memory_of(*inputs, has_ledger=True) == {}


def _as(world, learning_identity):
    world.config = replace(world.config, learning_identity=learning_identity)
    return world


async def test_what_a_former_run_left_is_taken_up_and_said(busy):
    """Of the same model, engine and speed: its floors continue, and header, page and `explain` say how old they are."""
    learnt = _memory(busy.records("decision")[-1])
    await busy.run_until(230)
    left = busy.records("header")[-1]["remembered"]
    assert left["is_taken"]
    assert left["seen_s"] == pytest.approx(learnt.seen_s)
    words = former_run_in_words(LearnedStateInfo(**left), busy.folder, left["until_wall_s"] + 7200)
    assert "continues with what it learnt until 2.0 h ago (0.1 h of demand" in words
    assert f"penstock planner memory reset --log-dir {busy.folder}" in words
    told = CliRunner().invoke(planner, ["explain", "--log-dir", str(busy.folder)]).stdout
    assert "continues with what it learnt" in told
    assert former_run(busy.folder, "").is_taken


async def test_what_was_learnt_at_another_speed_is_not_taken(new_world):
    """Learnt at speed 1, resumed at speed 20: the first decision knows nothing, the header says why, replay agrees."""
    world = _as(_busy(new_world()), "model llama, speed 1")
    await world.run_until(120)
    assert _memory(world.records("decision")[-1]).learnt_from == "model llama, speed 1"
    await _as(world, "model llama, speed 20").run_until(150)
    header = world.records("header")[-1]
    assert not header["remembered"]["is_taken"]
    assert header["state"]["learned"] == {}
    assert _memory(world.records("decision")[-1]).seen_s < 40
    words = former_run_in_words(LearnedStateInfo(**header["remembered"]), world.folder, 0.0)
    assert "does not use what it learnt" in words
    assert words.endswith("this graph differs in speed 20 instead of speed 1")
    assert replay(read_ledger(world.folder)).differences == ()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("model a, runtime vllm, speed 1", "model a instead of model b"),
        (
            "model a, runtime simulated a100, speed 1",
            "model a, runtime simulated a100 instead of model b, runtime vllm",
        ),
        ("model b, runtime vllm, profile p, speed 1", "profile p instead of no profile"),
        ("model b, speed 1", "no runtime instead of runtime vllm"),
    ],
)
def test_what_differs_is_named_with_both_values(now, words):
    """Speed, engine, model and profile, and no part that is the same."""
    left = LearnedStateInfo(
        None, "model b, runtime vllm, speed 1", 60.0, is_taken=False, learning_identity=now
    )
    assert former_run_in_words(left, "/log", 0.0).endswith(f": this graph differs in {words}")


def test_a_ledger_of_an_older_version_does_not_say_what_differs():
    """It does not hold what ran then."""
    left = LearnedStateInfo(None, "model b, speed 1", 60.0, is_taken=False)
    assert former_run_in_words(left, "/log", 0.0).endswith(": this graph differs")


def test_a_folder_without_a_ledger_has_no_former_run(tmp_path):
    """Nothing was learnt there, or it cannot be read."""
    assert former_run(tmp_path, "") is None
