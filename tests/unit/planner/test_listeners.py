"""Dashboard, metrics page and state file: what others see of the planner."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import orjson
import pytest
import yaml
from matplotlib.axes import Axes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.core.cron import Recurring
from penstock.core.errors import PortInUseError
from penstock.core.exposition import parse_samples
from penstock.core.http.client import ConnectionPool
from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock_planner.dashboard import Dashboard, curves_of
from penstock_planner.dashboard_runs import NOTES, FlatParts, run_of
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.schedule import ScheduledBounds
from penstock_planner.decision_steps import DemandForecast, forecast_of
from penstock_planner.files import SnapshotWriter
from penstock_planner.ledger import FormerRuns
from penstock_planner.metrics import PlannerMetrics, serve
from penstock_planner.series import EXPECTED, SERIES, points
from penstock_planner.stats import PlannerStats

D, P = Role.DECODE, Role.PREFILL


async def _drawn_in(world, seconds, graph=None, *, pictures=False):
    """Return the content of the event files that a run leaves, by curve: TensorBoard's runs below its folder.

    The pictures take nearly all of the time; they are drawn only where a test looks at them.
    """
    draw = None if pictures else lambda _drawing: None
    board = Dashboard(world.folder / "board", world.config, graph, draw=draw)
    world.watch(board)
    await world.run_until(seconds)
    board.close()
    curves = {}
    for path in {file.parent for file in (world.folder / "board").rglob("events*")}:
        events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
        events.Reload()
        curves[path.relative_to(world.folder / "board").as_posix()] = events
    return curves


@pytest.fixture(name="drawn")
async def _drawn_run(world, tmp_path):
    """Two minutes of a ramp with latencies, drawn; returns the event files' content."""
    world.measure_latency(
        lambda count: {"ttft": ((0.1, count), (0.5, 2 * count), (math.inf, 2 * count)), "itl": ()}
    )
    world.load.kv = lambda _now, _workers: 0.95
    world.load.demand = lambda now: _demand(now) if now < 1100 else None
    return await _drawn_in(world, 120)


def _demand(now_s):
    """Each pull brings 4 requests, one of them refused; the oldest has waited for as long as the run."""
    return Demand(
        period_s=1.0,
        arrivals=4,
        refused=1,
        unserved={Role.DECODE: 1},
        completed=3,
        uncached_tokens=4000,
        prefilled_tokens=3000,
        waiting=7,
        oldest_wait_s=now_s - 1000,
    )


def _values(drawn, curve, tag):
    return {e.step: round(e.value, 6) for e in drawn[run_of(curve, tag)].Scalars(tag)}


def test_gpu_hours_are_the_integral_of_gpus_over_modelled_time(drawn):
    """About 2 GPUs for 30 s, 3 for 42 s, 4 for 42 s, 5 for the rest."""
    hours = _values(drawn, "in use", "gpus/hours")
    last = max(hours)
    expected = (2 * 30 + 3 * 42 + 4 * (last - 72)) / 3600 if last <= 114 else None
    expected = expected or (2 * 30 + 3 * 42 + 4 * 42 + 5 * (last - 114)) / 3600
    assert hours[last] == pytest.approx(expected, abs=10 / 3600)


async def test_the_share_served_and_the_one_predicted_are_two_curves_of_one_chart(world):
    """Two of ten first tokens are late though nothing waits, as the model learns to predict."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE, ttft_slo_s=5.0)
    world.load.demand = lambda _now: Demand(
        1.0,
        arrivals=10.0,
        uncached_tokens=200.0,
        prefilled_tokens=200.0,
        prefilling_workers=0.5,
        ttft_count=10.0,
    )
    world.measure_latency(lambda at_s: {"ttft": ((5.0, 8 * at_s), (math.inf, 10 * at_s))})
    drawn = await _drawn_in(world, 60)
    served, predicted = (
        list(_values(drawn, run, "in_time/share").values()) for run in ("served", "predicted")
    )
    assert served
    assert predicted
    assert served[-1] == pytest.approx(0.8, abs=0.01)
    assert predicted[-1] == pytest.approx(0.81, abs=0.01)


def _points(*demands, config=None):
    """Return the dashboard's points of this many pulls."""
    return points(PlannerStats(config, is_held=False, demands=list(demands)), is_decided=False)


def test_a_point_averages_over_requests_and_samples():
    """Two pulls of different length: no mean of rates or of means; without a sample there is no latency."""
    short = Demand(1.0, arrivals=9, ttft_sum_s=6.0, ttft_count=3, itl_sum_s=1.0, itl_count=100)
    found = _points(short, Demand(2.0, waiting=3, ttft_sum_s=4.0, ttft_count=1))
    assert found["arriving", "demand/requests_per_second"] == 3.0
    assert found["waiting", "wait/requests"] == 3
    assert (found["mean", "ttft/seconds"], found["mean", "itl/seconds"]) == (2.5, 0.01)
    assert ("mean", "ttft/seconds") not in _points(Demand(period_s=1.0))
    assert not [tag for _, tag in _points() if tag.startswith("demand")]


def _each_scalar_is_in_one_chart(drawn):
    """Check it, and return the categories' titles."""
    proto = drawn["planner"].Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(proto)
    patterns = [tag for c in layout.category for chart in c.chart for tag in chart.multiline.tag]
    for name, curve in drawn.items():
        # The folder's own run has the row of the HParams table.
        for tag in curve.Tags()["scalars"] if name != "." else ():
            assert sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1, tag
    return [c.title for c in layout.category]


def test_the_layout_arranges_every_drawn_tag(drawn):
    """TensorBoard opens with the charts; each scalar is in exactly one of them."""
    assert not [name for name in drawn if name.startswith("gpu_pool/")]
    assert _each_scalar_is_in_one_chart(drawn) == [
        "Load and thresholds",
        "Demand and supply",
        "Replicas",
        "GPUs",
        "Latency",
        "Planner",
    ]


COLOURS = 7
"""Of TensorBoard, given to its runs in turn."""


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("roles", [{P, D}, {Role.AGGREGATED}])
@pytest.mark.parametrize("has_schedule", [True, False])
@pytest.mark.parametrize("in_pool", [True, False])
def test_no_chart_has_one_colour_twice(roles, mode, has_schedule, in_pool):
    """Every curve that the table knows, by the order in which its run begins."""
    order = curves_of(roles, mode, has_schedule=has_schedule, in_pool=in_pool)
    values = {
        "role": [role.value for role in roles],
        "state": ["ready", "starting", "draining"],
        "threshold": ["up threshold", "down threshold"],
        "latency": ["ttft", "itl"],
        "factor": ["prefill", "ttft", "itl"],
        "quantile": ["p50", "p99"],
        "figure": ["served", "predicted"],
        "bound": ["least", "most"],
    }
    charts = {EXPECTED[1]: {run_of(*EXPECTED)}}
    for each in SERIES.values():
        if each.tag is not None:
            for named in product(*(values[label] for label in each.labels)):
                labels = dict(zip(each.labels, named, strict=True))
                tag = each.tag.format_map(labels)
                charts.setdefault(tag, set()).add(run_of(each.curve.format_map(labels), tag))
    for chart, curves in charts.items():
        shown = curves & set(order)
        assert len({order.index(curve) % COLOURS for curve in shown}) == len(shown), chart
    drawn = set.union(*charts.values())
    assert set(order) - drawn == {NOTES}


def test_a_burst_after_a_quiet_night_is_more_than_the_outliers_that_tensorboard_ignores():
    """Five minutes after eight hours, 12 s a point; flat parts keep their ends, so that lines have the same edges."""
    flat, night, burst = FlatParts(), 2400, [float(5 + n % 7) for n in range(25)]
    values = [0.0] * night + burst + [0.0] * 25
    written = [each for n, value in enumerate(values) for each in flat.add("c", "t", (value, float(n), n))]
    assert [value for value, _, _ in written if value] == burst
    assert sum(1 for value, _, _ in written if value) > 0.1 * len(written)
    steps = [step for _, _, step in written]
    assert steps == sorted(steps)
    assert night - 1 in steps
    assert flat.rest() == [("c", "t", (0.0, 2449.0, 2449))]
    assert flat.add("c", "other", (0.0, 0.0, 0)) == [(0.0, 0.0, 0)]


async def test_a_graph_in_a_gpu_pool_has_a_chart_of_it(world):
    """What it holds, may hold, is guaranteed, and wants by its last decision; of one in no pool there is no such curve."""
    world.load.kv = lambda _now, _workers: 0.95
    observe = world.backend.observe

    async def pooled():
        return replace(await observe(), grant=3, guaranteed=2)

    world.backend.observe = pooled
    drawn = await _drawn_in(world, 120)
    chart = "gpu_pool/count"
    assert set(_values(drawn, "granted", chart).values()) == {3.0}
    assert set(_values(drawn, "guaranteed", chart).values()) == {2.0}
    assert list(_values(drawn, "wanted", chart).values())[:2] == [3.0, 4.0]
    assert max(_values(drawn, "in use", chart).values()) == 3.0
    _each_scalar_is_in_one_chart(drawn)


async def test_what_the_schedule_bounds_is_drawn_with_the_replicas(world, monkeypatch):
    """An entry of every minute: its floor and ceiling are curves of the role's chart, and the overview shades and names it."""
    shaded = []
    monkeypatch.setattr(Axes, "axvspan", lambda *_, **__: shaded.append("span"))
    always = ScheduledBounds("always", Recurring("* * * * *", "UTC", 3600.0), {D: 2}, {D: 3})
    world.config = replace(world.config, schedule=(always,))
    drawn = await _drawn_in(world, 60, pictures=True)
    least, most = (_values(drawn, f"scheduled {each}", "replicas/decode") for each in ("least", "most"))
    assert set(least.values()) == {2.0}
    assert set(most.values()) == {3.0}
    assert shaded


async def test_the_overview_is_a_picture_with_its_changes(world):
    """The last hour and the last day, each change numbered; TensorBoard reads both, and the settings alongside them."""
    world.load.kv = lambda _now, _workers: 0.95
    drawn = await _drawn_in(world, 120, pictures=True)
    notes = drawn["planner"]
    assert notes.Tags()["images"] == ["overview/last hour", "overview/last day"]
    (picture, *_) = notes.Images("overview/last hour")
    assert picture.encoded_image_string.startswith(b"\x89PNG")
    assert min(picture.width, picture.height) > 600
    assert b"GPU budget" in notes.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


async def test_the_table_of_runs_finds_its_figures_in_the_row_itself(world):
    """TensorBoard joins a row's run and a metric's with a slash, so that "./in use" would be no run of one folder."""
    drawn = await _drawn_in(world, 120)
    board = drawn["."]
    assert {"_hparams_/session_start_info", "_hparams_/session_end_info"} <= set(board.summary_metadata)
    experiment = board.summary_metadata["_hparams_/experiment"].plugin_data.content
    metrics = [each.name for each in HParamsPluginData.FromString(experiment).experiment.metric_infos]
    assert {each.group for each in metrics} == {""}
    assert {each.tag for each in metrics} >= set(board.Tags()["scalars"]) >= {"compared/GPU-hours"}


def _texts(drawn, tag):
    """The texts of the text tab below a tag, in the order of their steps."""
    found = drawn["planner"].Tensors(f"{tag}/text_summary")
    return [each.tensor_proto.string_val[0].decode() for each in found]


async def test_the_text_tab_has_the_manifest_and_what_was_learnt(world):
    """The manifest as it was applied; the memory as `memory show` says it, the newest at the end; no memory in mode load."""
    graph = load_graph(Path(__file__).parents[3] / "manifests/samples/disaggregated.yaml")
    world.config = replace(world.config, mode=Mode.ADAPTIVE)
    world.load.demand = _demand
    drawn = await _drawn_in(world, 180, graph)
    (manifest,) = _texts(drawn, "manifest")
    assert yaml.safe_load(manifest.removeprefix("```yaml\n").removesuffix("```")) == graph.to_manifest()
    memories = _texts(drawn, "memory")
    assert len(memories) > 1
    assert memories[-1].startswith("* prefill: start-up time 11 s; throughput not known; ")
    assert "\n* decode: start-up" in memories[-1]


async def test_a_mode_that_learns_nothing_has_no_memory_to_read(world):
    """Nor a manifest where the planner was started without one."""
    drawn = await _drawn_in(world, 65)
    assert not {"memory/text_summary", "manifest/text_summary"} & set(drawn["planner"].Tags()["tensors"])


async def test_the_newest_text_names_the_last_decision_and_all_changes(world):
    """With their times on the clock and the rules that decided: TensorBoard keeps a sample of the texts, and always the newest."""
    world.load.kv = lambda now_s, _workers: 0.95 if now_s % 240 < 120 else 0.01
    newest = _texts(await _drawn_in(world, 400), "decisions")[-1]
    last, *earlier = re.findall(r"\*\*(d\d+)\*\*", newest)
    changed = [each.decision.id for each in FormerRuns.before_now(world.folder).changes(100)]
    assert len(changed) >= 3
    assert earlier == [each for each in reversed(changed) if each != last]
    assert last >= changed[-1]
    assert re.search(r"\*\*d\d+\*\* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", newest)
    assert "(`thresholds: above_threshold`)" in newest


async def test_a_dashboard_that_cannot_write_stops_nothing(world, tmp_path, caplog):
    """A file where its folder should be: one warning, and every decision is made."""
    (tmp_path / "board").write_text("in the way")
    board = Dashboard(tmp_path / "board", DecideConfig())
    world.watcher.tick = board.tick
    await world.run_until(65)
    board.close()
    assert len(world.watcher.decisions) == 2
    assert [r.getMessage() for r in caplog.records if "dashboard" in r.getMessage()] == [
        "dashboard stopped; planning continues"
    ]


# ---------------------------------------------------------------- metrics


async def _page_after(world, seconds):
    """Return a graph's numbers by name, without prefix, and the values of their other labels."""
    metrics = PlannerMetrics()
    figures = metrics.of("serving", "llama")
    figures.begin(world.config)
    world.watch(figures)
    await world.run_until(seconds)
    page = metrics.page().decode()
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE penstock_")}
    return {
        (
            each.name.removeprefix("penstock_").removeprefix("planner_"),
            *(value for label, value in each.labels.items() if label not in ("namespace", "graph")),
        ): each.value
        for each in parse_samples(page, names)
    }


async def test_the_metrics_page_shows_demand_decisions_replicas_and_ages(world):
    """Of the newest pull and the newest tick; counters by role, action and reason."""
    world.load.kv = lambda _now, _workers: 0.95
    world.load.demand = _demand
    found = await _page_after(world, 100)
    expected = {
        ("arrivals_per_second",): 4,
        ("rejected_per_second",): 1,
        ("oldest_wait_seconds",): 100,
        ("replica_startup_seconds", "decode"): 12,
        ("decisions_total", "up", "above_threshold", "decode", "thresholds"): 2,
        ("replicas", "decode", "ready"): 3,
        ("desired_replicas", "decode"): 3,
        ("gpus",): 4,
        ("gpu_budget",): 8,
        ("reading_age_seconds", "kv"): 0,
        ("phase", "observing"): 1,
        ("schedule_lag_p99_seconds",): 0,
        ("schedule_lag_samples_total",): 100,
        ("ledger_errors_total",): 0,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_a_forgotten_graph_leaves_the_page_and_a_restarted_loop_counts_on(world):
    """Two graphs on one page; one is deleted, the other's loop begins again with its own counters."""
    metrics = PlannerMetrics()
    listener, other = metrics.of("serving", "llama"), metrics.of("serving", "other")
    world.watcher.tick = listener.tick
    await world.run_until(5)
    listener.restarted()
    await world.run_until(10)
    other.tick(listener.view)
    assert 'samples_total{graph="llama",namespace="serving"} 10.0' in metrics.page().decode()
    assert 'graph="other"' in metrics.page().decode()
    metrics.forget("serving", "other")
    assert 'graph="other"' not in metrics.page().decode()


async def test_metrics_and_health_are_served_and_a_taken_port_is_named():
    """One that hangs is not ready, one whose leadership ended and whose work did not is not alive; metrics are still served."""
    metrics, faults, hangs = PlannerMetrics(), [], []
    server = await serve(
        metrics,
        "127.0.0.1",
        0,
        unready=lambda: hangs[0] if hangs else None,
        fault=lambda: faults[0] if faults else None,
    )
    pool = ConnectionPool()

    async def statuses():
        url = f"http://127.0.0.1:{server.port}"
        paths = ("/metrics", "/health", "/healthz", "/readyz", "/else")
        return [(await pool.request("GET", url + path)).status for path in paths]

    try:
        assert await statuses() == [200, 200, 200, 200, 404]
        hangs.append("serving/llama: no tick for 200 s")
        assert await statuses() == [200, 200, 200, 503, 404]
        answer = await pool.request("GET", f"http://127.0.0.1:{server.port}/readyz")
        assert b"no tick for 200 s" in answer.body
        hangs.clear()
        faults.append("lease l: leadership is over")
        assert await statuses() == [200, 503, 503, 200, 404]
        answer = await pool.request("GET", f"http://127.0.0.1:{server.port}/healthz")
        assert b"leadership is over" in answer.body
        with pytest.raises(PortInUseError, match=str(server.port)):
            await serve(metrics, "127.0.0.1", server.port, unready=lambda: None)
    finally:
        await pool.close()
        await server.close(grace_s=0)


# ---------------------------------------------------------------- state file


async def test_the_state_file_holds_the_planner_now(world):
    """Pools, last decisions with sentences, what it is doing."""
    writer = SnapshotWriter(world.folder, world.config, now_s=lambda: world.time.at_s)
    world.watch(writer)
    world.load.kv = lambda _now, _workers: 0.95
    await world.run_until(35)
    state = orjson.loads((world.folder / "state.json").read_bytes())
    assert (state["phase"], state["elapsed_s"], state["pid"]) == ("adjusting", 35.0, os.getpid())
    assert state["pools"]["decode"]["starting"] == 1
    assert state["desired"] == {"prefill": 1, "decode": 2}
    assert (state["gpus"], state["max_gpu_budget"]) == (3, 8)
    (decision,) = state["decisions"]
    assert decision["roles"]["decode"]["sentence"] == "decode 1 -> 2: KV 0.95 > 0.90"
    assert decision["at_s"] == 30.0


INPUTS = {"horizon_s": 15.0, "tokens_per_s_ahead": 9000.0, "workers": 2, "worker_tokens_per_s": 4000.0}


def test_the_demand_step_holds_forecast_and_supply():
    """Two workers of 4,000 tokens/s each; unknown is never zero, and a mode that forecasts nothing has no figure."""
    assert forecast_of([("late", {"workers": 2}), ("demand", INPUTS)]) == DemandForecast(
        15.0, 9000.0, 2, 8000.0
    )
    unseen = forecast_of([("demand", {**INPUTS, "worker_tokens_per_s": None})])
    assert str(unseen) == "9,000 uncached tokens/s in 15 s; what 2 workers can compute is unknown"
    assert forecast_of([("signal", INPUTS)]) is None
    for missing in ("horizon_s", "tokens_per_s_ahead", "workers"):
        assert forecast_of([("demand", {**INPUTS, missing: None})]) is None


PROFILE = PerformanceProfile(
    PrefillTable((100.0, 20_000.0), (0.01, 2.0)),
    DecodeTable((100.0, 20_000.0), (0.01, 1.0), ((0.01, 0.02),) * 2, ((100.0, 2000.0),) * 2, 100_000.0),
)
SLA = DecideConfig(mode=Mode.SLA, performance=PROFILE, itl_slo_s=0.02, attainment=0.95)
DEMAND = Demand(
    1.0,
    arrivals=4.0,
    prompt_tokens=4000.0,
    uncached_tokens=4000.0,
    prefilled_tokens=4000.0,
    completed=4.0,
    output_tokens=400.0,
    prefilling_workers=0.4,
)


OF_TARGETS = {
    *("uncached_tokens_per_second", "forecast_tokens_per_second", "worker_tokens_per_second"),
    *("needed_replicas", "correction_factor", "target_seconds", "attainment_goal_fraction"),
    "attained_fraction",
}


async def _shown(world, config, seconds, demand=lambda _now: DEMAND):
    """Return the page's numbers of targets after this many seconds."""
    world.config = replace(config, adjustment_interval_s=10.0)
    world.load.demand = demand
    found = await _page_after(world, seconds)
    return {key: value for key, value in found.items() if key[0] in OF_TARGETS}


async def test_mode_sla_shows_expected_beside_arrived_the_profile_and_the_targets(world):
    """Steady demand: what was expected for now is what arrives; nine of ten first tokens came in time."""
    world.measure_latency(
        lambda count: {"ttft": ((5.0, 0.9 * count), (10.0, count)), "itl": ((0.02, count), (0.1, count))}
    )
    found = await _shown(world, SLA, 120)
    assert found["uncached_tokens_per_second",] == 4000
    assert found["forecast_tokens_per_second",] == pytest.approx(4000, rel=0.05)
    assert found["worker_tokens_per_second",] == pytest.approx(10_000, rel=0.15)
    assert found["needed_replicas", "prefill"] == 1
    assert found["needed_replicas", "decode"] >= 1
    assert {key for key in found if key[0] == "correction_factor"} == {
        ("correction_factor", name) for name in ("prefill", "ttft", "itl")
    }
    assert (found["target_seconds", "ttft"], found["target_seconds", "itl"]) == (SLA.ttft_slo_s, 0.02)
    assert found["attainment_goal_fraction",] == 0.95
    assert found["attained_fraction", "ttft"] == pytest.approx(0.9)
    assert found["attained_fraction", "itl"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "more"), [(Mode.ADAPTIVE, {"forecast_tokens_per_second"}), (Mode.LOAD, set())]
)
async def test_other_modes_show_what_arrives_and_their_forecast(world, mode, more):
    """Mode adaptive expects demand and has no profile; mode load neither."""
    found = await _shown(world, DecideConfig(mode=mode), 90)
    assert {key[0] for key in found} == {"uncached_tokens_per_second", *more}
