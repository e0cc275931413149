"""What other fleets would have done on a recorded run; the run itself is synthetic, made by a simulated fleet."""

from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from penstock.api import Role, Tier
from penstock.api.manifests import load_graph
from penstock.cli.report import report as report_command
from penstock.core.errors import ConfigError
from penstock.planner.decide.config import DecideConfig, Mode
from penstock.planner.decide.observation import PoolCounts
from penstock.report.analysis import GpuUse, violations
from penstock.report.counterfactual import sentences
from penstock.report.findings import RunReport, analyse
from penstock.report.ledger_view import LedgerSample, PlannerRun
from penstock.simulator.counterfactual import MOST_SPLITS, Effort, compare, recorded_traffic, setting_of
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.results import SCHEMA, LoadRun, ResultWriter
from penstock.workload.statistics import ScheduleLag, summarise
from penstock.workload.traces import TraceRequest

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, scaling: {minReplicas: 1, maxReplicas: 4}}
  engine: {profile: a100-llama-8b-bf16-tp1}
  planner: {maxGpuBudget: 5}
"""
DURATION_S = 62.0


def _result(line, *, ttft_s=2.0, status=RequestStatus.OK, ids=None):
    is_ok = status is RequestStatus.OK
    return RequestResult(
        id=f"synthetic-{line}",
        line=line,
        arrival_s=line * 0.5,
        sent_s=line * 0.5 + 0.01,
        ended_s=line * 0.5 + 2.5,
        status=status,
        http_status=200 if is_ok else 503,
        error=None,
        error_class=None if is_ok else "http_503",
        trace_input_tokens=12_000,
        trace_output_tokens=20,
        block_ids=tuple(range(line * 24, line * 24 + 24)) if ids is None else ids,
        prompt_tokens=12_000,
        output_tokens=20 if is_ok else None,
        cached_tokens=0,
        ttft_s=ttft_s if is_ok else None,
        e2e_s=2.5 if is_ok else None,
    )


def _load(results, *, is_partial=False, concurrency=None, trace_format="mooncake"):
    measured = summarise(results, duration_s=DURATION_S, speed=1.0, punctuality=ScheduleLag(0.01, 0.001, 0.2))
    measured["requests"] |= {"planned": len(results), "sent": len(results), "unfinished": 0, "not_sent": 0}
    summary = {
        "schema": SCHEMA,
        "is_partial": is_partial,
        "started": {"unix_s": 1.7e9, "model_s": 0.0},
        **measured,
        "settings": {"model": "m", "speed": 1.0, "concurrency": concurrency, "max_input_tokens": None},
        "trace": {
            "name": "synthetic",
            "format": trace_format,
            "skipped_rows": [],
            "truncated_prompts": 0,
            "dropped_prompts": 0,
        },
    }
    return LoadRun(summary, tuple(results))


def _report(load):
    return RunReport(load, None, None, violations(load.results, ttft_target_s=None, itl_target_s=None))


@pytest.fixture
def manifest(tmp_path):
    """A disaggregated graph inside five GPUs."""
    path = tmp_path / "graph.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """The same, read."""
    path = tmp_path_factory.mktemp("graph") / "graph.yaml"
    path.write_text(MANIFEST)
    return load_graph(path)


@pytest.fixture(scope="module")
def compared(graph):
    """Two requests a second of 12,000 tokens, 95% in time, on every fleet that is worth trying."""
    results = [_result(line, ttft_s=2.0 if line % 20 else 9.0) for line in range(1, 121)]
    return compare(_report(_load(results)), graph)


def test_the_first_row_is_what_happened_and_alone_is_measured(compared):
    """A reader can tell measured from simulated."""
    served, *others = compared.outcomes

    assert (served.name, served.source, served.in_time) == ("as served", "measured", 0.95)
    assert served.gpu_hours is None
    assert {each.source for each in others} == {"simulated"}
    assert [each.name for each in others if each.name == "hpa"] == ["hpa"]


def test_the_cheapest_fixed_fleet_is_as_good_and_nothing_smaller_is(compared):
    """Every smaller fleet was tried and found wanting."""
    chosen = next(each for each in compared.outcomes if "cheapest" in each.remark)
    smaller = [each for each in compared.fixed if _gpus(each) < _gpus(chosen)]

    assert chosen.in_time >= compared.served.in_time
    assert smaller
    assert all(each.in_time < compared.served.in_time for each in smaller)


def _gpus(outcome):
    return sum(int(part[0]) for part in outcome.name.split("+"))


def test_the_oracle_costs_no_more_than_the_cheapest_fixed_fleet(compared):
    """A fixed fleet is a schedule too."""
    oracle = next(each for each in compared.outcomes if each.name == "oracle")
    chosen = next(each for each in compared.outcomes if "cheapest" in each.remark)

    assert oracle.in_time >= compared.served.in_time
    assert oracle.gpu_hours <= chosen.gpu_hours


def test_where_no_fleet_serves_as_well_the_best_is_shown_as_such(graph):
    """Nothing is passed off as equal: every request was served in a moment, which no such fleet can."""
    results = [replace(_result(line, ttft_s=0.001), output_tokens=20) for line in range(1, 241)]
    crowd = [replace(each, sent_s=each.sent_s / 40) for each in results]

    found = compare(_report(_load(crowd)), graph)

    shown = [each for each in found.outcomes if each.name[0].isdigit()]
    assert [each.remark for each in shown] == ["the best fixed fleet tried; none served as well"]
    assert shown[0].in_time == max(each.in_time for each in found.fixed)


def _ledger(config):
    """A planner that held two GPUs for as long as the run took."""
    pools = {Role.PREFILL: PoolCounts(1, 0, 0, 1), Role.DECODE: PoolCounts(1, 0, 0, 1)}
    samples = (LedgerSample(0.0, pools, 2, None, None, None),)
    return PlannerRun(config, samples, (), (), DURATION_S, (), (12.0,))


def _with_planner(load, gpu_hours, *, mode=Mode.ADAPTIVE):
    run = _ledger(DecideConfig(mode=mode, max_gpu_budget=5))
    use = GpuUse(0.0, DURATION_S, gpu_hours, 1.0, 0.1, 5, 5)
    return replace(_report(load), planner=run, use=use)


def test_the_planner_is_there_twice_and_the_best_fleet_that_costs_no_more_is_shown(graph):
    """Measured and simulated side by side; three GPUs for the whole run cost less than 3.9 on average, and four more."""
    load = _load([_result(line, ttft_s=0.5) for line in range(1, 61)])

    found = compare(_with_planner(load, 3.9 * DURATION_S / 3600), graph)

    assert [(each.name, each.source) for each in found.outcomes[:3]] == [
        ("adaptive", "measured"),
        ("adaptive", "simulated"),
        ("hpa", "simulated"),
    ]
    equal = next(each for each in found.outcomes if "no more GPU-hours" in each.remark)
    assert _gpus(equal) == 3


def test_a_distorted_run_is_not_what_others_are_held_against(graph):
    """Lag made half of the requests late; a fleet that would be late as often is not called as good."""
    load = _load([_result(line, ttft_s=0.5 if line % 2 else 9.0) for line in range(1, 61)])
    lag = {**load.summary["lag"], "is_distorted": True}
    late = replace(load, summary={**load.summary, "lag": lag})

    found = compare(_with_planner(late, 0.05), graph)

    simulated = found.outcomes[1]
    chosen = next(each for each in found.outcomes if "serves as well" in each.remark)
    assert chosen.in_time >= simulated.in_time > found.served.in_time
    assert any("held against adaptive as it was simulated" in note for note in found.notes)


def test_an_aggregated_graph_has_fleets_of_one_kind(tmp_path):
    """Each worker does both; one after the other is tried."""
    path = tmp_path / "graph.yaml"
    prefill, decode = (line for line in MANIFEST.splitlines() if "scaling" in line)
    path.write_text(
        MANIFEST.replace(decode + "\n", "").replace(prefill, prefill.replace("prefill", "aggregated"))
    )

    found = compare(_report(_load([_result(line) for line in range(1, 31)])), load_graph(path))

    assert [each.name for each in found.fixed][:2] == ["fleet of 1", "fleet of 2"]
    assert any(line.startswith("a fixed fleet of ") for line in sentences(found))


def test_the_work_is_bounded_and_says_so(graph):
    """Two fleets and no more; what was found is shown, with a note that it was not all."""
    results = [_result(line) for line in range(1, 31)]
    begun = []

    found = compare(_report(_load(results)), graph, effort=Effort(fleets=2), on_fleet=begun.append)

    assert len(begun) == 2
    assert any(note.startswith("the search was ended after 2 fleets") for note in found.notes)
    assert found.outcomes[0].is_measured


def test_without_any_effort_left_what_was_served_is_shown_alone(graph):
    """A traffic too large for the processor time gives no half of a figure."""
    found = compare(
        _report(_load([_result(line) for line in range(1, 31)])), graph, effort=Effort(cpu_s=1e-9)
    )

    assert [each.source for each in found.outcomes] == ["measured"]
    assert found.fixed == ()


def test_the_traffic_is_what_was_sent_in_its_order():
    """Late sending, answers shorter than asked for, rejected requests, tiers and shared prefixes are all kept."""
    shared = tuple(range(24))
    late = replace(_result(1, ids=shared), sent_s=3.0, output_tokens=7, tier=Tier.BACKGROUND)
    refused = _result(2, status=RequestStatus.REJECTED, ids=shared)

    first, second = recorded_traffic(_load([late, refused]))

    assert (first.line, first.arrival_s, first.output_tokens, first.block_ids) == (2, 1.01, 20, shared)
    assert (second.line, second.arrival_s, second.output_tokens) == (1, 3.0, 7)
    assert (first.tier, second.tier) == (None, Tier.BACKGROUND)


@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (_load([]), "holds no request"),
        (_load([_result(1)], is_partial=True), "stopped early"),
        (_load([_result(1)], concurrency=4), "at most 4 requests in flight"),
        (_load([replace(_result(1), block_ids=None)]), "lacks block_ids"),
    ],
    ids=["empty", "partial", "closed loop", "older log"],
)
def test_a_log_that_does_not_hold_what_came_says_what_is_missing(load, missing):
    """Another fleet is never judged by traffic that it would not have met."""
    with pytest.raises(ConfigError, match=missing):
        recorded_traffic(load)


@pytest.fixture
def run_report(tmp_path, manifest):
    """Return a function that writes a run, and gives what `penstock report --manifest --json` says of it."""

    def run(load):
        with ResultWriter(tmp_path / "run") as writer:
            for result in load.results:
                writer.write(result)
            writer.finish(load.summary)
        arguments = [
            "--run",
            str(tmp_path / "run"),
            "--manifest",
            str(manifest),
            "--output",
            str(tmp_path / "out"),
        ]
        ended = CliRunner().invoke(report_command, [*arguments, "--json"])
        assert ended.exit_code == 0, ended.output
        return orjson.loads(ended.stdout), (tmp_path / "out" / "report.html").read_text()

    return run


def test_the_report_shows_other_fleets_side_by_side(run_report):
    """JSON, picture and page hold them; the SLO of the graph is the target."""
    found, page = run_report(_load([_result(line) for line in range(1, 61)]))

    names = [each["name"] for each in found["counterfactual"]["outcomes"]]
    assert names[0] == "as served"
    assert "oracle" in names
    assert any(file.endswith("counterfactual.png") for file in found["files"])
    assert found["violations"]["ttft_target_s"] == 5.0
    assert "The same traffic on other fleets" in page
    assert "would have cost" in page


def test_a_report_without_a_usable_log_is_made_and_says_what_is_missing(run_report):
    """Everything else is still there."""
    found, page = run_report(_load([_result(line) for line in range(1, 5)], concurrency=2))

    assert found["counterfactual"] is None
    assert any("at most 2 requests in flight" in note for note in found["notes"])
    assert "at most 2 requests in flight" in page


def test_the_log_that_was_written_is_the_log_that_is_read(tmp_path):
    """Ids survive the file, and a log without them is read as one that has none."""
    load = _load([_result(1), replace(_result(2), block_ids=None)])
    with ResultWriter(tmp_path) as writer:
        for result in load.results:
            writer.write(result)
        writer.finish(load.summary)

    assert [each.block_ids for each in analyse(tmp_path).load.results] == [tuple(range(24, 48)), None]


P, D = Role.PREFILL, Role.DECODE
SETTING_MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m, contextTokens: 131072}
  runtime: RUNTIME
  services:
    frontend: {role: router}
    prefill: {role: prefill, gpusPerReplica: PREFILL_GPUS, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, scaling: {minReplicas: 1, maxReplicas: 4}}
  engine: {profile: a100-llama-8b-bf16-tp1}
  router: {ttftSloSeconds: 3}
  planner: {maxGpuBudget: 6}
"""


@pytest.fixture
def make_graph(tmp_path):
    """Read the manifest with another runtime, or GPUs of a prefill replica."""

    def make(*, runtime="simulated", prefill_gpus=1):
        path = tmp_path / "graph.yaml"
        text = SETTING_MANIFEST.replace("RUNTIME", runtime).replace("PREFILL_GPUS", str(prefill_gpus))
        path.write_text(text)
        return load_graph(path)

    return make


def _sample(at_s, prefill, *, starting=0):
    pools = {P: PoolCounts(prefill, starting, 0, 1), D: PoolCounts(1, 0, 0, 1)}
    return LedgerSample(at_s, pools, prefill + starting + 1, None, None, None)


def _run(*samples, config=None, start_ups=()):
    return PlannerRun(config or DecideConfig(max_gpu_budget=6), samples, (), (), 100.0, (), start_ups)


def _run_report(planner=None, use=None):
    nothing = violations([], ttft_target_s=None, itl_target_s=None)
    return RunReport(LoadRun({}, ()), planner, use, nothing)


def _use(gpu_hours):
    return GpuUse(0.0, 3600.0, gpu_hours, 6.0, 2.0, 5, 6)


def _requests(rps, *, tokens=8000, count=100):
    return [TraceRequest(place / rps, tokens, 10, None, place + 1) for place in range(count)]


def test_the_simulation_begins_as_the_run_did(make_graph):
    """What was ready or starting when the first request was sent, not what the graph asks for."""
    run = _run(_sample(-20, 1), _sample(-1, 2, starting=1), _sample(5, 4))

    base = setting_of(_run_report(run), make_graph()).base

    assert [(pool.role, pool.replicas) for pool in base.pools] == [(P, 3), (D, 1)]


def test_replicas_start_as_fast_as_they_were_seen_to(make_graph):
    """The ledger's mean, and where it saw none, an assumption that is said to be one."""
    seen = setting_of(_run_report(_run(_sample(0, 1), start_ups=(10.0, 14.0))), make_graph())
    assumed = setting_of(_run_report(_run(_sample(0, 1))), make_graph())

    assert seen.base.cold_start_s == 12.0
    assert seen.notes == ("replicas start in 12.0 s, the mean of 2 in the ledger",)
    assert assumed.base.cold_start_s == 30.0
    assert assumed.notes == ("replicas are assumed to start in 30 s; the ledger saw none start",)


def test_the_ledgers_planner_is_simulated_and_may_act(make_graph):
    """Its own settings, the graph's SLO; one that only observed is let loose."""
    config = DecideConfig(mode=Mode.LOAD, queue_up=0.7, no_operation=True, max_gpu_budget=6)

    setting = setting_of(_run_report(_run(_sample(0, 1), config=config)), make_graph())

    assert (setting.planner.mode, setting.planner.queue_up) == (Mode.LOAD, 0.7)
    assert not setting.planner.no_operation
    assert (setting.planner.ttft_slo_s, setting.base.slo_s) == (3, 3)
    assert setting.has_ledger


def test_without_a_ledger_the_graphs_planner_is_not_passed_off_as_what_served(make_graph):
    """Its budget bounds the fleets; nothing says that it was at work."""
    setting = setting_of(_run_report(), make_graph())

    assert not setting.has_ledger
    assert setting.base.max_gpus == 6


def test_without_a_budget_fleets_hold_what_the_run_held(make_graph):
    """A comparison needs an end."""
    config = DecideConfig(max_gpu_budget=None)

    setting = setting_of(_run_report(_run(_sample(0, 1), config=config), _use(3.0)), make_graph())

    assert (setting.base.max_gpus, setting.planner.max_gpu_budget) == (5, 5)


def test_fleets_come_by_what_they_hold_within_the_budget(make_graph):
    """Prefill replicas of two GPUs: every fleet inside six, the cheapest first, the best split of a size first."""
    setting = setting_of(_run_report(), make_graph(prefill_gpus=2))

    sizes = setting.fleets(_requests(0.5))

    assert list(sizes) == [3, 4, 5, 6]
    assert sizes[5] == [(2, 1), (1, 3)]
    assert all(setting.gpus_of(fleet) == gpus for gpus, fleets in sizes.items() for fleet in fleets)
    assert setting.name_of((2, 1)) == "2P+1D"


def test_hopeless_fleets_and_odd_splits_are_not_tried(make_graph):
    """Nothing below half of what the load needs; of a large size the splits next to that need."""
    setting = setting_of(_run_report(), make_graph())
    large = replace(setting, base=replace(setting.base, max_gpus=40))

    sizes = large.fleets(_requests(20))

    assert min(sizes) >= 5
    assert max(sizes) == 40
    assert all(len(fleets) <= MOST_SPLITS for fleets in sizes.values())
