"""What other fleets would have done on a recorded run; the run itself is synthetic."""

from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from penstock.api import GraphDeployment, Role, Tier
from penstock.cli.report import report as report_command
from penstock.core.errors import ConfigError
from penstock.report.analysis import GpuUse, violations
from penstock.report.findings import RunReport
from penstock.report.ledger_view import PlannerRun
from penstock.simulator.counterfactual import MOST_SPLITS, compare, recorded_traffic, setting_of
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.results import SCHEMA, LoadRun, ResultWriter
from penstock.workload.statistics import ScheduleLag, summarise
from penstock.workload.traces import TraceRequest
from penstock_planner.decide.config import DecideConfig, Mode
from penstock_planner.decide.demand.observation import NO_WORKERS, PoolCounts, Pull

P, D = Role.PREFILL, Role.DECODE
DURATION_S = 62.0
SCALED = {"scaling": {"minReplicas": 1, "maxReplicas": 4}}


def graph_of(*roles, budget=5, prefill_gpus=1, ttft="5s", **router):
    """Return a graph inside a budget, with prefill and decode apart unless roles are given."""
    services = {role: {"role": role, **SCALED} for role in roles or ("prefill", "decode")}
    services.get("prefill", {})["gpusPerReplica"] = prefill_gpus
    spec = {
        "model": {"name": "m", "contextTokens": 131072},
        "runtime": "simulated",
        "services": {"frontend": {"role": "router"}, **services},
        "engine": {"profile": "a100-llama-8b-bf16-tp1"},
        "planner": {"maxGpuBudget": budget},
        "slo": {"ttft": ttft},
        "router": router,
    }
    head = {"apiVersion": "penstock.dev/v1alpha1", "kind": "GraphDeployment", "metadata": {"name": "g"}}
    return GraphDeployment.model_validate({**head, "spec": spec})


GRAPH = graph_of()


def result_of(line, *, ttft_s=2.0, status=RequestStatus.OK, ids=None):
    """Return one line of a log: two requests a second of 12,000 tokens that share nothing."""
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


def results_of(count, *, late=0):
    """Return this many lines, the late ones spread evenly among them."""
    return [
        result_of(line, ttft_s=9.0 if late and not line % (count // late) else 0.5)
        for line in range(1, count + 1)
    ]


def load_of(results, *, is_partial=False, concurrency=None, is_distorted=None):
    """Return a load run with these results."""
    measured = summarise(
        results, duration_s=DURATION_S, speed=1.0, schedule_lag=ScheduleLag(0.01, 0.001, 0.2)
    )
    measured["requests"] |= {"planned": len(results), "sent": len(results), "unfinished": 0, "not_sent": 0}
    measured["lag"] |= {} if is_distorted is None else {"is_distorted": is_distorted}
    trace = {"name": "synthetic", "format": "mooncake", "has_block_ids": True, "skipped_rows": []}
    summary = {
        "schema": SCHEMA,
        "is_partial": is_partial,
        "started": {"unix_s": 1.7e9, "model_s": 0.0},
        **measured,
        "settings": {"model": "m", "speed": 1.0, "concurrency": concurrency, "max_input_tokens": None},
        "trace": {**trace, "truncated_prompts": 0, "dropped_prompts": 0},
    }
    return LoadRun(summary, tuple(results))


def planner_run(*samples, start_ups=(), **config):
    """Return what a ledger says; a sample is (time, prefill ready, prefill starting)."""
    held = tuple(
        Pull(at_s, {P: PoolCounts(ready, starting, 0, 1), D: PoolCounts(1, 0, 0, 1)}, NO_WORKERS, None)
        for at_s, ready, starting in samples or [(0.0, 1, 0)]
    )
    return PlannerRun(
        DecideConfig(**{"max_gpu_budget": 6, **config}), held, end_s=100.0, start_ups_s=start_ups
    )


def report_of(results=(), planner=None, gpu_hours=None, **load):
    """Return a report of a run, with a planner's ledger where one is given."""
    run = load_of(results, **load) if results else LoadRun({}, ())
    use = None if gpu_hours is None else GpuUse(0.0, DURATION_S, gpu_hours, 1.0, 0.1, 5, 6)
    return RunReport(run, planner, use, violations(run.results, ttft_target_s=None, itl_target_s=None))


def gpus_of(outcome):
    """Return the GPUs of a fixed fleet, one each replica."""
    return sum(int(part[0]) for part in outcome.name.split("+"))


# -- the comparison -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared():
    """95% in time, on every fleet that is worth trying."""
    return compare(report_of(results_of(120, late=6)), GRAPH)


def test_the_first_row_is_what_happened_and_alone_is_measured(compared):
    """A reader can tell measured from simulated."""
    served, *others = compared.outcomes

    assert (served.name, served.source, served.in_time) == ("as served", "measured", 0.95)
    assert served.gpu_hours is None
    assert {each.source for each in others} == {"simulated"}
    assert [each.name for each in others if each.name == "hpa"] == ["hpa"]


def test_the_cheapest_fixed_fleet_is_as_good_and_nothing_smaller_is(compared):
    """Every smaller fleet was tried and found wanting; an oracle, which could keep that fleet, costs no more."""
    chosen = next(each for each in compared.outcomes if "cheapest" in each.remark)
    oracle = next(each for each in compared.outcomes if each.name == "oracle")
    smaller = [each for each in compared.fixed if gpus_of(each) < gpus_of(chosen)]

    assert min(chosen.in_time, oracle.in_time) >= compared.served.in_time
    assert oracle.gpu_hours <= chosen.gpu_hours
    assert (compared.equal.name, compared.is_complete) == (chosen.name, True)
    assert smaller
    assert all(each.in_time < compared.served.in_time for each in smaller)


def test_where_no_fleet_serves_as_well_the_best_is_shown_as_such():
    """Nothing is passed off as equal: every request was served in a moment, which no such fleet can."""
    results = [replace(result_of(line, ttft_s=0.001), output_tokens=20) for line in range(1, 241)]
    crowd = [replace(each, sent_s=each.sent_s / 40) for each in results]

    found = compare(report_of(crowd), GRAPH)

    shown = [each for each in found.outcomes if each.name[0].isdigit()]
    assert [each.remark for each in shown] == ["the best fixed fleet tried; none served as well"]
    assert found.equal is None
    assert shown[0].in_time == max(each.in_time for each in found.fixed)


def test_the_planner_is_there_twice_and_the_best_fleet_that_costs_no_more_is_shown():
    """Measured and simulated side by side; three GPUs for the whole run cost less than 3.9 on average, and four more."""
    run = planner_run(mode=Mode.ADAPTIVE, max_gpu_budget=5)

    found = compare(report_of(results_of(60), run, 3.9 * DURATION_S / 3600), GRAPH)

    assert [(each.name, each.source) for each in found.outcomes[:3]] == [
        ("adaptive", "measured"),
        ("adaptive", "simulated"),
        ("hpa", "simulated"),
    ]
    assert gpus_of(next(each for each in found.outcomes if "no more GPU-hours" in each.remark)) == 3


def test_a_distorted_run_is_not_what_others_are_held_against():
    """Lag made half of the requests late; a fleet that would be late as often is not called as good."""
    run = planner_run(mode=Mode.ADAPTIVE, max_gpu_budget=5)

    found = compare(report_of(results_of(60, late=30), run, 0.05, is_distorted=True), GRAPH)

    chosen = next(each for each in found.outcomes if "serves as well" in each.remark)
    assert chosen.in_time >= found.outcomes[1].in_time > found.served.in_time
    assert any("held against adaptive as it was simulated" in note for note in found.notes)


def test_the_work_is_bounded_and_says_so():
    """One fixed fleet, too small, and a note that it was not all; the oracle is there all the same."""
    found = compare(report_of(results_of(30)), GRAPH, max_fleets=1)

    assert any(note.startswith("the search ended after 1 fixed fleets") for note in found.notes)
    assert not found.is_complete
    assert len(found.fixed) == 1
    assert found.outcomes[-1].name == "oracle"


def test_an_oracle_costs_no_more_than_what_was_served_as_well():
    """The run held next to nothing, less than any simulated fleet can: the oracle is said to do what it did."""
    run = planner_run(mode=Mode.ADAPTIVE, max_gpu_budget=2)

    found = compare(report_of(results_of(20), run, 0.001), GRAPH, max_fleets=1)

    oracle = found.outcomes[-1]
    assert (oracle.name, oracle.gpu_hours, oracle.source) == ("oracle", 0.001, "measured")
    assert "no cheaper schedule was found" in oracle.remark


def test_the_same_run_gives_the_same_comparison():
    """Nothing depends on the machine or on how long it takes."""
    report = report_of(results_of(40, late=2))

    first, second = (compare(report, GRAPH, max_fleets=2) for _ in range(2))

    assert first == second


# -- the traffic ----------------------------------------------------------------------------------------


def test_the_traffic_is_what_was_sent_in_its_order():
    """Late sending, answers shorter than asked for, rejected requests, tiers and shared prefixes are all kept."""
    shared = tuple(range(24))
    late = replace(result_of(1, ids=shared), sent_s=3.0, output_tokens=7, tier=Tier.BACKGROUND)
    refused = result_of(2, status=RequestStatus.REJECTED, ids=shared)

    first, second = recorded_traffic(load_of([late, refused]))

    assert (first.line, first.arrival_s, first.output_tokens, first.block_ids) == (2, 1.01, 20, shared)
    assert (second.line, second.arrival_s, second.output_tokens) == (1, 3.0, 7)
    assert (first.tier, second.tier) == (None, Tier.BACKGROUND)


@pytest.mark.parametrize(
    ("load", "missing"),
    [
        (load_of([]), "holds no request"),
        (load_of([result_of(1)], is_partial=True), "stopped early"),
        (load_of([result_of(1)], concurrency=4), "at most 4 requests in flight"),
        (load_of([replace(result_of(1), block_ids=None)]), "lacks block_ids"),
    ],
    ids=["empty", "partial", "closed loop", "older log"],
)
def test_a_log_that_does_not_hold_what_came_says_what_is_missing(load, missing):
    """Another fleet is never judged by traffic that it would not have met."""
    with pytest.raises(ConfigError, match=missing):
        recorded_traffic(load)


@pytest.fixture
def run_report(tmp_path):
    """Return a function that writes a run, and gives what `penstock report --manifest --json` says of it."""
    manifest = tmp_path / "graph.yaml"
    manifest.write_bytes(orjson.dumps(GRAPH.model_dump(mode="json", by_alias=True, exclude_unset=True)))

    def run(load):
        with ResultWriter(tmp_path / "run") as writer:
            for result in load.results:
                writer.write(result)
            writer.finish(load.summary)
        paths = {"--run": tmp_path / "run", "--manifest": manifest, "--output": tmp_path / "out"}
        arguments = [str(word) for option in paths.items() for word in option]
        ended = CliRunner().invoke(report_command, [*arguments, "--json"])
        assert ended.exit_code == 0, ended.output
        return orjson.loads(ended.stdout), (tmp_path / "out" / "report.html").read_text()

    return run


def test_the_report_shows_other_fleets_side_by_side(run_report):
    """JSON, picture and page hold them; the SLO of the graph is the target."""
    found, page = run_report(load_of([result_of(line) for line in range(1, 61)]))

    names = [each["name"] for each in found["counterfactual"]["outcomes"]]
    assert names[0] == "as served"
    assert "oracle" in names
    assert any(file.endswith("counterfactual.png") for file in found["files"])
    assert found["violations"]["ttft_target_s"] == 5.0
    assert "The same traffic on other fleets" in page
    assert "would have cost" in page


def test_a_report_without_a_usable_log_is_made_and_says_what_is_missing(run_report):
    """Everything else is still there."""
    found, page = run_report(load_of(results_of(4), concurrency=2))

    assert found["counterfactual"] is None
    assert any("at most 2 requests in flight" in note for note in found["notes"])
    assert "at most 2 requests in flight" in page


# -- the setting ----------------------------------------------------------------------------------------


def test_the_simulation_begins_as_the_run_did():
    """What was ready or starting when the first request was sent, not what the graph asks for."""
    run = planner_run((-20, 1, 0), (-1, 2, 1), (5, 4, 0))

    base = setting_of(report_of(planner=run), GRAPH).base

    assert [(pool.role, pool.replicas) for pool in base.pools] == [(P, 3), (D, 1)]


@pytest.mark.parametrize(
    ("start_ups", "cold_start_s", "note"),
    [
        ((10.0, 14.0), 12.0, "replicas start in 12.0 s, the mean of 2 in the ledger"),
        ((), 30.0, "replicas are assumed to start in 30 s; the ledger saw none start"),
    ],
)
def test_replicas_start_as_fast_as_they_were_seen_to(start_ups, cold_start_s, note):
    """The ledger's mean, and where it saw none, an assumption that is said to be one."""
    setting = setting_of(report_of(planner=planner_run(start_ups=start_ups)), GRAPH)

    assert (setting.base.cold_start_s, setting.notes) == (cold_start_s, (note,))


def test_the_ledgers_planner_is_simulated_and_may_act():
    """Its own settings, the graph's SLO; one that only observed is let loose."""
    run = planner_run(mode=Mode.LOAD, queue_up=0.7, no_operation=True)

    setting = setting_of(report_of(planner=run), graph_of(ttft="3s"))

    assert (setting.planner.mode, setting.planner.queue_up) == (Mode.LOAD, 0.7)
    assert not setting.planner.no_operation
    assert (setting.planner.ttft_slo_s, setting.base.slo.ttft_seconds) == (3, 3)
    assert setting.has_ledger


def requests_at(rps):
    """Return a hundred requests of 8,000 tokens."""
    return [TraceRequest(place / rps, 8000, 10, None, place + 1) for place in range(100)]


def test_fleets_come_by_what_they_hold_within_the_budget():
    """Prefill replicas of two GPUs: every fleet inside six, the cheapest first, the best split of a size first."""
    setting = setting_of(report_of(), graph_of(budget=6, prefill_gpus=2))

    sizes = setting.fleets(requests_at(0.5))

    assert list(sizes) == [3, 4, 5, 6]
    assert sizes[5] == [(2, 1), (1, 3)]
    assert all(setting.gpus_of(fleet) == gpus for gpus, fleets in sizes.items() for fleet in fleets)
    assert setting.name_of((2, 1)) == "2P+1D"


def test_hopeless_fleets_and_odd_splits_are_not_tried():
    """Nothing below half of what the load needs; of a large size the splits next to that need."""
    setting = setting_of(report_of(), graph_of(ttft="3s"))
    large = replace(setting, base=replace(setting.base, max_gpus=40))

    sizes = large.fleets(requests_at(20))

    assert min(sizes) >= 5
    assert max(sizes) == 40
    assert all(len(fleets) <= MOST_SPLITS for fleets in sizes.values())
