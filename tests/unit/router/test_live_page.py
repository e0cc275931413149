"""The live page: who may see it, what it says of fleet, traffic and planner, and how a browser shows it."""

import os
import re
import shutil
import subprocess
import time

import orjson
import pytest

from penstock.api import GraphSpec
from penstock.core.errors import NotFoundError
from penstock.router.metrics import RouterMetrics
from penstock.router.ui.history import RouterHistory
from penstock.router.ui.planner import GraphStatusReader, graph_planner_state, pool_of_status

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SPEC = {
    "model": {"name": "llama"},
    "services": {
        "frontend": {"role": "router"},
        "prefill": {"role": "prefill", "replicas": 1, "gpusPerReplica": 2},
        "decode": {"role": "decode", "replicas": 1, "gpusPerReplica": 1},
    },
    "planner": {"mode": "load", "maxGpuBudget": 6},
}
DECODE_GROWS = "decode 1 -> 2: KV 0.95 > 0.90"
CHANGE = {
    "id": "d000007",
    "at_s": 30.0,
    "roles": {
        "decode": {"current": 1, "desired": 2, "sentence": DECODE_GROWS, "reason": "kv_above"},
        "prefill": {"current": 1, "desired": 1, "sentence": "prefill 1: short queue", "reason": "held"},
    },
}


def planner_file(**other):
    """What a planner writes of itself."""
    rules = {
        "mode": "load",
        "kv": [0.5, 0.9],
        "queue": [0.2, 0.5],
        "is_queue_per_worker": False,
        "ttft_s": 5.0,
        "itl_s": None,
    }
    return {
        "wall_s": time.time(),
        "at_s": 140.0,
        "elapsed_s": 40.0,
        "phase": "observing",
        "next_decision_s": 150.0,
        "desired": {"prefill": 1, "decode": 2},
        "gpus": 4,
        "max_gpu_budget": 6,
        "decisions": [CHANGE],
        "newest": CHANGE,
        "rules": rules,
        **other,
    }


@pytest.fixture
async def graph(harness, tmp_path):
    """Start a router whose statefile names a planner; returns it and what writes the planner's file."""

    async def start(content=None, *, workers=None, **settings):
        workers = workers or await harness.pair()
        path = harness.write_state(workers)
        state = orjson.loads(path.read_bytes())
        state["arbiter"]["planner_log_dir"] = str(tmp_path)
        path.write_bytes(orjson.dumps(state))
        if content is not None:
            (tmp_path / "state.json").write_bytes(orjson.dumps(content))
        spec = GraphSpec.model_validate(SPEC)
        return await harness.router(statefile=harness.statefile, disaggregated=True, graph=spec, **settings)

    return start


async def state_of(router, **headers):
    """Return the page's state."""
    pairs = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    answer = await router.get("/ui/state", headers=pairs)
    return answer.status, orjson.loads(answer.body)


async def test_the_state_says_what_fleet_and_planner_do(graph):
    """Replicas with the planner's wish, GPUs against its budget, signals against its thresholds, its changes."""
    router = await graph(planner_file())
    await router.post(max_tokens=2)
    status, state = await state_of(router, sec_fetch_site=b"same-origin")
    assert status == 200
    pools = [(each["role"], each["ready"], each["desired"]) for each in state["pools"]]
    assert pools == [("prefill", 1, 1), ("decode", 1, 2)]
    assert state["gpus"] == {"used": 3, "budget": 6}
    signals = {each["name"]: each for each in state["signals"]}
    assert (signals["queue"]["down"], signals["queue"]["up"]) == (0.2, 0.5)
    assert signals["KV usage of decode"]["value"] in {0.25, None}
    assert signals["KV usage of decode"]["up"] == 0.9
    assert state["planner"]["status"] == "current"
    assert state["planner"]["next_decision_s"] == 10.0
    (change,) = state["planner"]["changes"]
    assert (change["sentence"], change["reason"]) == (DECODE_GROWS, "kv_above")
    assert (state["minute"]["arrivals"], state["minute"]["completed"]) == (1, 1)
    assert await router.metric("penstock_router_requests_total", endpoint="other", code="200") == 0


async def test_the_other_graphs_of_a_machine_are_shown(graph, harness, tmp_path):
    """Each with its replicas, GPUs, planner and newest change, and the port of its own page; no file breaks the page."""
    router = await graph(planner_file())
    assert (await state_of(router))[1]["graphs"] == []
    log = tmp_path / "other"
    log.mkdir()
    (log / "state.json").write_bytes(orjson.dumps(planner_file()))
    other = {
        "arbiter": {"namespace": "agents", "pid": os.getpid(), "budget": 4, "planner_log_dir": str(log)},
        "agents-router": {"role": "router", "state": "ready", "url": "http://127.0.0.1:8100"},
        "agents-decode": {"role": "decode", "state": "ready", "resources": {"gpus": [0, 1]}},
        "agents-decode-1": {"role": "decode", "state": "starting", "resources": {"gpus": [2]}},
        "agents-decode-2": {"role": "decode", "state": "stopped"},
    }
    folder = harness.statefile.parent
    (folder / "agents.json").write_bytes(orjson.dumps(other))
    (folder / "batch.json").write_bytes(orjson.dumps({"arbiter": {"pid": 2**22 + 1}}))
    (folder / "broken.json").write_text("[")
    quiet = {"arbiter": {"pid": os.getppid(), "planner_log_dir": str(tmp_path / "nowhere")}}
    (folder / "quiet.json").write_bytes(orjson.dumps(quiet))
    first, second, third = (await state_of(router))[1]["graphs"]
    assert first == {
        "name": "agents",
        "port": 8100,
        "pools": [{"role": "decode", "ready": 1, "total": 2}],
        "gpus": {"used": 3, "budget": 4},
        "planner": "observing",
        "change": DECODE_GROWS,
    }
    assert (second["name"], second["port"], second["planner"]) == ("batch", None, "its supervisor is gone")
    assert (third["planner"], third["change"]) == ("planner not heard of", "")


async def test_the_pool_of_a_machine_is_shown(graph, harness):
    """Who holds, who wants and who waits for whom; a graph that has left is left out, a broken file breaks nothing."""
    router = await graph(planner_file())
    assert (await state_of(router))[1]["pool"] is None
    folder, state = harness.statefile.parent, orjson.loads(harness.statefile.read_bytes())
    state["arbiter"]["pool"] = "p"
    harness.statefile.write_bytes(orjson.dumps(state))
    assert (await state_of(router))[1]["pool"] is None
    worker = {"role": "decode", "state": "ready", "resources": {"gpus": [0, 1, 2]}}
    (folder / "batch.json").write_bytes(orjson.dumps({"arbiter": {}, "batch_decode": worker}))
    member = {"guaranteed": 2, "starts_on": [3], "is_arriving": True}
    grants = {
        "batch": {"gpus": 2, "serial": 2, "target": 2, "wanted": 3},
        "chat": {"gpus": 1, "serial": 1, "target": 2, "wanted": 2},
    }
    members = {"batch": member, "chat": member, "gone": {**member, "is_arriving": False}}
    content = {"name": "p", "gpus": 4, "members": members, "grants": grants}
    (folder / "p.pool").write_bytes(orjson.dumps(content))
    shown = (await state_of(router))[1]["pool"]
    assert (shown["name"], shown["gpus"]) == ("p", 4)
    assert [(each["graph"], each["held"], each["waits_for"]) for each in shown["graphs"]] == [
        ("batch", 3, []),
        ("chat", 1, ["batch"]),
    ]
    (folder / "batch.json").write_text("{")
    assert (await state_of(router))[1]["pool"] is None


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (None, "missing", "has not written of itself yet"),
        ({"wall_s": 1.0}, "missing", "not readable"),
        (planner_file(wall_s=1_700_000_000.0), "stale", ""),
    ],
)
async def test_a_planner_that_is_not_there_is_shown_as_missing(graph, content, status, words):
    """Neither its absence nor its silence is taken for calm; the graph's own budget and thresholds stay."""
    router = await graph(content)
    _, state = await state_of(router)
    assert state["planner"]["status"] == status
    assert words in state["planner"]["message"]
    assert any("it hangs or is gone" in each for each in state["problems"]) is (status == "stale")
    assert state["planner"]["next_decision_s"] is None
    assert (state["gpus"]["budget"], state["planner"]["rules"]["mode"]) == (6, "load")


@pytest.mark.parametrize(
    ("settings", "headers", "page", "state"),
    [
        ({}, {}, 200, 200),
        ({}, {"sec_fetch_site": b"cross-site"}, 200, 403),
        ({}, {"origin": b"http://127.0.0.1"}, 200, 403),
        ({}, {"x_forwarded_for": b"10.0.0.9"}, 200, 403),
        ({"api_keys": frozenset({b"client"})}, {}, 403, 403),
        ({"api_keys": frozenset({b"client"})}, {"authorization": b"Bearer client"}, 403, 403),
        ({"admin_keys": frozenset({b"admin"})}, {}, 200, 401),
        ({"admin_keys": frozenset({b"admin"})}, {"authorization": b"Bearer admin"}, 200, 200),
    ],
)
async def test_the_state_is_for_administrators(harness, settings, headers, page, state):
    """Open to programs of this machine, else by the admin key or off; the page without facts needs no key."""
    _, router = await harness.served("aggregated", **settings)
    assert (await state_of(router, **headers))[0] == state
    answer = await router.get("/ui")
    assert answer.status == page
    if page == 200:
        assert b"default-src 'none'" in answer.headers[b"content-security-policy"]
        assert not re.search(rb"(?:src|href)=.?(?:https?:)?//", answer.body)
    assert (await router.get("/ui/other")).status == 404
    assert (await router.post("/ui")).status == 405


async def test_what_is_wrong_is_on_the_page(graph, monkeypatch):
    """The planner's own problems, a full disk alongside them; a router that rejects is overloaded, not calm."""
    gone = "metrics source prometheus is gone: refused"
    router = await graph(planner_file(problems=[gone]))
    _, state = await state_of(router)
    assert (state["problems"], state["is_overloaded"]) == ([gone], False)
    monkeypatch.setattr(
        "penstock.router.ui.planner.full_disks",
        lambda folders: tuple(f"the disk of {folder} is full" for folder in folders),
    )
    metrics = router.server.context.metrics
    metrics.arrivals += 100
    metrics.refused += 20
    _, state = await state_of(router)
    assert any("is full" in each for each in state["problems"])
    assert state["is_overloaded"]


async def test_chart_and_table_have_one_figure(graph):
    """What has come since the last mark is in both."""
    router = await graph(planner_file())
    await router.post(max_tokens=3, stream=True)
    _, state = await state_of(router)
    now, minute = state["series"][-1], state["minute"]
    assert minute["ttft"]["p99_s"] is not None
    for name in ("ttft", "itl"):
        assert now[f"{name}_p99_s"] == minute[name]["p99_s"]
        assert now[f"{name}_in_time"] == minute[name]["in_time"]


async def test_a_fixed_fleet_says_that_nothing_scales_it(harness):
    """Without a graph the GPUs are unknown, not zero, and a minute of tiers is told by tier."""
    _, router = await harness.served("aggregated", config={"tiers": {"enabled": True}})
    await router.post(max_tokens=2)
    _, state = await state_of(router)
    assert (state["planner"]["status"], state["gpus"]["used"], state["cost"]) == ("off", None, None)
    tiers = {each["tier"]: each for each in state["tiers"]}
    assert (tiers["standard"]["arrivals"], tiers["standard"]["shed"]) == (1, 0)
    assert tiers["premium"]["arrivals"] == 0


def test_history_marks_the_last_quarter_of_an_hour():
    """Rates of a step, latencies of a minute, a rejected request counted as late; GPU-seconds of the whole time."""
    metrics, gpus = RouterMetrics(), [2]
    history = RouterHistory(metrics, None, lambda: {"gpus": gpus[0], "kv_usage_fraction": None}, 1.0)
    history.itl_target_s = 0.01
    for second in range(1201):
        if second == 600:
            gpus[0] = 4
        history.tick(float(second))
        metrics.arrivals += 2
        metrics.refused += second % 2
        metrics.ttft.observe(0.5)
        metrics.itl.observe(0.02, 3)
    series = list(history.points)
    assert (len(series), series[-1]["at_s"] - series[0]["at_s"]) == (180, 895.0)
    last = series[-1]
    assert (last["arrivals_per_s"], last["gpus"], last["kv_usage_fraction"]) == (2.0, 4, None)
    assert last["ttft_in_time"] == pytest.approx(2 / 3)
    minute = history.minute(1201.0)
    assert (minute["arrivals"], minute["itl"]["in_time"]) == (112, 0.0)
    cost = history.cost.to_json(8)
    assert (cost["elapsed_s"], cost["gpu_seconds"]) == (1200.0, 600 * 2 + 600 * 4)
    fixed = {name: each["gpu_seconds"] for name, each in cost["fixed"].items()}
    assert fixed == {"peak": 4800.0, "budget": 9600.0}


def test_complete_answers_have_no_share_in_time():
    """One rejection among requests without a first token does not make the share zero."""
    metrics = RouterMetrics()
    history = RouterHistory(metrics, None, lambda: {"gpus": None}, 1.0)
    history.tick(0.0)
    metrics.arrivals, metrics.refused, metrics.completed = 9, 1, 8
    minute = history.minute(10.0)
    assert (minute["refused"], minute["ttft"]["in_time"], minute["ttft"]["p99_s"]) == (1, None, None)
    assert history.cost.to_json(8) is None


def graph_object(**planner):
    """A GraphDeployment as the API server has it."""
    condition = {"type": "PlannerActive", "status": "True", "reason": "Observing", "message": "decides"}
    services = {"prefill": {"desired": 1}, "decode": {"desired": 3}, "frontend": {"desired": 2}}
    return {"spec": SPEC, "status": {"planner": planner, "services": services, "conditions": [condition]}}


def test_on_kubernetes_the_graphs_object_says_it():
    """Wishes by role, budget and thresholds from its spec; the last changes from its status, whenever the router started."""
    earlier = [{"decisionId": "d1", "sentence": "decode 1 -> 2"}]
    last = {"lastDecision": "decode 2 -> 3", "decisionId": "d2", "decisionTime": "2026-11-22T07:30:00Z"}
    state = graph_planner_state(graph_object(**last, earlier=earlier))
    assert (state.status, state.desired, state.budget) == ("current", {"prefill": 1, "decode": 3}, 6)
    assert state.gpus_per_replica == {"prefill": 2, "decode": 1, "aggregated": 1}
    shown = [(each["id"], each["time"], each["sentence"]) for each in state.changes]
    assert shown == [("d2", "2026-11-22T07:30:00Z", "decode 2 -> 3"), ("d1", "", "decode 1 -> 2")]
    assert graph_planner_state(graph_object()).changes == ()
    assert graph_planner_state({"spec": SPEC}).status == "missing"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, None),
        ({"pool": {"name": "p", "grantedGpus": 2}}, "may hold 2 GPUs"),
        (
            {"pool": {"name": "p", "grantedGpus": 2, "message": "b returns 1"}},
            "may hold 2 GPUs; b returns 1",
        ),
    ],
)
def test_on_kubernetes_the_graphs_object_says_what_its_pool_grants(status, expected):
    """And who holds what it lacks, in the operator's words."""
    shown = pool_of_status({"status": status})
    assert (None if shown is None else shown["note"]) == expected


def test_on_kubernetes_the_page_shows_the_other_graphs_of_the_pool():
    """With the keys that a local pool has, from the graph's status alone; an older operator lists no graphs."""
    row = {"name": "b", "guaranteed": 2, "held": 3, "granted": 3, "wanted": 4, "waitsFor": ["c"]}
    said = {"name": "p", "grantedGpus": 2, "poolGpus": 6, "poolHeldGpus": 5, "graphs": [row]}
    shown = pool_of_status({"status": {"pool": said}})
    assert (shown["gpus"], shown["held"]) == (6, 5)
    expected = {"graph": "b", "guaranteed": 2, "held": 3, "grant": 3, "wanted": 4, "waits_for": ["c"]}
    assert shown["graphs"] == [expected]
    older = pool_of_status({"status": {"pool": {"name": "p", "grantedGpus": 2}}})
    assert (older["gpus"], older["held"], older["graphs"]) == (None, None, [])


async def test_an_api_server_that_is_away_makes_the_planner_stale():
    """What it said last stays, under why it is not current."""

    class Source:
        async def graph(self):
            if self.is_away:
                raise NotFoundError("graphdeployments llama: not found")
            return graph_object(lastDecision="decode 1 -> 2", decisionId="d1")

    source = Source()
    source.is_away = True
    reader = GraphStatusReader(source)
    assert (await reader.read()).status == "missing"
    source.is_away, reader._read_s = False, 0.0
    assert (await reader.read()).status == "current"
    source.is_away, reader._read_s = True, 0.0
    state = await reader.read()
    assert (state.status, state.changes[0]["id"]) == ("stale", "d1")
    assert "not found" in state.message


# ---------------------------------------------------------------- in a browser

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; apt-get install chromium")


def browse(url, *, width, tmp_path):
    """Return the document that a real browser makes of a page."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=4000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_browser
@pytest.mark.slow
async def test_a_browser_shows_the_running_graph(graph, tmp_path):
    """Served by the router under its own policy, the page fills itself and reports no fault."""
    import asyncio

    router = await graph(planner_file(decisions=[{**CHANGE, "id": "<i>d7</i>"}]))
    await router.post(max_tokens=2)
    shown = await asyncio.to_thread(browse, router.url + "/ui", width=1300, tmp_path=tmp_path)
    assert "decode 1 -&gt; 2: KV 0.95 &gt; 0.90" in shown
    assert "&lt;i&gt;d7&lt;/i&gt;" in shown
    assert re.search(r'<span id="status" role="status">live, ', shown)
    assert "3 <small>of 6</small>" in shown


STATES = {
    "running": ({}, 200, ["this fleet", "live,"]),
    "gone": (
        {"planner": {"status": "stale", "message": "the planner last wrote 15 s ago"}},
        200,
        ["gone or silent", "15 s ago"],
    ),
    "off": (
        {"planner": {"status": "off", "message": "a fixed fleet", "changes": []}},
        200,
        ["No planner: a fixed fleet", "Without a planner"],
    ),
    "locked": ({}, 401, ["give the router's admin key", "no access"]),
}


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("width", [1300, 380])
async def test_every_state_fits_the_screen(graph, tmp_path, monkeypatch, name, width):
    """No sideways scrolling at 380 px with 60 workers, all controls reachable, and each state in words."""
    import asyncio

    other, status, words = STATES[name]
    router = await graph(planner_file())
    await router.post(max_tokens=2)
    _, state = await state_of(router)
    state["planner"] |= other.get("planner", {})
    state["workers"][0] |= {"name": "a-worker-with-quite-a-long-name-" * 4, "reason": "x" * 200}
    state["workers"] += [
        {**state["workers"][1], "name": f"w-{number}", "slow": "4 times as slow" if number == 7 else None}
        for number in range(58)
    ]
    state["worker_count"] = 60
    pools = [{"role": "decode", "ready": 1, "total": 2}]
    alongside = {
        "port": 8100,
        "pools": pools,
        "gpus": {"used": 3, "budget": 4},
        "planner": "observing",
        "change": "",
    }
    row = {"graph": "agents", "guaranteed": 2, "held": 2, "grant": 2, "wanted": 4, "target": 3}
    state["pool"] = {
        "name": "shared",
        "gpus": 6,
        "held": 2,
        "note": "",
        "graphs": [{**row, "waits_for": ["batch"]}],
    }
    state["graphs"] = [{"name": "agents", **alongside}, {"name": "batch", **alongside, "port": None}]
    page = (await router.get("/ui")).body.decode()
    body = state if status == 200 else {"error": {"message": "missing or unknown admin key"}}
    answer = f"{{ok: {str(status == 200).lower()}, status: {status}, json: async () => ({orjson.dumps(body).decode()})}}"
    probe = "document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth"
    script = f"window.fetch = async () => ({answer}); setTimeout(() => {{ document.querySelector('details').open = true; {probe}; }}, 1500);"
    stub = tmp_path / "page.html"
    stub.write_text(page.replace("<script>", f"<script>{script}</script><script>", 1))
    shown = await asyncio.to_thread(browse, stub.as_uri(), width=width, tmp_path=tmp_path)
    assert 'data-fits="true"' in shown
    for each in words:
        assert each.replace("->", "-&gt;") in shown
    assert shown.count("<button") == 2
    if status == 200:
        assert "60 workers: 60 ready, 1 slow" in shown
        assert ":8100/ui" in shown
        assert "2 of 6 GPUs held" in shown
        assert (">no request<" in shown) is (state["minute"]["arrivals"] == 0)
        assert "waits for batch" in shown


def test_only_the_last_minute_counts():
    """Ten minutes without trouble do not hide an overload of half a minute; it is over a minute after it ended."""
    metrics = RouterMetrics()
    history = RouterHistory(metrics, None, lambda: {"gpus": None}, 5.0)
    history.tick(0.0)
    assert history.traffic(0.0)["ttft_p50_s"] is None
    for second in range(1, 721):
        is_overloaded = 600 < second <= 630
        metrics.arrivals += 4
        metrics.refused += is_overloaded
        metrics.queue_timeouts += is_overloaded
        metrics.ttft.observe(20.0 if is_overloaded else 0.5, 2)
        history.tick(float(second))
        if second == 630:
            shown = history.traffic(630.0)
            assert (shown["period_s"], shown["arrivals"], shown["rejected"]) == (60.0, 240, 60)
            assert shown["ttft_p99_s"] == pytest.approx(20.0, rel=0.1)
    quiet = history.traffic(720.0)
    assert (quiet["arrivals"], quiet["rejected"], quiet["ttft_slo_s"]) == (240, 0, 5.0)
    assert quiet["ttft_p99_s"] == pytest.approx(0.5, rel=0.1)
