"""Dashboard, metrics page and state file: what others see of the planner."""

from __future__ import annotations

import math
import os
import re
import threading
from dataclasses import replace

import orjson
import pytest
from metrics_page import page_after
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from penstock.api import Role
from penstock.core.errors import PortInUseError
from penstock.core.http.client import ConnectionPool
from penstock.performance.profile import PerformanceProfile
from penstock.performance.tables import DecodeTable, PrefillTable
from penstock.planner import dashboard as dashboard_module
from penstock.planner.dashboard import Dashboard
from penstock.planner.dashboard_layout import layout_of
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.observation import Demand
from penstock.planner.figures import Figures, shares_within
from penstock.planner.metrics import PlannerMetrics, serve
from penstock.planner.series import points
from penstock.planner.snapshot import SnapshotWriter

D, P = Role.DECODE, Role.PREFILL


async def _drawn_in(world, seconds):
    """Return the content of the event files that a run leaves."""
    board = Dashboard(world.folder / "board", world.config)
    world.watch(board)
    await world.run_until(seconds)
    board.close()
    assert board.dropped == 0
    events = EventAccumulator(str(world.folder / "board"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


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
        turned_away={Role.DECODE: 1},
        completed=3,
        uncached_tokens=4000,
        prefilled_tokens=3000,
        waiting=7,
        oldest_wait_s=now_s - 1000,
    )


def _values(events, tag):
    return {e.step: round(e.value, 6) for e in events.Scalars(tag)}


def test_signals_are_drawn_with_their_thresholds(drawn):
    """Mean and thresholds share a step axis of simulated seconds since the start."""
    assert set(_values(drawn, "kv/mean").values()) == {0.95}
    assert set(_values(drawn, "kv/scale_up").values()) == {0.9}
    assert set(_values(drawn, "kv/scale_down").values()) == {0.5}
    assert set(_values(drawn, "prefill_queue/compared").values()) == {0.3}
    assert max(_values(drawn, "kv/scale_up")) <= 120


def test_replicas_desired_and_gpus_rise_step_by_step(drawn):
    """Desired leads ready; GPUs count the starting worker at once."""
    ready, desired = _values(drawn, "replicas/decode_ready"), _values(drawn, "replicas/decode_desired")
    assert (ready[31], desired[31]) == (1, 2)
    assert (ready[43], desired[43]) == (2, 2)
    assert _values(drawn, "gpus/in_use")[33] == 3
    assert set(_values(drawn, "gpus/budget").values()) == {8}


def test_gpu_hours_are_the_integral_of_gpus_over_modelled_time(drawn):
    """About 2 GPUs for 30 s, 3 for 42 s, 4 for 42 s, 5 for the rest."""
    hours = _values(drawn, "gpu_hours/cumulative")
    last = max(hours)
    expected = (2 * 30 + 3 * 42 + 4 * (last - 72)) / 3600 if last <= 114 else None
    expected = expected or (2 * 30 + 3 * 42 + 4 * 42 + 5 * (last - 114)) / 3600
    assert hours[last] == pytest.approx(expected, abs=10 / 3600)


def test_latencies_are_quantiles_of_each_interval(drawn):
    """Half of the samples up to 0.1 s, the rest in (0.1 s, 0.5 s]."""
    assert set(_values(drawn, "ttft/p50_seconds").values()) == {0.05}
    assert list(_values(drawn, "ttft/p99_seconds").values()) == pytest.approx([math.sqrt(0.05)] * 3, abs=1e-3)
    assert "itl/p50_seconds" not in drawn.Tags()["scalars"]


def test_demand_supply_and_waits_are_drawn(drawn):
    """Rates over the pulls since the last point, the newest wait beside the SLO; nothing while unknown."""
    assert set(_values(drawn, "demand/arrivals_per_second").values()) == {4.0}
    assert set(_values(drawn, "demand/rejected_per_second").values()) == {1.0}
    assert set(_values(drawn, "prefill/uncached_tokens_per_second").values()) == {4000.0}
    assert set(_values(drawn, "prefill/computed_tokens_per_second").values()) == {3000.0}
    waits = _values(drawn, "wait/oldest_seconds")
    assert all(0 <= step - waited_s <= 2 for step, waited_s in waits.items())
    assert max(waits) <= 100
    assert set(_values(drawn, "wait/slo_seconds").values()) == {5.0}
    assert _values(drawn, "replicas/decode_starting")[33] == 1
    assert set(_values(drawn, "startup/decode_seconds").values()) == {12.0}


def _points(*demands, config=None):
    """Return the dashboard's points of so many pulls."""
    return points(Figures(config, is_held=False, demands=list(demands)), is_decided=False)


def test_a_point_averages_over_requests_and_samples():
    """Two pulls of different length: no mean of rates or of means; without a sample there is no latency."""
    short = Demand(1.0, arrivals=9, ttft_sum_s=6.0, ttft_count=3, itl_sum_s=1.0, itl_count=100)
    found = _points(short, Demand(2.0, waiting=3, ttft_sum_s=4.0, ttft_count=1))
    assert (found["demand/arrivals_per_second"], found["wait/requests"]) == (3.0, 3)
    assert (found["ttft/mean_seconds"], found["itl/mean_seconds"]) == (2.5, 0.01)
    assert "ttft/mean_seconds" not in _points(Demand(period_s=1.0))
    assert not [tag for tag in _points() if tag.startswith("demand")]


async def test_no_pull_goes_undrawn_where_every_second_one_is_decided_on(world, tmp_path):
    """Two and four arrivals by turns are three a second."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE)
    world.load.demand = lambda now: Demand(period_s=1.0, arrivals=2 + 2 * (round(now) % 2))
    drawn = await _drawn_in(world, 20)
    assert set(_values(drawn, "demand/arrivals_per_second").values()) >= {3.0}


def test_targets_and_the_share_within_them_are_those_of_mode_sla():
    """8 of 10 first tokens within 2 s, and 6 requests rejected: half. Gaps only where there is a target for them."""
    latency = {"ttft": ((1.0, 4.0), (2.0, 8.0), (math.inf, 10.0)), "itl": ((0.05, 90.0), (math.inf, 100.0))}
    config = DecideConfig(mode=Mode.SLA, ttft_slo_s=2.0, itl_slo_s=0.05, attainment=0.95)

    targets = {"ttft/target_seconds": 2.0, "itl/target_seconds": 0.05, "attainment/goal": 0.95}
    assert targets.items() <= _points(config=config).items()
    assert shares_within(latency, config, rejected=6) == pytest.approx({"ttft": 0.5, "itl": 0.9})
    assert list(shares_within(latency, replace(config, itl_slo_s=None), rejected=0)) == ["ttft"]
    assert shares_within({}, config, rejected=0) == {}
    adaptive = replace(config, mode=Mode.ADAPTIVE)
    assert shares_within(latency, adaptive, rejected=6) == {}
    assert not targets.keys() & _points(config=adaptive).keys()


def _engine():
    """Return a profile of 1,000 prompt tokens/s and an ITL of 20 ms at any load."""
    decode = DecodeTable((100.0, 9000.0), (0.1, 1.0), ((0.02, 0.02),) * 2, ((500.0, 5000.0),) * 2, 100_000.0)
    return PerformanceProfile(PrefillTable((100.0, 10_000.0), (0.1, 10.0)), decode)


async def test_mode_sla_draws_prediction_targets_attainment_factors_and_need(world, tmp_path):
    """1,500 tokens/s on workers of 1,000 that take twice as long as their profile says, so the factor goes to two."""
    world.config = replace(
        world.config, mode=Mode.SLA, ttft_slo_s=2.0, itl_slo_s=0.05, attainment=0.9, performance=_engine()
    )
    demand = Demand(
        period_s=1.0,
        arrivals=3,
        prompt_tokens=1500,
        uncached_tokens=1500,
        prefilled_tokens=1500,
        prefilling_workers=3,
        refused=1,
        turned_away={Role.DECODE: 1},
    )
    world.load.demand = lambda _now: demand
    world.measure_latency(lambda count: {"ttft": ((2.0, 2 * count), (math.inf, 2 * count)), "itl": ()})
    drawn = await _drawn_in(world, 120)

    assert set(_values(drawn, "ttft/target_seconds").values()) == {2.0}
    assert set(_values(drawn, "attainment/goal").values()) == {0.9}
    # Two first tokens in time for each request that is refused, once per interval of 30 s.
    shares = _values(drawn, "attainment/ttft")
    assert list(shares.values()) == pytest.approx([2 / 3] * len(shares), abs=0.01)
    assert len(shares) == 3
    assert "attainment/itl" not in drawn.Tags()["scalars"]
    factors = _values(drawn, "correction/prefill")
    assert factors[max(factors)] == pytest.approx(2.0, abs=0.1)
    needed, desired = _values(drawn, "replicas/prefill_needed"), _values(drawn, "replicas/prefill_desired")
    assert needed[max(needed)] >= 4 > needed[min(needed)]
    # It grows once 2.5 times the late share that the targets allow is expected.
    assert desired[max(desired)] >= needed[max(needed)] - 1
    _each_scalar_is_in_one_chart(drawn)


async def test_forecast_and_supply_are_drawn_beside_what_came(world):
    """At the times that forecasts are for: 30 s of start-up and a pull after the first decision, at 2 s."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE)
    world.load.demand = lambda _now: Demand(
        period_s=1.0, arrivals=2, uncached_tokens=500, prefilled_tokens=1000, prefilling_workers=1
    )
    drawn = await _drawn_in(world, 60)
    forecasts = _values(drawn, "prefill/forecast_tokens_per_second")
    assert (min(forecasts), max(forecasts) <= 60) == (33, True)
    assert forecasts[max(forecasts)] == pytest.approx(500, rel=0.1)
    supply = _values(drawn, "prefill/supply_tokens_per_second")
    assert supply[max(supply)] == pytest.approx(1000)


def test_decisions_are_texts_with_reasons(drawn):
    """One text per decision at its step."""
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in drawn.Tensors("decisions/text_summary")]
    assert [step for step, _ in texts] == [30, 72, 114]
    assert "decode 1 -> 2: KV 0.95 > 0.90 (`above_threshold`)" in texts[0][1]


def _each_scalar_is_in_one_chart(drawn):
    """Check it, and return the categories' titles."""
    proto = drawn.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(proto)
    patterns = [tag for c in layout.category for chart in c.chart for tag in chart.multiline.tag]
    for tag in drawn.Tags()["scalars"]:
        assert sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1, tag
    return [c.title for c in layout.category]


def test_the_layout_arranges_every_drawn_tag(drawn):
    """TensorBoard opens with the charts; each scalar is in exactly one of them."""
    assert _each_scalar_is_in_one_chart(drawn) == [
        "Load and thresholds",
        "Demand and supply",
        "Replicas",
        "GPUs",
        "Latency",
        "Planner",
    ]


def test_an_aggregated_graph_has_no_queue_chart():
    """Only what there is."""
    layout = layout_of({Role.AGGREGATED}, Mode.LOAD)
    assert list(layout["Load and thresholds"]) == ["KV usage"]
    assert list(layout["Replicas"]) == ["aggregated replicas"]
    assert "Targets and profile" not in layout


@pytest.mark.parametrize("mode", [Mode.ADAPTIVE, Mode.HPA])
def test_thresholds_are_drawn_only_where_they_are_compared_with(mode):
    """In other modes the dashboard begins with demand, and the load stands without lines that nothing follows."""
    layout = layout_of({Role.PREFILL, Role.DECODE}, mode)
    assert next(iter(layout)) == "Demand and supply"
    assert layout["Load"] == {
        "KV usage": ["Multiline", ["^kv/mean$"]],
        "Prefill queue": ["Multiline", ["^prefill_queue/compared$"]],
    }


async def test_a_dashboard_that_cannot_write_stops_nothing(world, tmp_path, caplog):
    """A file where its folder should be: one warning, and every decision is made."""
    (tmp_path / "board").write_text("in the way")
    board = Dashboard(tmp_path / "board", DecideConfig())
    world.watcher.tick = board.tick
    await world.run_until(65)
    board.close()
    assert len(world.watcher.decisions) == 2
    assert [r.getMessage() for r in caplog.records if "dashboard" in r.getMessage()] == [
        "dashboard stopped; planning goes on"
    ]


async def test_points_are_dropped_when_the_disk_does_not_keep_up(world, tmp_path, monkeypatch):
    """A writer that hangs fills a bounded queue and no more."""
    release = threading.Event()
    monkeypatch.setattr(dashboard_module, "MAX_WAITING", 3)
    monkeypatch.setattr(dashboard_module, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(dashboard_module, "EventsWriter", lambda *_a: release.wait(5))
    board = Dashboard(tmp_path / "board", DecideConfig())
    world.watcher.tick = board.tick
    await world.run_until(65)
    assert board.dropped > 20
    assert len(world.watcher.decisions) == 2
    board.close()
    release.set()


# ---------------------------------------------------------------- metrics


async def test_the_metrics_page_shows_demand_decisions_replicas_and_ages(world):
    """Of the newest pull and the newest tick; counters by role, action and reason."""
    world.load.kv = lambda _now, _workers: 0.95
    world.load.demand = _demand
    found = await page_after(world, 100)
    expected = {
        ("arrivals_per_second",): 4,
        ("rejected_per_second",): 1,
        ("oldest_wait_seconds",): 100,
        ("replica_startup_seconds", "decode"): 12,
        ("decisions_total", "up", "above_threshold", "decode"): 2,
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


async def test_unknown_readings_are_nan_on_the_page(world):
    """Unknown is not zero."""
    world.load.kv = lambda _now, _workers: None
    world.load.queue = lambda _now, _workers: None
    found = await page_after(world, 5)
    rates = ("arrivals_per_second", "rejected_per_second", "oldest_wait_seconds")
    for name in ("kv_usage_fraction", "prefill_queue_requests", *rates):
        assert math.isnan(found[name,]), name
    assert found["unknown_readings", "kv"] == 1


async def test_a_forgotten_graph_leaves_the_page_and_a_restarted_loop_counts_on(world):
    """Two graphs on one page; one is deleted, the other's loop begins anew with its own counters."""
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
    """A planner whose leadership ended and whose work did not is not alive; its metrics are still served."""
    metrics, faults = PlannerMetrics(), []
    server = await serve(metrics, "127.0.0.1", 0, fault=lambda: faults[0] if faults else None)
    pool = ConnectionPool()

    async def statuses():
        url = f"http://127.0.0.1:{server.port}"
        paths = ("/metrics", "/health", "/healthz", "/else")
        return [(await pool.request("GET", url + path)).status for path in paths]

    try:
        assert await statuses() == [200, 200, 200, 404]
        faults.append("lease l: leadership is over")
        assert await statuses() == [200, 503, 503, 404]
        answer = await pool.request("GET", f"http://127.0.0.1:{server.port}/healthz")
        assert b"leadership is over" in answer.body
        with pytest.raises(PortInUseError, match=str(server.port)):
            await serve(metrics, "127.0.0.1", server.port)
    finally:
        await pool.close()
        await server.close(grace_s=0)


# ---------------------------------------------------------------- state file


async def test_the_state_file_holds_the_planner_now(world):
    """Pools, last decisions with sentences, what it is doing."""
    writer = SnapshotWriter(world.folder, now_s=lambda: world.time.at_s)
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
