from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock_planner.decide.codec import to_plain
from penstock_planner.decide.config import DecideConfig, Mode, config_from
from penstock_planner.decide.decision import Action, Proposal, Reason, RoleProposal
from penstock_planner.decide.demand.observation import Demand, PoolCounts, WorkerSummary
from penstock_planner.decide.pipeline import decide, roll_back
from penstock_planner.decide.policies.load import against
from penstock_planner.decide.policy import PlannerPolicy
from penstock_planner.decide.state import PlannerState, RoleState

CONFIG = DecideConfig()


def _pool(ready, starting=0, draining=0, gpus=1):
    return PoolCounts(ready, starting, draining, gpus)


def _outcome(decision, role):
    found = next(r for r in decision.roles if r.role is role)
    return found.action, found.reason, found.desired - found.current


def _run(window, *, state=None, config=CONFIG):
    """Decide; without a state, for a planner that has seen its workers before and remembers nothing else."""
    seen = {role: RoleState(last_ready=99) for role in (Role.DECODE, Role.AGGREGATED)}
    return decide(window, state or PlannerState(roles=seen), config)


def _sentence_of(decision, role):
    return next(r.sentence for r in decision.roles if r.role is role)


@pytest.mark.parametrize(
    ("kv", "reason", "sentence"),
    [
        ([0.93] * 2, Reason.ABOVE_THRESHOLD, "decode 2 -> 3: KV 0.93 > 0.90"),
        ([0.9004] * 2, Reason.ABOVE_THRESHOLD, "decode 2 -> 3: KV 0.9004 > 0.9000"),
        ([0.9] * 2, Reason.WITHIN_THRESHOLDS, "decode 2: KV 0.90 is between 0.50 and 0.90"),
        ([0.5] * 2, Reason.WITHIN_THRESHOLDS, "decode 2: KV 0.50 is between 0.50 and 0.90"),
        ([0.31] * 2, Reason.BELOW_THRESHOLD, "decode 2 -> 1: KV 0.31 < 0.50"),
        ([0.0] * 2, Reason.BELOW_THRESHOLD, "decode 2 -> 1: KV 0.00 < 0.50"),
        (
            [0.98, None],
            Reason.METRIC_UNKNOWN,
            "KV of known workers: 0.98 > 0.90; of all workers: at least 0.49",
        ),
    ],
)
def test_decode_follows_kv_with_strict_thresholds(make, kv, reason, sentence):
    """Above 0.9 one more, below 0.5 one less, nothing at the thresholds themselves or on a guess."""
    decision, _ = _run(make.steady(kv=kv))
    assert _outcome(decision, Role.DECODE)[1] is reason
    assert sentence in _sentence_of(decision, Role.DECODE)


@pytest.mark.parametrize(
    ("queue", "workers", "sentence"),
    [
        (3, 2, "prefill 2 -> 3: queue per worker 1.50 > 0.50"),
        (1, 2, "prefill 2: queue per worker 0.50 is between 0.20 and 0.50"),
        (0.4, 2, "prefill 2: queue per worker 0.20 is between 0.20 and 0.50"),
        (0.3, 2, "prefill 2 -> 1: queue per worker 0.15 < 0.20"),
        (float("nan"), 3, "prefill 3: queue per worker unknown (value is NaN)"),
    ],
)
def test_prefill_follows_the_queue_per_worker(make, queue, workers, sentence):
    """Queued requests are divided by the prefill workers before they are compared; an unknown queue holds."""
    window = make.steady(queue=queue, prefill=_pool(workers))
    decision, _ = _run(window, config=replace(CONFIG, queue_per_worker=True))
    assert _sentence_of(decision, Role.PREFILL) == sentence


# ---------------------------------------------------------------- one interval

UP, HOLD, DOWN = Action.UP, Action.HOLD, Action.DOWN
D, P = Role.DECODE, Role.PREFILL
OVER, UNDER = (UP, Reason.ABOVE_THRESHOLD), (DOWN, Reason.BELOW_THRESHOLD)
UNKNOWN, FULL, AT_FLOOR = (HOLD, Reason.METRIC_UNKNOWN), (HOLD, Reason.GPU_BUDGET), (HOLD, Reason.AT_FLOOR)
RETRIED = RoleState(last_ready=0, failed_scale_ups=4, backoff=16)


def _floor(replicas, gpus):
    """Idle decode workers alongside prefill workers that keep theirs."""
    pools = {"decode": _pool(replicas, gpus=gpus), "prefill": _pool(4, gpus=2)}
    return {"kv": [0.1] * replicas, "queue": 1.2, **pools}


# What is observed, what is configured, what is remembered by role, and what becomes of a role.
INTERVALS = {
    "an unknown worker may be full": ({"kv": [0.1, None]}, {}, {}, {D: UNKNOWN}),
    "no worker is known": ({"kv": [None, None]}, {}, {}, {D: UNKNOWN}),
    "one of five is unknown": ({"kv": [0.0] * 4 + [None]}, {}, {}, {D: UNKNOWN}),
    "at least 0.95": ({"kv": [1.0] * 19 + [None]}, {"max_gpu_budget": None}, {}, {D: OVER}),
    "zeros behind a router that is away": ({"kv": [0.0] * 3, "queue": None}, {}, {}, {D: UNKNOWN}),
    "no queue per worker": (
        {"queue": 50, "prefill": _pool(0, starting=2)}, {}, {}, {P: (HOLD, Reason.NO_READY_WORKER)}
    ),
    "a restarting worker's share is on the others": (
        {"kv": [0.2], "decode": _pool(1, starting=1)}, {}, {}, {D: (HOLD, Reason.REPLICA_NOT_READY)}
    ),
    "grace withholds no worker": ({"kv": [0.95] * 2}, {}, {D: RoleState(last_ready=1)}, {D: OVER}),
    "an empty cache has its grace, whoever added the worker": (
        {"kv": [0.1] * 3}, {}, {D: RoleState(last_ready=2)}, {D: (HOLD, Reason.DECODE_GRACE_PERIOD)}
    ),
    "aggregated workers go by KV and decode's GPUs": (
        {"kv": [0.95], "aggregated": _pool(1)}, {"decode_gpus": 4, "max_gpu_budget": 8}, {},
        {Role.AGGREGATED: OVER},
    ),
    "prefill has no grace": ({"queue": 0.0, "prefill": _pool(2)}, {}, {P: RoleState(last_ready=1)}, {P: UNDER}),
    **{
        f"one worker would be at {load}": (
            {"kv": [load / 2] * 2}, {}, {}, {D: (HOLD, Reason.ONE_FEWER_TOO_FEW)}
        )
        for load in (0.92, 0.95, 0.99)
    },
    "backoff holds a role below its floor too": (
        {"prefill": _pool(0, starting=1)}, {"min_replicas": {P: 2}}, {P: RETRIED},
        {P: (HOLD, Reason.WITHDRAWAL_BACKOFF)},
    ),
    **{
        f"{replicas} of {gpus} GPUs, floor {budget}": (
            _floor(replicas, gpus), {"min_gpu_budget": budget, "max_gpu_budget": None}, {}, {D: expected}
        )
        for replicas, gpus, budget, expected in (
            (1, 1, 1, AT_FLOOR), (2, 1, 1, UNDER), (2, 2, 3, AT_FLOOR), (3, 2, 3, UNDER), (1, 4, 0, AT_FLOOR),
            (1, 2, 4, (UP, Reason.BELOW_FLOOR)),
        )
    },
    "minReplicas": ({"kv": [0.1] * 2}, {"min_replicas": {D: 2}}, {}, {D: AT_FLOOR}),
    "maxReplicas": ({"kv": [0.95] * 3}, {"max_replicas": {D: 3}}, {}, {D: (HOLD, Reason.AT_MAX_REPLICAS)}),
    "decode goes first": (
        {"kv": [0.95], "queue": 9}, {"max_gpu_budget": 3}, {}, {D: OVER, P: (HOLD, Reason.GPU_BUDGET_YIELDED)}
    ),
    "both fit": ({"kv": [0.95], "queue": 9}, {}, {}, {D: OVER, P: OVER}),
    "an empty prefill pool goes before decode": (
        {"kv": [0.95], "queue": 9, "prefill": _pool(0)}, {"max_gpu_budget": 2}, {},
        {P: (UP, Reason.BELOW_FLOOR), D: (HOLD, Reason.GPU_BUDGET_YIELDED)},
    ),
    "what decode cannot use is left to prefill": (
        {"kv": [0.95], "queue": 9, "decode": _pool(1, gpus=2)}, {"max_gpu_budget": 4}, {}, {D: FULL, P: OVER}
    ),
    "GPUs freed by the same decision are not spent yet": (
        {"kv": [0.95] * 2, "queue": 0.0, "prefill": _pool(2)}, {"max_gpu_budget": 4}, {}, {D: FULL, P: UNDER}
    ),
    "the larger of configured and observed GPUs is charged": (
        {"kv": [0.95]}, {"decode_gpus": 4, "max_gpu_budget": 8}, {}, {D: FULL}
    ),
    "more workers than the budget are not shrunk for it": (
        {"kv": [0.7] * 9}, {"max_gpu_budget": 4}, {},
        {D: (HOLD, Reason.WITHIN_THRESHOLDS), P: (HOLD, Reason.WITHIN_THRESHOLDS)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("observed", "configured", "remembered", "expected"), INTERVALS.values(), ids=INTERVALS
)
def test_an_interval_changes_a_role_by_one_at_most(make, observed, configured, remembered, expected):
    """Unknown values, grace, floors and ceilings: each role's change with its reason."""
    state = PlannerState(roles=remembered) if remembered else None
    decision, _ = _run(make.steady(**observed), state=state, config=replace(CONFIG, **configured))
    sizes = {UP: 1, HOLD: 0, DOWN: -1}
    for role, (action, reason) in expected.items():
        assert _outcome(decision, role) == (action, reason, sizes[action])


# ---------------------------------------------------------------- unknown values


def test_one_incomplete_pull_of_thirty_is_enough_to_keep_the_size(make):
    """Down needs every pull of the interval complete."""
    pulls = [make.pull(float(t), kv=[0.1, 0.1]) for t in range(1, 30)]
    decision, _ = _run(make.window(*pulls, make.pull(30.0, kv=[0.1, None])))
    assert _outcome(decision, Role.DECODE)[1] is Reason.METRIC_UNKNOWN
    assert (
        _sentence_of(decision, Role.DECODE)
        == "decode 2: KV of known workers: 0.10 < 0.50; but 1 of 30 pulls are incomplete (w1: not reported)"
    )


def test_a_queue_that_is_only_a_lower_bound_may_grow_the_pool_but_not_shrink_it(make):
    """A backup sees the workers' own queues: 9 is enough to grow, 0 says nothing about the router's."""

    def bounded(queue, slope=0.0):
        pulls = [make.pull(t, queue=queue + slope * t, prefill=_pool(3)) for t in range(1, 31)]
        return make.window(*(replace(p, queue=replace(p.queue, at_least=True)) for p in pulls))

    config = replace(CONFIG, max_gpu_budget=None)
    assert _outcome(_run(bounded(0), config=config)[0], Role.PREFILL)[1] is Reason.METRIC_UNKNOWN
    assert _outcome(_run(bounded(9), config=config)[0], Role.PREFILL)[0] is Action.UP
    # A falling part is not a proof that the whole falls.
    assert _outcome(_run(bounded(9, slope=-0.2), config=config)[0], Role.PREFILL)[0] is Action.UP


def test_an_empty_interval_decides_nothing(make):
    """Nothing was observed: no roles, but the decision still takes a number."""
    decision, state = _run(make.window())
    assert decision.roles == ()
    assert (decision.id, state.sequence) == ("d000001", 1)


# ---------------------------------------------------------------- decode grace


@pytest.mark.parametrize("is_added", [True, False], ids=["added", "there from the start"])
def test_decode_is_not_scaled_down_for_three_intervals_after_a_new_worker(make, is_added):
    """Held in three intervals, down in the fourth."""
    state = _run(make.steady(kv=[0.95]))[1] if is_added else PlannerState()
    reasons = []
    for _ in range(4):
        decision, state = _run(make.steady(kv=[0.1, 0.1]), state=state)
        reasons.append(_outcome(decision, Role.DECODE)[1])
    assert reasons == [*[Reason.DECODE_GRACE_PERIOD] * 3, Reason.BELOW_THRESHOLD]


def test_an_aggregated_pool_does_not_shrink_on_zeros_that_no_router_confirms(make):
    """With the routers' demand it would; without it, it stays."""
    window = make.steady(kv=[0.0, 0.0], aggregated=_pool(2))
    seen = replace(window, pulls=tuple(replace(pull, demand=Demand(1.0)) for pull in window.pulls))
    assert _outcome(_run(window)[0], Role.AGGREGATED)[:2] == (Action.HOLD, Reason.METRIC_UNKNOWN)
    assert _outcome(_run(seen)[0], Role.AGGREGATED)[0] is Action.DOWN


def test_a_saturated_aggregated_pool_grows_however_little_kv_its_prompts_hold(make):
    """One worker at 0.3 with 147 requests waiting: 0.3 + 147 x 0.02 = 3.24."""
    window = make.steady(kv=[0.3], aggregated=_pool(1))
    waiting = WorkerSummary(147.0, 1, 0, 0.0, "test")
    pulls = tuple(replace(pull, worker_waiting=waiting) for pull in window.pulls)
    decision, _ = _run(replace(window, pulls=pulls))
    assert [r.sentence for r in decision.roles] == ["aggregated 1 -> 2: KV 3.24 > 0.90"]


def test_a_queue_that_falls_because_requests_are_refused_is_not_draining(make):
    """4 - 0.05 t would be held back; with refusals it grows."""
    pulls = [make.pull(float(t), queue=4 - 0.05 * t) for t in range(1, 31)]
    pulls[10] = replace(pulls[10], demand=Demand(1.0, arrivals=5.0, refused=5.0))
    decision, _ = _run(make.window(*pulls))
    assert _outcome(decision, Role.PREFILL) == (Action.UP, Reason.ABOVE_THRESHOLD, 1)


@pytest.mark.parametrize(
    ("refused", "by_role", "changes"),
    [
        (26.0, (), (1, 0)),
        (26.0, (Role.PREFILL,), (1, 0)),
        (26.0, (Role.DECODE,), (-1, 1)),
        (1 / 30, (), (0, 0)),
    ],
    ids=["not told apart", "prefill", "decode", "a single one, within 1%"],
)
def test_what_is_rejected_is_demand_for_the_role_that_had_no_room(make, refused, by_role, changes):
    """Of 80 requests a second, nothing waits, KV within its thresholds: grow, where queue and KV ask for less."""
    demand = Demand(1.0, arrivals=80.0, refused=refused, unserved=dict.fromkeys(by_role, refused))
    pulls = [
        replace(make.pull(float(at), queue=0.0, kv=[0.7], prefill=PoolCounts(2, gpus=1)), demand=demand)
        for at in range(1, 31)
    ]
    decision, _ = _run(make.window(*pulls))
    assert tuple(_outcome(decision, role)[2] for role in (Role.PREFILL, Role.DECODE)) == changes
    rejected = next(role for role in decision.roles if role.reason is Reason.REQUESTS_REJECTED)
    if rejected.action is Action.UP:
        assert rejected.sentence.endswith("780 of 2400 requests rejected or timed out")


def test_a_burst_that_is_over_does_not_grow_prefill(make):
    """Its mean is above the threshold, its queue has been empty for the last ten seconds."""
    pulls = [make.pull(float(t), queue=30.0 if 10 < t <= 20 else 0.0) for t in range(1, 31)]
    decision, _ = _run(make.window(*pulls))
    assert _outcome(decision, Role.PREFILL) == (Action.HOLD, Reason.PREFILL_QUEUE_FALLING, 0)
    assert _sentence_of(decision, Role.PREFILL).endswith(
        "but it is being cleared: 0.00 < 0.50 in 3 intervals"
    )


# ---------------------------------------------------------------- prefill trend


@pytest.mark.parametrize(
    ("slope", "intervals", "reason"),
    [
        (-0.05, 3, Reason.PREFILL_QUEUE_FALLING),
        (-0.01, 3, Reason.ABOVE_THRESHOLD),
        (0.05, 3, Reason.ABOVE_THRESHOLD),
        (-0.05, 0, Reason.ABOVE_THRESHOLD),
    ],
)
def test_prefill_waits_for_a_queue_that_drains_by_itself(make, slope, intervals, reason):
    """From 4.0: at -0.05/s it is below 0.5 within 90 s, at -0.01/s still 2.8, and now 2.5."""
    window = make.window(*(make.pull(t, queue=4 + slope * t) for t in range(1, 31)))
    decision, _ = _run(window, config=replace(CONFIG, queue_buffer_intervals=intervals))
    assert _outcome(decision, Role.PREFILL)[1] is reason


# ---------------------------------------------------------------- floors and ceilings


@pytest.mark.parametrize(
    ("budget", "draining", "action", "reason"),
    [
        (4, 0, Action.UP, Reason.ABOVE_THRESHOLD),
        (3, 0, Action.HOLD, Reason.GPU_BUDGET),
        (4, 1, Action.HOLD, Reason.GPU_BUDGET),
        (5, 1, Action.UP, Reason.ABOVE_THRESHOLD),
        (None, 50, Action.UP, Reason.ABOVE_THRESHOLD),
    ],
)
def test_the_ceiling_counts_every_existing_worker(make, budget, draining, action, reason):
    """One prefill, two decode: 3 GPUs; a draining worker still holds its own."""
    window = make.steady(kv=[0.95, 0.95], decode=_pool(2, draining=draining))
    decision, _ = _run(window, config=replace(CONFIG, max_gpu_budget=budget))
    assert _outcome(decision, Role.DECODE)[:2] == (action, reason)
    assert decision.gpus == 3 + draining


# ---------------------------------------------------------------- no-operation, withdrawal, record


@pytest.mark.parametrize(("before", "backoff"), [(0, 2), (1, 4), (2, 8), (3, 16), (9, 16)])
def test_a_withdrawn_scale_up_is_not_repeated_for_a_doubling_time(make, before, backoff):
    """2, 4, 8, then 16 intervals."""
    state = PlannerState(
        7, {Role.DECODE: RoleState(last_ready=2, pending_replicas=3, failed_scale_ups=before)}
    )
    pull = make.pull(kv=[0.9, 0.9], decode=_pool(2, starting=1))
    decision, after = roll_back(Role.DECODE, "no CUDA device", pull=pull, state=state, config=CONFIG)
    assert decision.id == "d000008"
    assert [r.sentence for r in decision.roles] == [
        "decode 3 -> 2: withdrawn, never became ready: no CUDA device"
    ]
    assert after.of(Role.DECODE) == RoleState(
        last_ready=2, failed_scale_ups=before + 1, failed_replicas=3, backoff=backoff
    )
    held, _ = _run(make.steady(kv=[0.95, 0.95]), state=after)
    assert _outcome(held, Role.DECODE)[1] is Reason.WITHDRAWAL_BACKOFF


def test_backoff_ends_and_success_forgets_it(make):
    """After the backoff it tries again; once the replica is ready the count starts again."""
    state = PlannerState(0, {Role.DECODE: RoleState(last_ready=1, failed_scale_ups=1, backoff=1)})
    held, state = _run(make.steady(kv=[0.95]), state=state)
    retried, state = _run(make.steady(kv=[0.95]), state=state)
    assert _outcome(held, Role.DECODE)[0] is Action.HOLD
    assert _outcome(retried, Role.DECODE)[0] is Action.UP
    assert state.of(Role.DECODE).failed_scale_ups == 1
    _, state = _run(make.steady(kv=[0.7, 0.7]), state=state)
    assert (state.of(Role.DECODE).failed_scale_ups, state.of(Role.DECODE).pending_replicas) == (0, None)


def test_withdrawing_what_was_never_asked_is_a_mistake(make):
    """Only an outstanding scale-up can be taken back."""
    with pytest.raises(ValueError, match="no scale-up of decode is outstanding"):
        roll_back(Role.DECODE, "x", pull=make.pull(), state=PlannerState(), config=CONFIG)


@pytest.mark.parametrize(
    ("value", "sign", "threshold", "text"),
    [
        (0.93, ">", 0.9, "0.93 > 0.90"),
        (0.9001, ">", 0.9, "0.9001 > 0.9000"),
        (0.49999, "<", 0.5, "0.49999 < 0.50000"),
        (0.9 + 1e-16, ">", 0.9, "0.9000000000000001 > 0.9000000000000000"),
        (1e-300, ">", 0.0, "1e-300 > 0.0"),
    ],
)
def test_numbers_are_shown_with_the_decimals_that_tell_them_apart(value, sign, threshold, text):
    """Nobody should read 0.90 > 0.90."""
    assert against(value, sign, threshold) == text


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (Mode.ORACLE, "mode oracle: needs to know every arrival in advance, so only `penstock simulate`"),
        (Mode.ORACLE_ONE_STEP, "mode oracle-one-step: needs to know"),
        ("dynamo-throughput", "mode dynamo-throughput: it scales by a latency profile and none is given"),
    ],
)
def test_a_mode_that_must_be_told_more_is_refused_by_name(make, mode, told):
    """The message says what it needs."""
    with pytest.raises(ConfigError, match=told):
        _run(make.steady(), config=replace(CONFIG, mode=mode))


def test_a_configuration_from_before_there_were_modes_is_the_documents_rule():
    """A ledger written then is read and replayed as mode load."""
    plain = to_plain(CONFIG)
    for new in ("mode", "max_step", "ttft_slo_s", "queue_per_worker"):
        del plain[new]
    assert config_from(plain) == replace(CONFIG, mode=Mode.LOAD, queue_per_worker=True)


@pytest.mark.parametrize(
    ("amount", "max_step", "free", "expected"),
    [(3, 1, 8, 1), (3, 2, 8, 2), (3, None, 8, 3), (3, None, 2, 2), (1, 1, 0, 0), (-4, None, 8, -3)],
)
def test_a_larger_step_is_cut_to_step_budget_and_floor(  # noqa: PLR0917 - one table
    make, monkeypatch, amount, max_step, free, expected
):
    """As many replicas as step and free GPUs allow, none rather than one too many; of five, two are the floor."""
    window = make.steady(kv=[0.7] * 5)
    bounds = {"max_gpu_budget": 6 + free, "max_step": max_step, "min_replicas": {Role.DECODE: 2}}
    asks = {Role.PREFILL: 0, Role.DECODE: amount}
    asking = PlannerPolicy(lambda seen, _state, _config: _asking(seen, asks))
    monkeypatch.setattr("penstock_planner.decide.config.policy_of", lambda _mode: asking)
    decision, state = decide(window, PlannerState(), replace(CONFIG, **bounds))
    assert _outcome(decision, Role.DECODE)[2] == expected
    assert decision.gpus_after == decision.gpus + max(0, expected)
    assert state.of(Role.DECODE).pending_replicas == (5 + expected if expected > 0 else None)


def _asking(window, asks):
    proposals = [
        RoleProposal(
            role,
            pool,
            1,
            Action.UP if asks[role] > 0 else Action.DOWN if asks[role] else Action.HOLD,
            Reason.ABOVE_THRESHOLD if asks[role] > 0 else Reason.BELOW_THRESHOLD,
            "asked",
            (),
            abs(asks[role]) or 1,
        )
        for role, pool in window.pulls[-1].pools.items()
    ]
    return Proposal(proposals, {role: RoleState() for role in asks})
