"""The status: put together, followed, drawn."""

import io
import json

import pytest
from rich.console import Console

from penstock.core.kv_transfers import KvTransferCounts
from penstock.core.local_state import EntryState
from penstock.local.probes import RouterQueue, RouterView, Traffic, WorkerView
from penstock.local.render import render
from penstock.local.status import LedgerTail, LineFollower, PlannerView, read_planner, summarise


@pytest.fixture
def state(state_of, entry_of):
    """Return a graph with workers in several states."""
    made = state_of("n", budget=8, model="llama", speed=20.0)
    for order, (name, value) in enumerate(
        (("n_decode", "ready"), ("n_decode_1", "ready"), ("n_decode_2", "draining"), ("n_decode_3", "failed"))
    ):
        gpus = () if value == "failed" else (order,)
        reason = "exit code 3: boom" if value == "failed" else None
        made = made.with_entry(
            name, entry_of("decode", state=EntryState(value), gpus=gpus, reason=reason, restarts=order)
        )
    return made.with_entry("n_prefill", entry_of("prefill", "prefill", state=EntryState.STOPPED))


@pytest.fixture
def summary(state):
    """Return its status with a router that sees one worker unhealthy."""
    router = RouterView(
        workers={
            "n_decode": WorkerView("ready", 3, 4096.0, 0.42, None),
            "n_decode_1": WorkerView("circuit_open", 0, 0.0, None, "5 errors in a row"),
        },
        queue=RouterQueue(7, 900, 1.5),
        lag_p99_s=2.5,
        traffic=Traffic(60.0, 240, 120, 7.25, 31.0, 5.0),
    )
    planner = PlannerView("observing", 12.0, 0.01)
    return summarise(state, running=True, router=router, planner=planner, decisions=())


def test_pools_gpus_and_the_routers_view_are_put_together(summary):
    """The router's worse opinion of a ready worker is shown; draining GPUs count as used."""
    by_name = {process.name: process for process in summary.processes}
    assert by_name["n_decode"].inflight_tokens == 4096
    assert (by_name["n_decode_1"].state, by_name["n_decode_1"].reason) == (
        "circuit_open",
        "5 errors in a row",
    )
    assert "n_prefill" not in by_name
    pool = next(pool for pool in summary.pools if pool.role == "decode")
    # A worker that hangs has an open circuit: it is running, and not ready.
    assert (pool.ready, pool.desired, pool.draining, pool.failed) == (1, 2, 1, 1)
    assert (summary.gpus_used, summary.gpu_budget) == (3, 8)
    assert summary.lag_p99_s == {"router": 2.5, "planner": 0.01}


@pytest.mark.parametrize(("served", "shown"), [(True, "unhealthy"), (False, "starting")])
def test_a_worker_with_a_fault_is_starting_only_before_it_was_ever_ready(state, entry_of, served, shown):
    """One that dies at its start keeps that state with its reason; one that was ready has the router's."""
    entry = entry_of("decode", state=EntryState.STARTING, reason="exit code 2: bad flag", served=served)
    view = WorkerView("unhealthy", 0, 0.0, None, "connection refused")
    router = RouterView(workers={"n_decode": view}, queue=None)
    status = summarise(
        state.with_entry("n_decode", entry), running=True, router=router, planner=None, decisions=()
    )
    found = next(each for each in status.processes if each.name == "n_decode")
    assert (found.state, found.reason) == (shown, "exit code 2: bad flag")


def test_transfers_that_do_not_come_are_shown(state):
    """Prompts that decode computes again are seen in the status of a graph that answers everything."""
    router = RouterView(workers={}, queue=None, kv_transfers=KvTransferCounts(done=1, none=3))
    page = io.StringIO()
    status = summarise(state, running=True, router=router, planner=None, decisions=())
    Console(width=80, file=page).print(render(status))
    assert "KV transfers since the router started: 1 done, 3 none, 0 lost" in page.getvalue()


LONG = "gave up after 5 failures in a row; the last: exit code 1: CUDA error: device-side assert " * 2


def test_at_80_columns_a_reason_is_readable_and_no_figure_is_cut(state, entry_of):
    """Reasons stand below the table over the whole width; all states, figures and GPUs are whole."""
    name = "n_a-service-with-a-long-name_1"
    entry = entry_of("x", state=EntryState.FAILED, reason=LONG, restarts=1234, gpus=(10, 11, 12, 13))
    workers = {name: WorkerView("ready", 123_456, 1_234_567.0, 0.99, None)}
    router = RouterView(workers=workers, queue=RouterQueue(7, 900, 1.5), lag_p99_s=2.5)
    status = summarise(state.with_entry(name, entry), running=True, router=router, planner=None, decisions=())
    page = io.StringIO()
    Console(width=80, file=page).print(render(status))
    text = page.getvalue()
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for word in ("failed", "123,456", "1,234,567", "99%", "1234", "10,11,12,13"):
        assert word in text
    assert " ".join(LONG.split()) in " ".join(text.split())
    assert len([line for line in text.splitlines() if "CUDA" in line]) == 2


def test_of_a_silent_planner_only_the_silence_is_shown(state):
    """What it wrote before it hung, such as when it decides next, contradicts it."""
    planner = PlannerView("observing", 1.0, None, silent_real_s=53.0)
    status = summarise(state, running=True, router=None, planner=planner, decisions=())
    page = io.StringIO()
    Console(width=200, file=page).print(render(status))
    assert "planner silent for 53 s (real)" in page.getvalue()
    assert "observing" not in page.getvalue()
    assert "decides in" not in page.getvalue()


def record(number, sentence="decode 1 -> 2: KV 0.93 > 0.90", desired=2):
    """Return one decision's ledger line."""
    role = {
        "role": "decode",
        "current": 1,
        "desired": desired,
        "reason": "above_threshold",
        "sentence": sentence,
    }
    decision = {"id": f"d{number:06d}", "roles": [role]}
    return (
        json.dumps({"type": "decision", "at_s": 100.0 + number, "origin_s": 100.0, "decision": decision})
        + "\n"
    )


def test_the_ledger_is_followed_line_by_line(tmp_path):
    """A torn last line is taken when it is whole; other records and garbage are passed over."""
    path = tmp_path / "ledger.jsonl"
    tail = LedgerTail(str(tmp_path))
    assert tail.newest() == ()
    path.write_text('{"type": "pull"}\nnot json\n' + record(1) + record(2)[:20])
    assert [decision.id for decision in tail.newest()] == ["d000001"]
    assert tail.newest()[0].at_s == 1.0
    with path.open("a") as file:
        file.write(record(2)[20:])
    assert [decision.id for decision in tail.newest()] == ["d000001", "d000002"]


def test_changes_are_shown_and_what_holds_on_request(tmp_path):
    """A planner that decides every two seconds would fill the table with no-ops; a flag lists them."""
    held = [record(number, "decode 2: supply matches demand", desired=1) for number in range(2, 40)]
    (tmp_path / "ledger.jsonl").write_text(record(1) + "".join(held))
    tail, everything = LedgerTail(str(tmp_path)), LedgerTail(str(tmp_path), with_unchanged=True)
    assert [each.id for each in tail.newest()] == ["d000001"]
    assert [each.id for each in everything.newest()] == [f"d{number:06d}" for number in range(32, 40)]


@pytest.mark.parametrize(
    ("content", "pid", "expected"),
    [
        (
            '{"pid": 7, "phase": "observing", "at_s": 10, "next_decision_s": 25, "lag_p99_s": 0.5}',
            7,
            (15.0, 0.5),
        ),
        (
            '{"pid": 7, "phase": "adjusting", "at_s": 10, "next_decision_s": null, "lag_p99_s": null}',
            7,
            (None, None),
        ),
        ('{"pid": 7, "phase": "observing", "at_s": 10, "next_decision_s": 25}', 8, None),
        ("{", 7, None),
        ("[]", 7, None),
    ],
)
def test_the_planners_own_file_counts_only_for_the_running_planner(tmp_path, content, pid, expected):
    """What an earlier planner wrote, or cannot be read, is unknown."""
    (tmp_path / "state.json").write_text(content)
    view = read_planner(str(tmp_path), pid)
    assert (view and (view.next_decision_s, view.lag_p99_s)) == expected


def test_what_was_served_and_what_the_model_says_stand_side_by_side(tmp_path, state):
    """With what a former run left: its age, its time scale, and how to forget it."""
    remembered = {
        "until_wall_s": None,
        "learnt_from": "model llama, speed 20",
        "seen_s": 7200.0,
        "is_taken": True,
    }
    written = {
        "pid": 7,
        "phase": "observing",
        "at_s": 1.0,
        "newest": {"served": [0.948, 0.951]},
        "remembered": remembered,
    }
    (tmp_path / "state.json").write_text(json.dumps(written))
    page = io.StringIO()
    status = summarise(state, running=True, router=None, planner=read_planner(str(tmp_path), 7), decisions=())
    Console(width=400, file=page).print(render(status))
    assert "served 94.8% in time (predicted 95.1%)" in page.getvalue()
    assert (
        "the planner continues with what it learnt (2.0 h of demand; model llama, speed 20)"
        in page.getvalue()
    )
    assert f"penstock planner memory reset --log-dir {tmp_path}" in page.getvalue()


def test_a_file_that_shrank_is_a_new_one(tmp_path):
    """A ledger that was set aside for a new one is followed from its beginning."""
    path = tmp_path / "f"
    path.write_bytes(b"old\nold\n")
    follower = LineFollower(path)
    follower.new_lines()
    path.write_bytes(b"new\n")
    assert follower.new_lines() == [b"new"]
