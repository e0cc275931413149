"""Demand between two pulls, from the routers' counters: differences, sums, and None whenever they cannot be trusted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import Role, RouterConfig
from penstock.core.clock import SimulatedClock
from penstock.core.exposition import parse_samples
from penstock.router.admission import Admission
from penstock.router.context import RouterContext
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.retries import Assignment
from penstock.router.core.worker import WorkerSpec
from penstock.router.discovery.statefile import Discovery
from penstock.router.metrics import RouterMetrics
from penstock.router.metrics_page import MetricsPage
from penstock.router.policy.arrival import Arrival, PromptTokenCounts
from penstock.router.settings import RouterSettings
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.sources.router import ROUTER_NAMES, DemandMeter, RouterSample, read_router

COUNTERS = (
    "arrivals",
    "prompt_tokens",
    "routed_tokens",
    "routed_uncached",
    "refused",
    "timed_out",
    "completed",
    "output_tokens",
    "prefilled_tokens",
    "ttft_sum_s",
    "ttft_count",
    "itl_sum_s",
    "itl_count",
)


def _frontend(*, waiting=0, oldest=0.0, in_flight=None, pending=None, started=1.0, **counters):
    gauges = {"waiting": waiting, "waiting_tokens": waiting * 10, "oldest_wait_s": oldest}
    return RouterSample(
        {**dict.fromkeys(COUNTERS, 0.0), **counters},
        gauges,
        in_flight or {},
        pending or {},
        started_s=started,
    )


def _metered(*steps, routers=("a",)):
    """Return the demand of each step: (now_s, {router: frontend}[, routers])."""
    meter = DemandMeter()
    return [meter.add(frontends, more[0] if more else routers, now_s) for now_s, frontends, *more in steps]


def test_demand_is_the_difference_of_two_pulls():
    """The first pull has nothing to subtract from; the period is the time between the two."""
    first, second = _metered(
        (10.0, {"a": _frontend(arrivals=100, prompt_tokens=5000, routed_tokens=5000, routed_uncached=4000)}),
        (
            12.0,
            {
                "a": _frontend(
                    arrivals=106,
                    prompt_tokens=5600,
                    routed_tokens=5600,
                    routed_uncached=4200,
                    completed=3,
                    waiting=2,
                    oldest=4.5,
                    in_flight={Role.DECODE: 8.0},
                    pending={"p": 7.0, "q": 0.0},
                )
            },
        ),
    )
    assert first is None
    assert second == Demand(
        period_s=2.0,
        arrivals=6,
        prompt_tokens=600,
        uncached_tokens=200,
        completed=3,
        waiting=2,
        waiting_tokens=20,
        oldest_wait_s=4.5,
        in_flight={Role.DECODE: 8.0},
        in_flight_tokens=7,
        prefilling_workers=1,
    )


def test_several_routers_add_up():
    """Counts and queues are sums, the oldest wait is the longest; a worker that both use is one."""
    before = {"a": _frontend(arrivals=10), "b": _frontend(arrivals=20)}
    after = {
        "a": _frontend(
            arrivals=11, waiting=1, oldest=2.0, in_flight={Role.PREFILL: 1.0}, pending={"p": 10.0}
        ),
        "b": _frontend(
            arrivals=25, waiting=3, oldest=9.0, in_flight={Role.PREFILL: 2.0}, pending={"p": 5.0, "q": 1.0}
        ),
    }
    _, demand = _metered((0.0, before), (1.0, after), routers=("a", "b"))
    assert (demand.arrivals, demand.waiting, demand.oldest_wait_s) == (6, 4, 9.0)
    assert demand.in_flight == {Role.PREFILL: 3.0}
    assert (demand.in_flight_tokens, demand.prefilling_workers) == (16.0, 2)


@pytest.mark.parametrize(
    ("routed", "uncached"), [({"routed_tokens": 300, "routed_uncached": 100}, 300), ({}, 900)]
)
def test_what_was_refused_is_as_uncached_as_what_was_routed(routed, uncached):
    """Of 900 tokens 300 were routed, a third of them uncached: a third of the 600 refused ones counts; without any, all."""
    after = _frontend(prompt_tokens=900, refused=2, **routed)
    _, demand = _metered((0.0, {"a": _frontend()}), (1.0, {"a": after}))
    assert (demand.uncached_tokens, demand.oldest_wait_s) == (uncached, None)


def test_a_router_that_joins_or_leaves_makes_one_pull_unknown():
    """What it counted before it was known belongs to no period."""
    found = _metered(
        (0.0, {"a": _frontend(arrivals=1)}, ["a"]),
        (1.0, {"a": _frontend(arrivals=2), "b": _frontend(arrivals=50)}, ["a", "b"]),
        (2.0, {"a": _frontend(arrivals=3), "b": _frontend(arrivals=51)}, ["a", "b"]),
        (3.0, {"b": _frontend(arrivals=52)}, ["b"]),
        (4.0, {"b": _frontend(arrivals=53)}, ["b"]),
    )
    assert [None if each is None else each.arrivals for each in found] == [None, None, 2, None, 1]


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), max_size=30))
def test_demand_is_never_negative_and_loses_no_arrival_but_at_restarts(steps):
    """Arrivals of the known periods add up to what was counted between restarts; a hidden page loses none."""
    meter, counted, started = DemandMeter(), 0, 0.0
    total = expected = pending = 0
    last_started: float | None = None
    for number, (arrived, hidden, restarts) in enumerate(steps):
        if restarts:
            counted, started, pending = 0, started + 1, 0
        counted += arrived
        pending += arrived
        frontends = {} if hidden else {"a": _frontend(arrivals=counted, started=started)}
        demand = meter.add(frontends, ["a"], float(number))
        if demand is not None:
            assert demand.arrivals >= 0
            total += demand.arrivals
            expected += pending
        if not hidden:
            assert (demand is not None) is (started == last_started)
            pending, last_started = 0, started
    assert total == expected


class ClockAt20(SimulatedClock):
    """Stands still."""

    def now_s(self):
        """Always 20 s."""
        return 20.0


def _page(**tokens):
    core = build_router(RouterConfig(), SPLIT)
    core.pool.apply([WorkerSpec("p", Role.PREFILL, "http://p"), WorkerSpec("d", Role.DECODE, "http://d")])
    Assignment(None, core.pool.get("p"), 10, now_s=0)
    metrics = RouterMetrics()
    metrics.arrivals, metrics.completed = 3, 2
    metrics.ttft.observe(0.5, 4)
    for number in range(5):
        core.entry_queue.submit(number, Arrival((), 10), 17.5)
    core.entry_queue.prompt_tokens = PromptTokenCounts(**tokens)
    for at_s in (4.0, 6.0, 7.0):
        core.rejections[Role.PREFILL].add(at_s)
    clock, settings = ClockAt20(), RouterSettings("llama", disaggregated=True)
    context = RouterContext(settings, clock, Admission(core, clock.now_s), Discovery(), metrics)
    return MetricsPage(context, None, None, None).render("")[0].decode()


def test_the_routers_own_page_holds_every_count():
    """Names agree on both sides; the process' start is there too."""
    page = _page(waiting=40, pending={"p": 30}, routed=20, admitted=15, computed=12)
    frontend = read_router(parse_samples(page, ROUTER_NAMES))
    assert frontend.counters == {
        **dict.fromkeys(COUNTERS, 0.0),
        "arrivals": 3,
        "completed": 2,
        "routed_tokens": 20,
        "routed_uncached": 15,
        "prefilled_tokens": 12,
        "ttft_sum_s": 2.0,
        "ttft_count": 4,
    }
    assert frontend.gauges == {"waiting": 5, "waiting_tokens": 40, "oldest_wait_s": 2.5}
    assert frontend.turned_away == {Role.PREFILL: 3.0, Role.DECODE: 0.0}
    assert frontend.pending == {"p": 30.0, "d": 0.0}
    assert frontend.in_flight == {Role.PREFILL: 1.0, Role.DECODE: 0.0}
    assert frontend.started_s > 1e9


@pytest.mark.parametrize("count", ["", "NaN", "+Inf"], ids=["missing", "NaN", "infinite"])
def test_a_page_without_a_count_tells_no_demand(count):
    """An older router's arrivals are unknown, not 0."""
    lines = [line for line in _page().splitlines() if not line.startswith("penstock_router_arrivals_total")]
    if count:
        lines.append(f'penstock_router_arrivals_total{{model_name="llama"}} {count}')
    assert read_router(parse_samples("\n".join(lines), ROUTER_NAMES)) is None
