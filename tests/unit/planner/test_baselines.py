"""Other autoscalers against the examples of their own documents and tests."""

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock_baselines import dynamo, kpa
from penstock_baselines.dynamo_throughput import IntervalLoad

from penstock.api import Role
from penstock.performance.profile import DecodeTable, PerformanceProfile, PrefillTable
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import DecideConfig, Mode, config_from
from penstock_planner.decide.decision import Action, Reason
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, WorkerSummary
from penstock_planner.decide.demand.reading import Quality, Reading, missing
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.policies.baselines import hpa
from penstock_planner.decide.policies.baselines.oracle import OracleParameters
from penstock_planner.decide.state import PlannerState

FRESH = {"age_s": 0.0, "source": "test"}


def pull(at_s=15.0, *, prefill=2, decode=2, starting=0, kv=0.5, queue=0.0, demand=None):
    """One pull of a split graph; ``kv`` is each decode worker's, None unknown."""
    known = 0 if kv is None else decode
    reading = missing("gone", source="none") if queue is None else Reading(Quality.FRESH, queue, **FRESH)
    return Pull(
        at_s,
        {Role.PREFILL: PoolCounts(prefill, starting, gpus=1), Role.DECODE: PoolCounts(decode, gpus=1)},
        WorkerSummary((kv or 0.0) * known, known, decode - known, 0.0, "test"),
        reading,
        demand,
        WorkerSummary(0.0, decode, 0, 0.0, "test"),
    )


def desired(mode, *pulls, budget=64):
    """Return the replicas of each role after one decision per pull, memory carried on."""
    config = DecideConfig(max_gpu_budget=budget).in_mode(mode)
    state = PlannerState()
    for each in pulls:
        decision, state = decide(Window(each.at_s - 1, each.at_s, (each,)), state, config)
    return {role.role: role.desired for role in decision.roles}


# -- HPA --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "current", "expected"),
    [
        # The documentation: twice the target doubles, half of it halves, within 10% nothing happens.
        ((2 * 200.0, 2, 0, 0, 100.0), 2, 4),
        ((2 * 50.0, 2, 0, 0, 100.0), 2, 1),
        ((2 * 109.0, 2, 0, 0, 100.0), 2, 2),
        ((2 * 91.0, 2, 0, 0, 100.0), 2, 2),
        # replica_calculator_test.go: ScaleUpCM, ScaleDownCM, ScaleUpUnreadyLessScale.
        ((20.0 + 10 + 30, 3, 0, 0, 15.0), 3, 4),
        ((5 * 12.0, 5, 0, 0, 20.0), 5, 3),
        ((500.0 + 700, 2, 0, 1, 300.0), 3, 4),
        # ScaleUpUnreadyNoScale: what is not ready counts as 0, and then nothing is missing.
        ((900.0, 1, 0, 2, 600.0), 3, 3),
        # By the same rules: the one that is silent counts as 0 on the way up, as on target on the way down.
        ((1000.0, 1, 1, 0, 400.0), 2, 3),
        ((100.0 + 100, 2, 2, 0, 400.0), 4, 3),
        # 1.2 times the target over what is known, 0.6 once the silent half counts as 0: nothing changes.
        ((1.2, 1, 1, 0, 1.0), 2, 2),
        ((0.0, 0, 3, 0, 1.0), 3, None),
    ],
)
def test_hpa_pod_metrics(metric, current, expected):
    """The ratio, the tolerance, missing and unready pods: total, reported, missing, unready, target."""
    assert hpa.pods_desired(hpa.PodMetric(*metric), current) == expected


@pytest.mark.parametrize(("total", "current", "expected"), [(12.0, 2, 4), (13.0, 4, 4), (0.0, 4, 0)])
def test_hpa_external_metrics_are_totals_over_a_target_per_replica(total, current, expected):
    """A target of 3 each; within 10% of what 4 are to carry, 4 stay."""
    assert hpa.external_desired(total, 3.0, current) == expected


@pytest.mark.parametrize(
    ("numbers", "current", "expected"),
    [([3, 5], 4, 5), ([None, 5], 4, 5), ([None, 3], 4, None), ([None, None], 4, None)],
)
def test_hpa_takes_the_largest_and_never_shrinks_on_half_the_metrics(numbers, current, expected):
    """One metric that cannot be had forbids the way down only."""
    assert hpa.combined(numbers, current) == expected


def test_hpa_shrinks_to_the_largest_number_of_five_minutes():
    """8, then 2 for 5 minutes: 8 until its recommendation is 300 s old, then 2."""
    kept = ()
    seen = []
    for at_s in range(0, 330, 15):
        chosen, kept = hpa.recommend(8 if at_s == 0 else 2, 8, float(at_s), kept)
        seen.append(chosen)

    assert seen == [8] * 20 + [2, 2]


def test_hpa_starts_from_what_is_there():
    """After a restart the first recommendation is the current number, so nothing shrinks for 300 s."""
    chosen, kept = hpa.recommend(1, 6, 1000.0, ())

    assert chosen == 6
    assert hpa.recommend(1, 6, 1299.0, kept)[0] == 6
    assert hpa.recommend(1, 6, 1301.0, kept)[0] == 1


@pytest.mark.parametrize(("current", "expected"), [(1, 5), (2, 6), (4, 8), (10, 20)])
def test_hpa_grows_by_four_or_twofold_at_once(current, expected):
    """The default policy on the way up, whichever is more."""
    assert hpa.stabilised(100, current, [current]) == expected


@given(st.integers(0, 50), st.integers(1, 50), st.lists(st.integers(0, 50), max_size=20))
def test_hpa_stabilisation_never_turns_a_direction(number, current, recent):
    """A number below the current one never grows, one above it never shrinks."""
    chosen = hpa.stabilised(number, current, recent)

    assert chosen <= current if number < current else chosen >= current


def test_hpa_moves_by_more_than_one_inside_the_budget():
    """A queue of 20 on 2 replicas: 6 at once; with 7 GPUs in all, 5."""
    assert desired(Mode.HPA, pull(queue=20.0))[Role.PREFILL] == 6
    assert desired(Mode.HPA, pull(queue=20.0), budget=7)[Role.PREFILL] == 5


# -- KEDA -------------------------------------------------------------------------------------------


def test_keda_scales_on_work_in_flight_and_on_the_sum_of_kv():
    """84,000 tokens are 8.4 s of work at 4.2 s each: 2 become 2; four times that: 6 by the HPA's rate. 3 x 0.8 keeps 3."""
    demand = Demand(1.0, arrivals=2, prompt_tokens=16_000, uncached_tokens=16_000, waiting_tokens=84_000.0)
    busy = replace(demand, waiting_tokens=336_000.0)

    assert desired("keda", pull(demand=demand, kv=0.8)) == {Role.PREFILL: 2, Role.DECODE: 2}
    assert desired("keda", pull(demand=busy, kv=1.0)) == {Role.PREFILL: 6, Role.DECODE: 3}


def test_keda_takes_a_query_without_a_result_for_nothing():
    """Its default, and the complaint about it: five minutes without metrics end at the floor, at any load."""
    blind = [pull(15.0 * i, prefill=4, decode=4, kv=None, queue=None) for i in range(1, 24)]

    assert desired("keda", *blind) == {Role.PREFILL: 1, Role.DECODE: 1}


def test_keda_by_latencies_multiplies_the_fleet_by_the_worst_tenth_against_its_target():
    """TTFT at twice its target in a fifth of the requests doubles prefill, in a twentieth it changes nothing; ITL likewise."""
    slow = Demand(1.0, ttft_sum_s=20.0, ttft_count=2, itl_sum_s=6.0, itl_count=60)
    quick = Demand(1.0, ttft_sum_s=4.0, ttft_count=8, itl_sum_s=3.0, itl_count=60)
    many = replace(quick, ttft_sum_s=5.0 * 38, ttft_count=38, itl_sum_s=0.05 * 1200, itl_count=1200)

    assert desired("keda-latency", pull(at_s=14.0, demand=quick), pull(demand=slow)) == {
        Role.PREFILL: 4,
        Role.DECODE: 4,
    }
    assert desired("keda-latency", pull(at_s=14.0, demand=many), pull(demand=slow)) == {
        Role.PREFILL: 2,
        Role.DECODE: 2,
    }
    idle = [pull(15.0 * i, prefill=4, decode=4, demand=Demand(1.0)) for i in range(1, 24)]
    assert desired("keda-latency", *idle) == {Role.PREFILL: 1, Role.DECODE: 1}


# -- KPA --------------------------------------------------------------------------------------------


def test_kpa_stable_mode():
    """Total over target, as in autoscaler_test.go: 50 at 10 want 5, 100 want 10, none wants half of what is there."""
    calm = kpa.Panic()

    def scaled(stable, ready):
        return kpa.scaled(stable, stable, target=10.0, ready=ready, now_s=0.0, memory=calm)[0]

    assert [scaled(50.0, 5), scaled(100.0, 10), scaled(0.0, 10), scaled(1.0, 1)] == [5, 10, 5, 1]


def test_kpa_panics_at_twice_the_capacity_and_holds_what_it_reached():
    """25 wanted on 10: at once; then no decrease until 60 s after the last crossing."""
    reached, memory = kpa.scaled(100.0, 250.0, target=10.0, ready=10, now_s=0.0, memory=kpa.Panic())
    during, memory = kpa.scaled(100.0, 100.0, target=10.0, ready=25, now_s=59.0, memory=memory)
    after, memory = kpa.scaled(100.0, 100.0, target=10.0, ready=25, now_s=61.0, memory=memory)

    assert (reached, during, after) == (25, 25, 12)
    assert memory == kpa.Panic()
    blind = kpa.Panic(3.0, 7)  # without data neither pods nor memory change
    assert kpa.scaled(None, None, target=1.0, ready=4, now_s=9.0, memory=blind) == (None, blind)


# -- Dynamo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "ready", "expected"),
    [(1.0, 1, 1), (0.99, 1, 0), (0.1, 3, 0), (0.05, 3, -1), (0.05, 1, 0), (3.0, 4, 1)],
)
def test_dynamo_prefill_thresholds(contexts, ready, expected):
    """Up at one context length queued, down below a tenth, never from the last engine."""
    assert dynamo.prefill_change(contexts, ready) == expected


@pytest.mark.parametrize(
    ("fraction", "ready", "expected"),
    [(1.01, 2, 1), (1.0, 2, 0), (0.6, 4, 0), (0.59, 4, -1), (0.55, 2, 0), (0.45, 2, -1)],
)
def test_dynamo_decode_thresholds_and_guard(fraction, ready, expected):
    """Up above a full cache, down below 0.6, refused where one engine fewer would be full: 0.55 x 2."""
    assert dynamo.decode_change(fraction, ready) == expected


def test_dynamo_waits_for_a_starting_engine_and_drops_it_after_two_looks():
    """Idle while one starts: held once, dropped at the second agreeing observation; without iteration events held."""
    assert desired("dynamo-load", pull(kv=None)) == {Role.PREFILL: 2, Role.DECODE: 2}
    idle = [pull(5.0 * i, prefill=2, starting=1, demand=Demand(5.0)) for i in (1, 2)]

    assert desired("dynamo-load", idle[0])[Role.PREFILL] == 3
    assert desired("dynamo-load", *idle)[Role.PREFILL] == 2


# -- Dynamo's throughput loop -----------------------------------------------------------------------

LENGTHS = {"prompt_tokens": 3000.0, "output_tokens": 150.0, "ttft_s": 0.08, "itl_s": 0.01}
TABLES = PerformanceProfile(
    PrefillTable((1000.0, 3000.0, 5000.0), (0.025, 0.075, 0.15)),
    DecodeTable(
        (1000.0, 3000.0),
        (0.25, 0.5, 1.0),
        ((0.005, 0.01, 0.02), (0.004, 0.008, 0.016)),
        ((1000.0, 1500.0, 2000.0), (500.0, 750.0, 1000.0)),
        kv_tokens=100_000.0,
    ),
)


def load(requests, interval_s=60.0, **changes):
    """The load of Dynamo's own tests: 3,000 prompt tokens, 150 of the answer."""
    return IntervalLoad(requests / interval_s, **{**LENGTHS, **changes})


def throughput_decision(demand, **options):
    """Decide once on an interval of 180 s."""
    config = DecideConfig(max_gpu_budget=64).in_mode("dynamo-throughput")
    config = replace(config, performance=TABLES, itl_slo_s=0.01)
    seen = pull(180.0, demand=demand, **options)
    decision, _ = decide(Window(0.0, 180.0, (seen,)), PlannerState(), config)
    return {role.role: role.desired for role in decision.roles}


def test_dynamo_throughput_decides_on_the_interval_it_has_seen():
    """50/s of 3,000/100: 150,000 tokens/s of 40,000 want 4; 5,000 tokens/s at the corrected ITL want 10."""
    demand = Demand(
        180.0,
        arrivals=9000,
        prompt_tokens=9000 * 3000,
        completed=9000,
        output_tokens=9000 * 100,
        ttft_sum_s=9000 * 0.2,
        ttft_count=9000,
        # Concurrency is beyond the tables, so the profile's 0.016 s stands against the observed: a factor of 1.
        itl_sum_s=900_000 * 0.016,
        itl_count=900_000,
    )

    # 0.01 s at a context of 3,050 (as 3,000) fits KV 0.5: 750 tokens/s; 5,000 / 750 want 7.
    assert throughput_decision(demand) == {Role.PREFILL: 4, Role.DECODE: 7}
    # Twice the profile's ITL halves the target: 0.005 s fits KV 0.25, 500 tokens/s, so 10.
    slow = replace(demand, itl_sum_s=900_000 * 0.032)
    assert throughput_decision(slow) == {Role.PREFILL: 4, Role.DECODE: 10}
    # Ten times the load would want 38 and 67; a decision moves eight at most.
    busy = replace(demand, arrivals=90_000, prompt_tokens=90_000 * 3000)
    assert throughput_decision(busy) == {Role.PREFILL: 10, Role.DECODE: 10}


@pytest.mark.parametrize("demand", [None, Demand(180.0), Demand(180.0, arrivals=9, prompt_tokens=9000)])
def test_dynamo_throughput_without_a_finished_request_holds(demand):
    """As its metrics are NaN then."""
    assert throughput_decision(demand) == {Role.PREFILL: 2, Role.DECODE: 2}


def test_a_profile_and_a_schedule_survive_the_ledger():
    """Plain data and back."""
    schedule = {Role.PREFILL: ((0.0, 2), (5.0, 3))}
    config = DecideConfig(mode=Mode.ORACLE, performance=TABLES, parameters=OracleParameters(schedule))

    assert config_from(orjson.loads(orjson.dumps(to_plain(config)))) == config


# -- all --------------------------------------------------------------------------------------------

RIVALS = (Mode.HPA, "hpa-rate", "hpa-running", "keda", "keda-latency", "kpa", "dynamo-load", "static")


@pytest.mark.parametrize("mode", RIVALS)
def test_every_policy_restores_a_floor(mode):
    """Below its floor a role grows at once, whatever the metrics say."""
    config = replace(DecideConfig(min_gpu_budget=2).in_mode(mode), adjustment_interval_s=15.0)
    seen = pull(prefill=1, kv=None, queue=None)

    decision, _ = decide(Window(0.0, 15.0, (seen,)), PlannerState(), config)

    prefill = next(role for role in decision.roles if role.role is Role.PREFILL)
    assert (prefill.desired, prefill.action, prefill.reason) == (2, Action.UP, Reason.BELOW_FLOOR)


@pytest.mark.parametrize("mode", RIVALS)
@given(kv=st.floats(0, 1), queue=st.floats(0, 500), budget=st.integers(4, 12))
def test_no_policy_exceeds_the_budget(mode, kv, queue, budget):
    """Whatever is asked for, existing and added GPUs fit."""
    demand = Demand(1.0, waiting=queue, waiting_tokens=queue * 8000, in_flight={Role.PREFILL: queue})

    result = desired(mode, pull(kv=kv, queue=queue, demand=demand), budget=budget)

    assert sum(max(2, replicas) for replicas in result.values()) <= budget
