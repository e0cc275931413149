"""What users are told: the graph's status, written only when it changes, and an Event per change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.api import Role
from penstock.core.errors import NotFoundError, UnavailableError
from penstock.core.stamps import seconds, stamp
from penstock.kube.events import EventMessage
from penstock_planner.cluster.fleet import last_report
from penstock_planner.cluster.status import (
    DecisionEventWriter,
    EventListener,
    PlannerReason,
    Report,
    StatusListener,
    StatusWriter,
    is_said,
    silent_after_s,
)
from penstock_planner.decide.config import Mode
from penstock_planner.decide.decision import Action, Decision, Reason, RoleDecision, Step
from penstock_planner.decide.demand.observation import Demand

KEY = ("serving", "llama")
D = Role.DECODE

CALM = Report(
    PlannerReason.OBSERVING,
    "decides every 30 s",
    3,
    last_decision="decode 2 -> 3: KV 0.93 > 0.90",
    decision_id="d000012",
    decision_time="2026-11-22T07:30:00Z",
    gpus=3,
    budget=8,
)


def _live(report=None, **status):
    said = {} if report is None else {"planner": report.planner, "conditions": [_condition(report)]}
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "llama", "namespace": "serving", "uid": "u1", "generation": 3},
        "status": {**said, **status},
    }


def _condition(report, since="2026-01-01T00:00:00Z"):
    return {**report.condition, "lastTransitionTime": since}


class _Server:
    """Takes writes; fails with what is queued."""

    def __init__(self):
        self.applied = []
        self.created = []
        self.failures = []

    async def apply(self, obj, *, field_manager, subresource):
        assert (field_manager, subresource) == ("penstock-planner", "status")
        if self.failures:
            raise self.failures.pop(0)
        self.applied.append(obj["status"])

    async def create(self, obj, *, field_manager):
        assert field_manager == "penstock-planner"
        if self.failures:
            raise self.failures.pop(0)
        self.created.append(obj)


class _Writer:
    """A status writer with a live object that follows what is written, or lags behind."""

    def __init__(self):
        self.server = _Server()
        self.live = _live()
        self.at_s = 1.8e9
        self.writer = StatusWriter(self.server, lambda _key: self.live, now_s=lambda: self.at_s, retry_s=0.0)
        self.task = None

    async def say(self, report, *, follows=True):
        before = len(self.server.applied)
        self.writer.say(KEY, report)
        await self.settle()
        if follows and self.server.applied:
            self.live = {**self.live, "status": self.server.applied[-1]}
        return len(self.server.applied) - before

    async def settle(self):
        for _ in range(10):
            await asyncio.sleep(0)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.writer.run())
        await self.settle()
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.wait({self.task})


@pytest.fixture(name="status")
async def _status():
    async with _Writer() as made:
        yield made


# ---------------------------------------------------------------- status


async def test_a_report_is_written_whole_and_only_once(status):
    """Section and condition; then silence, however often it is said."""
    assert await status.say(CALM) == 1
    (written,) = status.server.applied
    assert written["planner"] == {
        "lastDecision": "decode 2 -> 3: KV 0.93 > 0.90",
        "decisionId": "d000012",
        "decisionTime": "2026-11-22T07:30:00Z",
        "gpus": 3,
        "budget": 8,
    }
    assert written["conditions"] == [
        {
            "type": "PlannerActive",
            "status": "True",
            "reason": "Observing",
            "message": "decides every 30 s",
            "observedGeneration": 3,
            "lastTransitionTime": "2027-01-15T08:00:00Z",
        }
    ]
    assert [await status.say(CALM) for _ in range(5)] == [0] * 5


async def test_what_the_last_planner_wrote_is_not_written_again(status):
    """A restart writes nothing."""
    status.live = _live(CALM)
    assert await status.say(CALM) == 0


async def test_a_write_that_the_watch_does_not_show_yet_is_believed(status):
    """And after half a minute it is no longer: somebody has overwritten it."""
    assert await status.say(CALM, follows=False) == 1
    assert await status.say(CALM, follows=False) == 0
    status.at_s += 31
    assert await status.say(CALM, follows=False) == 1


async def test_back_and_forth_is_written_although_the_watch_lags(status):
    """A, B, A: the live object still shows the first A."""
    status.live = _live(CALM)
    busy = replace(CALM, reason=PlannerReason.ADJUSTING)
    assert await status.say(busy, follows=False) == 1
    assert await status.say(CALM, follows=False) == 1
    assert [s["conditions"][0]["reason"] for s in status.server.applied] == ["Adjusting", "Observing"]


async def test_the_transition_time_is_that_of_the_status_not_of_the_reason(status):
    """Observing and Adjusting are both True."""
    status.live = _live(CALM)
    await status.say(replace(CALM, reason=PlannerReason.ADJUSTING))
    await status.say(replace(CALM, reason=PlannerReason.METRICS_MISSING))
    first, second = (s["conditions"][0] for s in status.server.applied)
    assert (first["status"], first["lastTransitionTime"]) == ("True", "2026-01-01T00:00:00Z")
    assert (second["status"], second["lastTransitionTime"]) == ("False", "2027-01-15T08:00:00Z")


async def test_what_could_not_be_written_is_tried_again(status):
    """The newest report, not the one that failed."""
    status.server.failures = [UnavailableError("busy"), UnavailableError("busy")]
    assert await status.say(CALM) == 1


async def test_a_graph_that_is_gone_is_not_written(status):
    """Neither now nor repeatedly."""
    status.server.failures = [NotFoundError("gone")]
    assert await status.say(CALM) == 0
    status.live = None
    assert await status.say(replace(CALM, gpus=4)) == 0


def test_without_a_ceiling_there_is_no_budget():
    """Left out, not null or infinite."""
    assert "budget" not in replace(CALM, budget=None).planner
    assert is_said(replace(CALM, budget=None), _live(replace(CALM, budget=None))["status"])


def test_a_new_planner_keeps_what_was_said_about_decisions():
    """The last decision stays the last decision."""
    report = last_report(_live(CALM), PlannerReason.DISABLED, "spec.planner.enabled is false")
    assert report.planner == CALM.planner
    assert report.condition["status"] == "False"


async def _said(world, seconds):
    """Return the distinct (reason, lastDecision) of a run, in order."""
    said = []
    listener = StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append)
    world.watch(listener)
    await world.run_until(seconds)
    distinct = []
    for report in said:
        shown = (report.reason.value, report.decision_id, report.gpus)
        if not distinct or distinct[-1] != shown:
            distinct.append(shown)
    return distinct


async def test_a_run_reports_only_its_changes(world):
    """Observing, a decision, adjusting, observing again: four reports in a minute of sixty ticks."""
    world.load.kv = lambda now, _workers: 0.95 if now <= 1030 else 0.7
    assert await _said(world, 60) == [
        ("Observing", "", 2),
        ("Observing", "d000001", 2),
        ("Adjusting", "d000001", 3),
        ("Observing", "d000001", 3),
    ]


@pytest.mark.parametrize(
    ("unknown", "seconds", "reasons"),
    [
        (((1005, 1008), (1012, 1029)), 40, ["Observing", "MetricsMissing", "Observing"]),
        (((1011, 1999),), 95, ["Observing", "MetricsMissing"]),
    ],
    ids=["after more than a hiccup, until the first known pull", "over the ends of intervals"],
)
async def test_metrics_that_nobody_knows_are_reported_after_a_while(world, unknown, seconds, reasons):
    """A new interval begins without a pull, which says nothing about the metrics."""
    world.load.kv = lambda now, _workers: None if any(a < now <= b for a, b in unknown) else 0.7
    assert [reason for reason, *_ in await _said(world, seconds)] == reasons


@pytest.mark.parametrize(("mode", "reasons"), [(Mode.ADAPTIVE, ["MetricsMissing"]), (Mode.LOAD, [])])
async def test_a_demand_that_no_router_tells_is_reported_where_it_is_needed(world, mode, reasons):
    """KV usage and queue are known all along; mode load does not look at the demand."""
    world.config = replace(world.config, mode=mode)
    world.load.demand = lambda now: Demand(period_s=1.0) if now < 1005 else None
    assert [reason for reason, *_ in await _said(world, 25)] == ["Observing", *reasons]


async def test_a_role_that_backs_off_or_is_left_to_others_is_reported_and_an_edit_has_its_decision(world):
    """Why the planner does not act, in the words of whoever refuses; then who scales, and from which decision on."""
    said = []
    world.watch(StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append))
    world.backend.never_ready, world.backend.gives_up_s = frozenset({D}), 5.0
    world.load.kv = lambda now, _workers: 0.95
    world.edit_at(70.0, D, 3)
    await world.run_until(65)
    assert said[-1].reason is PlannerReason.BACKING_OFF
    assert said[-1].message.startswith("decode: exited with code 1 five times: no CUDA device; retried")
    assert said[-1].message.endswith("; prefill: decides every 30 s")
    before = said[-1].decision_id
    await world.run_until(75)
    assert said[-1].reason is PlannerReason.SCALED_BY
    assert said[-1].message.startswith("decode is scaled by another writer: the planner does not scale it")
    world.load.kv = lambda now, _workers: 0.7
    await world.run_until(135)
    assert said[-1].decision_id > before
    assert said[-1].last_decision.startswith("decode 3: KV ")
    assert seconds(said[-1].decision_time) == 1.7e9 + 1100
    assert said[-1].earlier[0]["decisionId"] == before


async def test_a_held_edit_adds_one_decision_not_one_each_interval(world):
    """While a role is left to who edited it, its decisions repeat each other and would push out those that changed something."""
    world.config = replace(world.config, mode=Mode.ADAPTIVE)
    world.load.demand = lambda now: Demand(period_s=1.0)
    world.load.kv = lambda now, _workers: 0.5
    world.edit_at(20.0, D, 3)
    said = []
    world.watch(StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append))
    await world.run_until(120)
    assert PlannerReason.SCALED_BY in {report.reason for report in said}
    assert len({report.decision_id for report in said if report.decision_id}) == 1
    assert said[-1].last_decision.startswith("decode 3: ")


def test_a_report_keeps_ten_decisions_through_a_restart():
    """Newest first, read back from the status, so that who starts later shows them, too."""
    report = Report(PlannerReason.OBSERVING, "", 1)
    for number in range(12):
        report = report.after(f"decode {number}", f"d{number}", f"2026-11-22T07:{number}0:00Z")
    live = {"metadata": {"generation": 1}, "status": {"planner": report.planner}}
    assert last_report(live, PlannerReason.OBSERVING, "") == report
    assert [each["decisionId"] for each in report.earlier] == [f"d{number}" for number in range(10, 1, -1)]
    assert report.planner["earlier"][0]["sentence"] == "decode 10"
    assert Report(PlannerReason.OBSERVING, "", 1).after("s", "d", "").earlier == ()


async def test_each_role_has_its_own_reason(world):
    """Prefill belongs to another writer, decode's pods are refused: neither hides the other."""
    said = []
    world.watch(StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append))
    world.backend.never_ready, world.backend.gives_up_s = frozenset({D}), 5.0
    world.load.kv = lambda now, _workers: 0.95
    world.edit_at(63.0, Role.PREFILL, 2)
    await world.run_until(65)
    both = [each.message for each in said if each.reason is PlannerReason.SCALED_BY]
    assert both[-1].startswith("prefill is scaled by another writer: the planner does not scale it")
    assert "; decode: exited with code 1 five times: no CUDA device; retried" in both[-1]
    assert "decides every" not in both[-1]


async def test_a_backend_that_cannot_be_read_makes_the_planner_blind(world):
    """GPUs stay as last seen."""
    observe = world.backend.observe

    async def failing():
        world.backend.fails = 1005 <= world.time.at_s < 1010
        return await observe()

    world.backend.observe = failing
    assert await _said(world, 20) == [
        ("Observing", "", 2),
        ("TargetUnavailable", "", 2),
        ("Observing", "", 2),
    ]


# ---------------------------------------------------------------- events


async def _written(server, *notes, regarding=None, **bounds):
    writer = DecisionEventWriter(server, instance="planner-0", now_s=lambda: 1.8e9, **bounds)
    for note in notes:
        writer.emit(regarding or _live(), note)
    task = asyncio.create_task(writer.run())
    await writer.written()
    task.cancel()
    await asyncio.wait({task})
    return writer


async def test_events_that_cannot_be_written_are_counted_and_stop_nothing():
    """The next one is written."""
    server = _Server()
    server.failures = [UnavailableError("busy")]
    writer = await _written(server, EventMessage("A", "a"), EventMessage("B", "b"))
    assert (writer.dropped, [e["reason"] for e in server.created]) == (1, ["B"])


async def test_more_events_than_can_wait_are_dropped():
    """Memory is bounded."""
    writer = await _written(_Server(), *[EventMessage("A", str(i)) for i in range(5)], max_waiting=2)
    assert writer.dropped == 3


async def test_every_change_is_an_event_with_its_sentence_and_id(world):
    """Scaled up, withdrawn with a warning; holding is none."""
    notes = []
    listener = EventListener(notes.append)
    world.watch(listener)
    world.backend.never_ready, world.backend.gives_up_s = frozenset({D}), 5.0
    world.load.kv = lambda now, _workers: 0.95 if now <= 1030 else 0.7
    await world.run_until(100)
    assert [(n.reason, n.is_warning) for n in notes] == [("ScaledUp", False), ("ScaleUpRolledBack", True)]
    assert notes[0].note == "decode 1 -> 2: KV 0.95 > 0.90 (d000001)"
    assert notes[1].note.endswith("no CUDA device (d000002)")


def _limited(at_s, binds="maxGpuBudget 6", expect="unbounded TTFT", name="limit"):
    step = Step(name, {"binds": binds}, 3, f"{binds} binds: expect {expect}")
    role = RoleDecision(D, 3, 3, Action.HOLD, Reason.GPU_BUDGET, "decode 3: held", (step,))
    return Decision("d000001", at_s, False, (role,), 6, 6, 6)


async def test_the_condition_names_keys_without_effect(world):
    """Alongside what the planner does, for as long as they are there."""
    said = []
    first = Report(PlannerReason.OBSERVING, "", 1)
    listener = StatusListener(first, world.config, say=said.append, unused="engine.x has no effect here")
    await world.run_until(2)
    listener.tick(world.watcher.views[-1])
    assert said[-1].message == "decides every 30 s; engine.x has no effect here"


async def test_the_condition_names_the_entry_of_the_schedule_that_holds_and_its_end(world):
    """Alongside what the planner does."""
    said = []
    listener = StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append)
    await world.run_until(2)
    words = "office: decode at least 2 until 2026-01-05 18:00 Europe/Berlin"
    listener.tick(replace(world.watcher.views[-1], scheduled=(words,)))
    assert said[-1].message == f"decides every 30 s; schedule {words}"


async def test_a_worker_that_no_router_hears_from_is_named_while_it_is_silent(world):
    """A frozen node's pods stay Ready for 40 s; what the planner does is still said."""
    said, silent = [], []
    first = Report(PlannerReason.OBSERVING, "", 1)
    listener = StatusListener(first, world.config, say=said.append, silent=lambda: silent)
    await world.run_until(2)
    view = world.watcher.views[-1]
    for names in ([], ["g-decode-2", "g-decode-1"], []):
        silent[:] = names
        listener.tick(view)
    assert [each.reason.value for each in said[-3:]] == ["Observing", "WorkerSilent", "Observing"]
    assert said[-2].condition["status"] == "True"
    assert said[-2].message.startswith("routers get no metrics from g-decode-1, g-decode-2: check")
    assert said[-2].message.endswith(said[-1].message)


def test_a_worker_is_silent_after_four_readings_of_the_routers():
    """Within five seconds with the default interval; routers that read more often change nothing."""
    assert [silent_after_s(each) for each in (0.2, 1.0, 10.0)] == [4.0, 4.0, 40.0]


def _shared(at_s, served, predicted):
    step = Step("hindsight", {"served_in_time": served, "predicted_in_time": predicted}, 1, "pass")
    role = RoleDecision(Role.PREFILL, 1, 1, Action.HOLD, Reason.WITHIN_CAPACITY, "prefill 1: held", (step,))
    return Decision("d000001", at_s, False, (role,), 2, 2, 2)


async def test_the_status_has_the_share_served_and_the_one_predicted_and_writes_them_once_a_minute(world):
    """Not before a decision knows them; figures of the same minute are not news; another planner keeps them."""
    said = []
    listener = StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append)
    await world.run_until(2)
    view = world.watcher.views[-1]
    shown = []
    for decision in (
        _shared(0, None, None),
        _shared(2, 0.9821, 0.9912),
        _shared(30, 0.5, 0.6),
        _shared(62, 1.0, 0.5),
    ):
        listener.decided(decision, view)
        listener.tick(view)
        planner = said[-1].planner
        shown.append((planner.get("servedInTime"), planner.get("predictedInTime")))
    assert shown == [(None, None), ("98.2%", "99.1%"), ("98.2%", "99.1%"), ("100.0%", "50.0%")]
    kept = last_report(_live(said[-1]), PlannerReason.OBSERVING, "").planner
    assert (kept["servedInTime"], kept["predictedInTime"]) == ("100.0%", "50.0%")


def _bidding(prefill, decode, **changes):
    roles = [
        RoleDecision(role, 1, 1, Action.HOLD, Reason.WITHIN_CAPACITY, "held", (step,))
        for role, step in (
            (role, Step("pool", {"replicas_wanted": n, "floor": 1, "gpus_per_engine": 2}, 4, "pass"))
            for role, n in ((Role.PREFILL, prefill), (D, decode))
        )
    ]
    return replace(_shared(0, None, None), roles=tuple(roles), **changes)


async def test_the_status_has_what_the_planner_wants_of_a_pool_until_it_wants_something_else(world):
    """A decision that says nothing of it leaves it, so does another planner; one that carries nothing out bids for nothing."""
    said = []
    first = Report(PlannerReason.OBSERVING, "", 1)
    listener = StatusListener(first, world.config, say=said.append)
    await world.run_until(2)
    view = world.watcher.views[-1]
    shown = []
    for decision in (
        _shared(0, None, None),
        _bidding(3, 2),
        _shared(0, None, None),
        _bidding(0, 0),
        _bidding(4, 1, no_operation=True),
    ):
        listener.decided(decision, view)
        listener.tick(view)
        shown.append(said[-1].planner.get("wants"))
    zero = {"prefill": 0, "decode": 0}
    assert said[-1].planner["wantsTime"] == stamp(view.wall_s // 60 * 60)
    assert "wantsTime" not in said[0].planner
    assert shown == [None, {"prefill": 3, "decode": 2}, {"prefill": 3, "decode": 2}, zero, zero]
    kept = last_report(_live(said[-1]), PlannerReason.OBSERVING, "")
    assert kept.planner["wants"] == zero
    StatusListener(kept, replace(world.config, no_operation=True), say=said.append).tick(view)
    assert "wants" not in said[-1].planner


async def test_the_condition_tells_which_limit_binds_and_changes_its_words_no_more_often_than_each_minute(
    world,
):
    """New figures under the same limit are not news; another limit is after a minute, and none after a minute without."""
    said = []
    listener = StatusListener(Report(PlannerReason.OBSERVING, "", 1), world.config, say=said.append)
    await world.run_until(40)
    view = world.watcher.views[-1]
    words = []
    for decision in (
        _limited(0),
        _limited(2, expect="TTFT of 3 s"),
        _limited(4, binds="maxReplicas 3 of decode"),
        _limited(30, name="demand"),
        _limited(64, binds="maxReplicas 3 of decode"),
        _limited(100, name="demand"),
        _limited(130, name="demand"),
    ):
        listener.decided(decision, view)
        listener.tick(view)
        words.append(said[-1].message)
    first, second = (
        f"decides every 30 s; decode: {binds} binds: expect unbounded TTFT"
        for binds in ("maxGpuBudget 6", "maxReplicas 3 of decode")
    )
    assert words == [first, first, first, first, second, second, "decides every 30 s"]
