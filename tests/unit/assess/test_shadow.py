"""The shadow fleet, its queue, and the demand that engines' counters give."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import orjson
import pytest
from requests import ConnectionError as NoConnection

from penstock.api import Role, SloConfig
from penstock.assess.engine_metrics import VLLM
from penstock.assess.history import PrometheusHistory
from penstock.assess.reading import Subject
from penstock.assess.shadow.backend import ShadowBackend
from penstock.assess.shadow.comparison import load_history
from penstock.assess.shadow.counters import Counts, Lengths, counter_names, counts_of, interval_of
from penstock.assess.shadow.fleet import Queue, ShadowFleet, shadow_queue
from penstock.assess.shadow.reader import WorldState, open_reader
from penstock.assess.shadow.record import ShadowRecord
from penstock.assess.shadow.report import ShadowReport, as_plain, headline, render_page, rows
from penstock.assess.shadow.watched import WatchedPool, watched_pools
from penstock.core.errors import ClusterError, ConfigError, ObservationError
from penstock_planner.core.records import anchor_position, header_record, pull_record
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Action, Decision, Reason, RoleDecision
from penstock_planner.decide.demand.observation import PoolCounts, Pull, WorkerSummary
from penstock_planner.decide.state import PlannerState
from penstock_planner.sources.base import Query

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
HISTOGRAMS = (*VLLM.ttft, *VLLM.prompt_tokens, *VLLM.answer_tokens, VLLM.gap[0])
KNOWN = frozenset(
    {f"{each}_{part}" for each in HISTOGRAMS for part in ("sum", "count", "bucket")}
    | {VLLM.running[0], VLLM.waiting[0], VLLM.kv_usage[0], *VLLM.cache_tokens[0]}
)
NAMES = counter_names(VLLM, KNOWN)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["vllm"], {A: WatchedPool(A, "vllm")}),
        (["prod/vllm"], {A: WatchedPool(A, "vllm", "prod")}),
        (["{}"], {A: WatchedPool(A)}),
        (
            ['prefill={job="p",zone=~"a,b"}', 'decode={job="d"}'],
            {
                P: WatchedPool(P, matchers=('job="p"', 'zone=~"a,b"')),
                D: WatchedPool(D, matchers=('job="d"',)),
            },
        ),
        (
            ["prefill=p", "decode=prod/d"],
            {
                P: WatchedPool(P, "p", None, ('pod=~"p-[a-z0-9]+-[a-z0-9]+"',)),
                D: WatchedPool(D, "d", "prod", ('pod=~"d-[a-z0-9]+-[a-z0-9]+"',)),
            },
        ),
    ],
)
def test_a_watched_fleet_is_named_by_deployment_or_matchers(given, expected):
    """Without a role it is aggregated; of two Deployments each has the series of its own pods."""
    assert watched_pools(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["Bad Name"], r"--shadow Bad Name: must be \[ROLE=\]\[NAMESPACE/\]DEPLOYMENT"),
        (["a", "b"], "--shadow b: aggregated is watched already, as aggregated=a"),
        (["prefill=a"], "--shadow: decode is missing"),
        (["decode=a"], "--shadow: prefill is missing"),
        (["decode=a", "b"], "exclude each other"),
    ],
)
def test_what_cannot_be_watched_is_refused(given, said):
    """One sentence names the value and the remedy."""
    with pytest.raises(ConfigError, match=said):
        watched_pools(given)


def test_the_shadow_fleet_begins_as_the_watched_one_and_then_follows_decisions():
    """New replicas are ready after the start-up time; replicas that are ready last are removed first."""
    fleet = ShadowFleet(60.0, {A: 2}).begun({A: PoolCounts(2, 1)}, 0.0)
    assert fleet.pools(0.0) == {A: PoolCounts(2, 1, gpus=2)}
    grown = fleet.scaled(A, 5, 10.0)
    assert grown.pools(60.0) == {A: PoolCounts(3, 2, gpus=2)}
    assert grown.pools(70.0) == {A: PoolCounts(5, 0, gpus=2)}
    assert grown.scaled(A, 3, 65.0).pools(70.0) == {A: PoolCounts(3, 0, gpus=2)}
    assert [each.name for each in fleet.endpoints(0.0)] == ["shadow-aggregated-0", "shadow-aggregated-1"]


@pytest.mark.parametrize(
    ("shadow_ready", "expected"),
    [
        (1, Queue(10.0, 1000.0)),  # fewer workers: the watched queue, not a longer one that nobody measured
        (2, Queue(10.0, 1000.0)),
        (4, Queue(8.0, 800.0)),  # 8 + 8 - 4 * 4/2
        (100, Queue(0.0, 0.0)),
    ],
)
def test_the_queue_shrinks_by_what_more_workers_would_have_computed(shadow_ready, expected):
    """At the rate for each worker that was measured; it is never longer than the watched queue."""
    found = shadow_queue(
        Queue(8.0, 800.0),
        Queue(10.0, 1000.0),
        arrived=Queue(8.0, 800.0),
        computed=Queue(4.0, 400.0),
        shadow_ready=shadow_ready,
        watched_ready=2,
    )
    assert found == expected


def counts(at_s, scale, *, processes=("a:1", "b:1"), waiting=0.0, kv=0.25):
    """Return a reading in which each process has counted ``scale`` requests of 1000 and 100 tokens, half of them cached."""
    each = {
        NAMES.first_tokens: scale, NAMES.ttft_s: 0.5 * scale, NAMES.prompts: scale,
        NAMES.prompt_tokens: 1000.0 * scale, NAMES.answer_tokens: 100.0 * scale, NAMES.gaps: 99.0 * scale,
        NAMES.gap_s: 2.0 * scale, NAMES.running: 3.0, NAMES.waiting: waiting, NAMES.kv_usage: kv,
        NAMES.cache[0]: 1000.0 * scale, NAMES.cache[1]: 500.0 * scale,
    }  # fmt: skip
    samples = [
        ({"__name__": name, "instance": process, "engine": "0"}, value)
        for process in processes
        for name, value in each.items()
    ]
    return counts_of(samples, [({"instance": process, "engine": "0"}, at_s) for process in processes])


def test_a_restart_loses_nothing_and_two_scrape_jobs_of_one_page_count_once():
    """A counter that fell has begun at zero; the same process in two jobs is one."""
    before = counts_of([({"__name__": "x", "instance": "a"}, 10.0)], [({"instance": "a"}, 0.0)])
    labels = {"__name__": "x", "instance": "a"}
    after = counts_of(
        [({**labels, "job": "1"}, 3.0), ({**labels, "job": "2"}, 4.0)], [({"instance": "a"}, 1.0)]
    )
    assert after.processes("x") == 1
    assert after.gained(before, "x") == 4.0


def test_an_interval_counts_arrivals_as_first_tokens_and_growth_of_the_queue():
    """Requests whose prompt is being computed follow from TTFT less those that waited, by Little's law."""
    found = interval_of(counts(0.0, 10.0), counts(10.0, 20.0, waiting=1.0), NAMES, speed=2.0)
    assert (found.period_s, found.first_tokens, found.arrivals) == (20.0, 20.0, 22.0)
    assert found.prefilling == 0.0  # 10 s of TTFT in 20 s are half a request, and one waited on average
    assert interval_of(counts(0.0, 10.0), counts(10.0, 20.0), NAMES, speed=1.0).prefilling == 1.0
    assert Lengths().followed(counts(0.0, 10.0), counts(10.0, 20.0), NAMES, 10.0).uncached == 500.0


def test_a_runtime_without_kv_usage_is_refused():
    """Dynamo's frontend, for example, does not export it."""
    with pytest.raises(ObservationError, match=r"vllm has no KV usage .vllm:kv_cache_usage_perc"):
        counter_names(VLLM, KNOWN - set(VLLM.kv_usage))


class Reader:
    """Returns readings in turn."""

    names = NAMES

    def __init__(self, *worlds):
        self.worlds = list(worlds)

    async def read(self):
        """Return the next."""
        return self.worlds.pop(0)


def world(found: Counts, replicas=2):
    """Return a reading of a fleet of aggregated workers."""
    return WorldState({A: found}, {A: PoolCounts(replicas)})


def test_the_planner_sees_its_own_fleet_under_the_measured_load():
    """KV usage is spread over the shadow's workers; arrivals are as measured; latencies are not passed on; writing is refused."""
    now = [0.0]
    reader = Reader(world(counts(0.0, 10.0)), world(counts(10.0, 20.0)), world(counts(10.0, 20.0)))
    backend = ShadowBackend(reader, ShadowFleet(5.0, {A: 1}), now_s=lambda: now[0], speed=1.0)

    async def tick():
        state = await backend.observe()
        return state, await backend.read(Query(state.endpoints, 30.0))

    state, first = asyncio.run(tick())
    assert (state.pools, state.watched) == ({A: PoolCounts(2, gpus=1)},) * 2
    assert first.demand is None
    role = RoleDecision(A, 2, 4, Action.UP, Reason.DEMAND_ABOVE_CAPACITY, "", ())
    backend.decided(Decision("d1", 0.0, no_operation=True, roles=(role,), gpus=2, gpus_after=4, max_gpu_budget=None), View(0.0))  # fmt: skip
    now[0] = 10.0
    state, second = asyncio.run(tick())
    assert state.pools[A].ready == 4
    assert state.watched == {A: PoolCounts(2, gpus=1)}
    assert {each.value for each in second.kv.values()} == {0.125}
    demand = second.demand
    assert (demand.period_s, demand.arrivals, demand.uncached_tokens) == (10.0, 20.0, 10_000.0)
    assert demand.prefilling_workers == pytest.approx(2 * (1 - math.exp(-0.5)))
    assert demand.ttft_late is None
    assert second.latency == {}
    now[0] = 15.0
    assert (
        asyncio.run(tick())[1].demand.arrivals == 10.0
    )  # the same scrape again: its rate, for the time that passed
    with pytest.raises(ClusterError, match="a shadow planner scales nothing"):
        asyncio.run(backend.scale(A, 3, decision_id="d1"))


class View:
    """The part of a planner's view that the backend reads."""

    def __init__(self, at_s):
        self.at_s = at_s


class Server:
    """Answers instant queries as a Prometheus with one vLLM whose newest sample is ``age_s`` old."""

    url = "http://prometheus.example:9090"

    def __init__(self, *, age_s=3.0, replicas=(("kube_deployment_status_replicas_ready", 2), ("kube_deployment_status_replicas", 3)), error=None):  # fmt: skip
        self.age_s, self.replicas, self.error = age_s, replicas, error

    def get_label_values(self, label, params):
        """Return the names or the models."""
        if self.error is not None:
            raise self.error
        is_known = 'model_name="llama"' in " ".join(params["match[]"])
        return {"__name__": sorted(KNOWN) if is_known else [], "model_name": ["llama"]}.get(label, [])

    def custom_query(self, query, params=None):
        """Return series, times or replicas."""
        labels = {"instance": "10.0.0.1:8000", "engine": "0"}
        if "kube_deployment" in query:
            return [self._sample({"__name__": name}, value) for name, value in self.replicas]
        if query.endswith("[5m]"):
            return [{"metric": labels, "values": [[100.0, "0"], [110.0, "0"], [120.0, "0"]]}]
        if query.startswith("timestamp"):
            return [self._sample(labels, 1000.0 - self.age_s)]
        return [self._sample({**labels, "__name__": name}, 1.0) for name in NAMES.all]

    def _sample(self, labels, value):
        return {"metric": labels, "value": [1000.0, str(value)]}


def opened(server, *, model="llama", shadow="prod/vllm"):
    """Open a reader of the server and read it once more."""
    history = PrometheusHistory(server, setting="--prometheus-url")
    subject = Subject(model, setting="--served-model-name")

    async def both():
        reader = await open_reader(history, subject, watched_pools([shadow]), kube=None)
        return reader.scrape_s, await reader.read()

    return asyncio.run(both())


def test_replicas_are_those_of_kube_state_metrics_or_the_scraped_processes():
    """Replicas that are not ready count as starting; scraped processes are ready."""
    scrape_s, found = opened(Server())
    assert (scrape_s, found.replicas) == (10.0, {A: PoolCounts(2, 1)})
    assert opened(Server(replicas=()), shadow="{}")[1].replicas == {A: PoolCounts(1)}


@pytest.mark.parametrize(
    ("server", "model", "said"),
    [
        (Server(), "lama", r"--served-model-name lama: Prometheus has no series of it.*it has llama; did you mean llama\?"),
        (Server(replicas=()), "llama", "no kube_deployment_status_replicas_ready of Deployment vllm; scrape kube-state-metrics"),
        (Server(age_s=100.0), "llama", "the newest sample of llama is 100 s old"),
        (Server(error=NoConnection()), "llama", "nothing answers at prometheus.example:9090; start it, or correct --prometheus-url"),
    ],
)  # fmt: skip
def test_what_a_shadow_planner_lacks_is_said_before_it_starts(server, model, said):
    """One sentence each, with the flag or the series."""
    with pytest.raises((ConfigError, ObservationError), match=said):
        opened(server, model=model)


def test_apart_prompts_are_counted_at_prefill_and_tokens_at_decode():
    """KV usage and waiting inside are those of decode; the queue is that of prefill."""
    now = [0.0]
    replicas = {P: PoolCounts(1), D: PoolCounts(2)}
    reader = Reader(
        *(
            WorldState(
                {P: counts(at_s, scale, processes=("p:1",), waiting=4.0), D: counts(at_s, scale, waiting=1.0, kv=0.5)},
                replicas,
            )
            for at_s, scale in ((0.0, 10.0), (10.0, 20.0))
        )
    )  # fmt: skip
    backend = ShadowBackend(reader, ShadowFleet(5.0, {P: 1, D: 1}), now_s=lambda: now[0], speed=1.0)

    async def tick():
        state = await backend.observe()
        return await backend.read(Query(state.endpoints, 30.0))

    asyncio.run(tick())
    now[0] = 10.0
    found = asyncio.run(tick())
    demand = found.demand
    assert (demand.arrivals, demand.completed, demand.waiting, demand.output_tokens) == (
        10.0,
        20.0,
        4.0,
        2000.0,
    )
    assert (found.queue.value, found.queue.is_known) == (4.0, True)
    assert [each.value for each in found.kv.values()] == [0.5, 0.5]
    assert [each.value for each in found.worker_waiting.values()] == [1.0, 1.0]
    assert demand.in_flight == {P: 3.0, D: 6.0}


def pools_pull(at_s, watched, shadow):
    """Return a reading of both fleets with replicas of two GPUs."""
    nothing = WorkerSummary(0.0, 0, 0, None, "")
    return Pull(at_s, {A: PoolCounts(*shadow, gpus=2)}, nothing, None, watched={A: PoolCounts(*watched, gpus=2)})  # fmt: skip


def recorded_history(folder, header, pulls):
    """Write a ledger and read it as a report does."""
    records = [header, *(pull_record(each, place) for place, each in enumerate(pulls, 1))]
    (folder / "ledger.jsonl").write_bytes(b"".join(orjson.dumps(to_plain(each)) + b"\n" for each in records))
    return load_history(folder)


def header_of(**more):
    """Return the header of a planner's ledger."""
    position = anchor_position("boot@2", 100.0, 100.0, {})
    made = header_record(position, at_s=100.0, state=PlannerState(), config=DecideConfig(), is_resumed=False)
    return {**made, "wall_s": 1000.0, "speed": 2.0, **more}


def test_a_report_has_the_replicas_and_gpu_hours_of_both_fleets(tmp_path):
    """Starting replicas hold their GPUs; without Prometheus nothing is said of what was served."""
    record = ShadowRecord("http://p:9090", None, "llama", (), ("aggregated=vllm",), "prometheus", 60.0, 15.0)
    pulls = [
        pools_pull(110.0, (2, 0), (2, 0)),
        pools_pull(1910.0, (2, 2), (1, 0)),
        pools_pull(3710.0, (4, 0), (1, 0)),
    ]
    found = recorded_history(tmp_path, header_of(shadow=record), pulls)
    assert (found.start_s, found.duration_s, found.speed) == (1005.0, 3600.0, 2.0)
    assert (found.watched_hours, found.shadow_hours) == (6.0, 3.0)
    watched = found.watched[A]
    assert (watched.peak, watched.mean, watched.changes) == (4, 3.0, 1)
    assert watched.at(np.array([0.0, 1800.0, 3599.0, 4000.0])).tolist() == [2.0, 2.0, 2.0, 4.0]
    report = ShadowReport(found, SloConfig(ttft="2s"), None, ("Prometheus is gone",))
    assert headline(report) == (
        "In 1.0 h the autoscaler used 6.00 GPU-hours; Penstock's planner would have held 3.00 GPU-hours (-50%)."
    )
    assert [row[:2] for row in rows(report)] == [("the autoscaler", "measured"), ("Penstock", "decided")]
    page = render_page(report)
    assert headline(report).split(";")[0] in page
    assert "the watched fleet could not be read for 30 min at a time" in page
    assert "Prometheus is gone" in page
    assert as_plain(report, [])["shadow"]["predicted_in_time"] is None


def test_a_ledger_of_another_planner_is_not_compared(tmp_path):
    """A planner that scales its own graph has a report of a load run."""
    with pytest.raises(ConfigError, match=r"--run: required, because .* is not of a shadow planner"):
        recorded_history(tmp_path, header_of(), [])
