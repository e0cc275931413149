from __future__ import annotations

from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role
from penstock_planner.decide.codec import from_plain, to_plain, to_short
from penstock_planner.decide.config import DecideConfig, config_from
from penstock_planner.decide.decision import Action
from penstock_planner.decide.demand.observation import Demand, PoolCounts, Pull, Window, summarise
from penstock_planner.decide.demand.reading import assess
from penstock_planner.decide.pipeline import decide
from penstock_planner.decide.state import PlannerState, RoleState

counts = st.integers(0, 6)
pools = st.builds(
    PoolCounts, ready=counts, starting=st.integers(0, 2), draining=st.integers(0, 2), gpus=counts
)
values = st.one_of(
    st.floats(0, 1),
    st.just(0.0),
    st.just(1.0),
    st.sampled_from([None, float("nan"), float("inf"), -1.0, 7.0]),
)
role_states = st.builds(
    RoleState,
    last_ready=st.one_of(st.none(), counts),
    grace=st.integers(0, 3),
    pending_replicas=st.one_of(st.none(), st.integers(1, 8)),
    failed_scale_ups=st.integers(0, 3),
    backoff=st.integers(0, 4),
    reserved=st.booleans(),
)
states = st.builds(
    PlannerState,
    st.integers(0, 99),
    st.dictionaries(st.sampled_from([*Role][1:]), role_states),
    st.dictionaries(st.sampled_from(["mode_key"]), st.integers(0, 9)),
)
demands = st.one_of(
    st.none(),
    st.builds(
        Demand,
        period_s=st.floats(0.1, 60),
        arrivals=st.floats(0, 1e4),
        oldest_wait_s=st.one_of(st.none(), st.floats(0, 100)),
        in_flight=st.dictionaries(st.sampled_from([*Role][1:]), st.floats(0, 100)),
    ),
)
configs = st.builds(
    DecideConfig,
    max_gpu_budget=st.one_of(st.none(), st.integers(1, 30)),
    min_gpu_budget=st.integers(0, 4),
    min_total_gpus=st.integers(0, 30),
    kv_up=st.floats(0.5, 1),
    kv_down=st.floats(0.01, 0.49),
    queue_up=st.floats(0.5, 3),
    queue_down=st.floats(0.01, 0.49),
    decode_gpus=st.integers(1, 4),
    prefill_gpus=st.integers(1, 4),
    no_operation=st.booleans(),
    min_replicas=st.dictionaries(st.sampled_from([*Role][1:]), st.integers(0, 3)),
    max_replicas=st.dictionaries(st.sampled_from([*Role][1:]), st.integers(3, 8)),
)


@st.composite
def _windows(draw):
    is_aggregated = draw(st.booleans())
    roles = [Role.AGGREGATED] if is_aggregated else [Role.PREFILL, Role.DECODE]
    fixed = {role: draw(pools) for role in roles}
    workers = fixed[roles[-1]].ready
    pulls = []
    for at_s in range(1, draw(st.integers(1, 5)) + 1):
        kv = {
            f"w{i}": assess(draw(values), age_s=0, max_age_s=10, source="s", upper=1.0)
            for i in range(workers)
        }
        waiting = draw(st.one_of(st.none(), st.floats(0, 50)))
        queue = None if is_aggregated else assess(waiting, age_s=0, max_age_s=10, source="s")
        inside = {name: assess(1.0, age_s=0, max_age_s=10, source="s") for name in kv} or None
        pulls.append(
            summarise(float(at_s), fixed, kv=kv, queue=queue, demand=draw(demands), worker_waiting=inside)
        )
    return Window(0.0, 30.0, tuple(pulls))


@given(_windows(), states, configs)
def test_the_budget_is_never_exceeded_and_no_floor_broken(window, state, config):
    """GPUs of existing workers plus what is added stay within the ceiling; nothing goes below its floor."""
    decision, _ = decide(window, state, config)
    added = 0
    for role in decision.roles:
        gpus = config.engine_gpus(role.role, window.pulls[-1].pools[role.role].gpus)
        if role.action is Action.UP:
            added += gpus
            assert role.desired <= config.max_replicas.get(role.role, role.desired)
        if role.action is Action.DOWN:
            assert role.desired >= max(1, config.min_replicas.get(role.role, 0))
            assert role.desired * gpus >= config.min_gpu_budget
    assert decision.gpus_after == decision.gpus + added
    if added and config.max_gpu_budget is not None:
        assert decision.gpus_after <= config.max_gpu_budget


@given(_windows(), states, configs)
def test_each_role_changes_by_at_most_one(window, state, config):
    """The action and the numbers agree, and no step is larger than one."""
    decision, _ = decide(window, state, config)
    assert {r.role for r in decision.roles} == set(window.pulls[-1].pools)
    for role in decision.roles:
        assert role.desired - role.current == {Action.UP: 1, Action.HOLD: 0, Action.DOWN: -1}[role.action]


@given(_windows(), states, configs)
def test_unknown_never_scales_down(window, state, config):
    """A role goes down only if every pull of the interval knew all of it."""
    decision, _ = decide(window, state, config)
    for role in decision.roles:
        if role.action is Action.DOWN:
            for pull in window.pulls:
                if role.role is Role.PREFILL:
                    assert pull.queue.is_known
                    assert pull.pools[Role.PREFILL].ready > 0
                else:
                    assert pull.kv.unknown == 0
                    assert pull.kv.fresh > 0


@given(_windows(), states, configs)
def test_the_same_input_gives_the_same_output_through_json(window, state, config):
    """Deciding again from what the ledger keeps gives the same bits."""
    first = to_plain(decide(window, state, config))
    kept = [orjson.loads(orjson.dumps(to_plain(part))) for part in (window, state, config)]
    again = decide(from_plain(Window, kept[0]), from_plain(PlannerState, kept[1]), config_from(kept[2]))
    assert orjson.dumps(to_plain(again)) == orjson.dumps(first)


@given(_windows())
def test_a_pull_reads_back_from_its_short_form(window):
    """The ledger leaves out what has its default."""
    for pull in window.pulls:
        assert (
            from_plain(Pull, orjson.loads(orjson.dumps(to_short(pull), option=orjson.OPT_NON_STR_KEYS)))
            == pull
        )


_ORDER = {Action.DOWN: -1, Action.HOLD: 0, Action.UP: 1}


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 5),
    states,
)
def test_decode_is_monotone_in_its_load(make, low, high, workers, state):
    """More KV usage never leads to fewer decode replicas."""
    low, high = min(low, high), max(low, high)
    config = replace(DecideConfig(), max_gpu_budget=None)
    actions = [
        next(
            r.action
            for r in decide(make.steady(kv=[kv] * workers), state, config)[0].roles
            if r.role is Role.DECODE
        )
        for kv in (low, high)
    ]
    assert _ORDER[actions[0]] <= _ORDER[actions[1]]


@given(st.floats(0, 20), st.floats(0, 20), st.integers(1, 5), st.floats(-0.5, 0.5))
def test_prefill_is_monotone_in_its_queue(make, low, high, workers, slope):
    """A queue that is longer all along, with the same slope, never leads to fewer prefill replicas."""
    base_low, base_high = min(low, high) + 15, max(low, high) + 15
    config = replace(DecideConfig(), max_gpu_budget=None)
    actions = []
    for base in (base_low, base_high):
        pulls = (make.pull(t, queue=base + slope * t, prefill=PoolCounts(workers)) for t in range(1, 31, 5))
        decision, _ = decide(make.window(*pulls), PlannerState(), config)
        actions.append(next(r.action for r in decision.roles if r.role is Role.PREFILL))
    assert _ORDER[actions[0]] <= _ORDER[actions[1]]
