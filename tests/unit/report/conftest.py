"""A synthetic load run and a synthetic planner ledger: made up here, decided by the planner's own rules."""

from array import array
from functools import partial

import numpy as np
import pytest

from penstock.api import Role
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.results import SCHEMA, ResultWriter
from penstock.workload.statistics import ScheduleLag, summarise
from penstock_planner.core import records
from penstock_planner.core.changes import ChangeOutcome, ReplicaChange
from penstock_planner.core.records import DecisionKind
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, WorkerSummary
from penstock_planner.decide.demand.reading import Quality, Reading
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState
from penstock_planner.ledger import Ledger, read_ledger

ZERO_MODEL_S = 100_000.0
ZERO_UNIX_S = 1_700_000_000.0
SPEED = 20.0
DURATION_S = 600.0
SETTLE_S = 8.0


def _load_at(at_s):
    """One hill of load, from 0 to 1 and back."""
    return float(np.exp(-(((at_s - 260) / 130) ** 2)))


def _result(**fields):
    """A result of the given fields: by itself a request of 10 tokens that is served in 1 s."""
    times = dict.fromkeys(("arrival_s", "sent_s"), fields.get("arrival_s", 0.0))
    known = {"id": "r", "line": 1, **times, "ended_s": times["sent_s"] + 5.0, "status": RequestStatus.OK}
    known |= {"http_status": 200, "error": None, "error_class": None, "ttft_s": 1.0}
    return RequestResult(**{**known, "trace_input_tokens": 10, "trace_output_tokens": 10, **fields})


def _results(rng):
    results = []
    for line in range(1, 401):
        arrival_s = line * 1.5
        tokens = int(rng.integers(2, 60))
        ttft_s = float(0.2 + 3 * _load_at(arrival_s) * rng.random())
        gaps = array("f", rng.gamma(4, 0.004 * (1 + _load_at(arrival_s)), tokens - 1))
        e2e_s = ttft_s + float(sum(gaps))
        known = {"id": f"synthetic-{line}", "line": line, "arrival_s": arrival_s, "sent_s": arrival_s + 0.004}
        known |= {"ended_s": arrival_s + 0.004 + e2e_s, "trace_output_tokens": tokens}
        outcome = {"prompt_tokens": 1000, "output_tokens": tokens, "cached_tokens": 250, "itl_s": gaps}
        outcome |= {"ttft_s": ttft_s, "e2e_s": e2e_s, "tpot_s": (e2e_s - ttft_s) / (tokens - 1)}
        if line % 97 == 0:
            outcome = {"status": RequestStatus.REJECTED, "http_status": 503, "ttft_s": None}
            outcome |= {"error": "prefill queue is full", "error_class": "http_503"}
        results.append(_result(**known, **outcome))
    return results


def _summary(results, *, lag_s):
    measured = summarise(
        results, duration_s=DURATION_S, speed=SPEED, schedule_lag=ScheduleLag(lag_s, 0.001, 0.2)
    )
    measured["requests"] |= {"planned": len(results), "sent": len(results), "unfinished": 0, "not_sent": 0}
    return {
        "schema": SCHEMA,
        "is_partial": False,
        "started": {"unix_s": ZERO_UNIX_S, "model_s": ZERO_MODEL_S},
        **measured,
        "settings": {"model": "<synthetic>", "speed": SPEED, "concurrency": None, "max_input_tokens": None},
        "trace": {
            "name": "synthetic",
            "skipped_rows": ["line 7: not JSON"],
            "truncated_prompts": 0,
            "dropped_prompts": 0,
        },
    }


def _pull(at_s, ready, draining):
    load = _load_at(at_s)
    pools = {
        role: PoolCounts(ready[role], 0, draining.get(role, 0), 1) for role in (Role.PREFILL, Role.DECODE)
    }
    kv = min(1.0, 0.15 + 2.2 * load / ready[Role.DECODE])
    queue = max(0.0, 9 * load - 2.0 * ready[Role.PREFILL])
    return Pull(
        at_s=at_s + ZERO_MODEL_S,
        pools=pools,
        kv=WorkerSummary(kv * ready[Role.DECODE], ready[Role.DECODE], 0, 0.5, "router", ""),
        queue=Reading(Quality.FRESH, queue, 0.5, "router"),
        demand=Demand(
            period_s=1.0,
            arrivals=4 * load,
            refused=load if queue > 4 else 0.0,
            unserved={Role.PREFILL: load if queue > 4 else 0.0},
            prompt_tokens=1200 * load,
            uncached_tokens=900 * load,
            waiting=queue,
        ),
    )


def _ledger_records(config):
    state = PlannerState()
    ready = {Role.PREFILL: 1, Role.DECODE: 1}
    start_s = -20.0
    origin_s = start_s + ZERO_MODEL_S
    place = partial(records.anchor_position, "boot-1", origin_s, starts={})
    about = {"namespace": "synthetic", "environment": "local", "speed": SPEED}
    header = records.header_record(
        place(origin_s), at_s=origin_s, state=state, config=config, is_resumed=False
    )
    yield {**header, "wall_s": ZERO_UNIX_S + start_s / SPEED, **about}
    while start_s < 900:
        pulls = []
        for slot in range(1, 31):
            pulls.append(_pull(start_s + slot, ready, {}))
            yield records.pull_record(pulls[-1], slot)
        end_s = start_s + 30
        window = Window(start_s + ZERO_MODEL_S, end_s + ZERO_MODEL_S, tuple(pulls))
        made = decide(window, state, config)
        record = records.decision_record(
            DecisionKind.ADJUSTMENT,
            place(end_s + ZERO_MODEL_S),
            config=config,
            before=state,
            made=made,
            window=window,
        )
        yield {**record, "wall_s": ZERO_UNIX_S + end_s / SPEED}
        decision, state = made
        start_s = end_s
        for role in decision.changes:
            change = ReplicaChange(decision.id, role.role, role.current, role.desired, decision.at_s)
            yield records.actuation_record(change, at_s=decision.at_s, outcome=ChangeOutcome.APPLIED)
            ready[role.role] = role.desired
        if decision.changes:
            start_s += SETTLE_S
            at_s = start_s + ZERO_MODEL_S
            how = {"at_s": at_s, "took_s": SETTLE_S, "overdue": False}
            yield {"type": "settled", **how, **place(at_s), "state": state}


@pytest.fixture(scope="session")
def result_of():
    """Return the function that makes a result."""
    return _result


@pytest.fixture(scope="session")
def write_run():
    """Return a function that writes a synthetic load run and returns its folder."""

    def write(folder, *, lag_s=0.01, with_gaps=True):
        results = _results(np.random.default_rng(3))
        with ResultWriter(folder, with_gaps=with_gaps) as writer:
            for result in results:
                writer.write(result)
            writer.finish(_summary(results, lag_s=lag_s))
        return folder

    return write


@pytest.fixture(scope="session")
def write_ledger():
    """Return a function that writes a synthetic ledger by the planner's own writer, under a budget of four GPUs."""

    def write(path, config=DecideConfig(max_gpu_budget=4)):  # noqa: B008 - frozen
        ledger = Ledger(path)
        for record in _ledger_records(config):
            ledger.append(record)
        ledger.close()
        return ledger.path

    return write


@pytest.fixture
def make_run(write_run, tmp_path):
    """Write a synthetic load run into the test's folder and return where."""
    return partial(write_run, tmp_path / "run")


@pytest.fixture
def ledger_file(write_ledger, tmp_path):
    """A synthetic ledger in the test's folder."""
    return write_ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def ledger_records(ledger_file):
    """Its records as a reader gets them."""
    return list(read_ledger(ledger_file).records)
