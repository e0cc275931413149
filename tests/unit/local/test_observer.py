"""What the supervisor takes for a healthy process: its own answer, from its own port."""

import asyncio
import json
import os
import signal
import socket
from types import SimpleNamespace

import psutil
import pytest
from states import make_state, serving

from penstock.core.http.client import Timeouts
from penstock.local import observer as observer_module
from penstock.local import probes
from penstock.local.liveness import ProcessorTime, computed_by_children, holds_port, identify
from penstock.local.observer import ProcessObserver
from penstock.local.plan import ObservedProcess, ProcessFault
from penstock.local.statefile import ProcessId

SERVER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(3600)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SERVER!r}], env={{}})
time.sleep(3600)
"""


@pytest.fixture
async def foreign():
    """Yield the port of a server in this process that answers every health check with 200."""
    async with serving(lambda _request, responder: responder.send(200, b"{}")) as port:
        yield port


@pytest.mark.parametrize("code", [SERVER, PARENT])
def test_a_port_is_held_by_a_process_or_its_children_and_by_no_other(spawn, code):
    """A worker may leave listening to a child; another process' port is not its own."""
    process, other = spawn(code), spawn()
    port = int(process.stdout.readline())
    assert holds_port(identify(process.pid), port) is True
    assert holds_port(identify(other.pid), port) is False
    assert holds_port(ProcessId(process.pid, "another boot/1"), port) is False


async def seen_of(entry, pid, *, times=1, pause_s=0.0, **arbiter):
    """Return what is known of a process that had served once it was probed."""
    observed = {
        "n_frontend": ObservedProcess(pid=pid, started_s=0.0, healthy_s=arbiter.pop("healthy_s", None))
    }
    async with ProcessObserver(observed) as observer:
        for _ in range(times):
            await observer._health("n_frontend", entry, make_state("n", **arbiter))
            await asyncio.sleep(pause_s)
    return observed["n_frontend"]


async def test_the_answer_of_another_process_on_the_port_is_not_health(spawn, foreign, entry_of):
    """A router that could not bind is not ready because another one answers in its place."""
    entry = entry_of(
        "frontend",
        "router",
        url=f"http://127.0.0.1:{foreign}",
        ports={"port": foreign},
        health_path="/health",
    )
    other = await seen_of(entry, spawn().pid)
    assert (other.healthy_s, other.port_taken) == (None, True)
    own = await seen_of(entry, os.getpid())
    assert own.healthy_s is not None
    assert not own.port_taken


async def test_an_address_that_is_none_is_not_healthy_and_ends_nothing(entry_of):
    """A statefile edited by hand must not end the supervisor."""
    entry = entry_of("frontend", "router", url="http://127.0.0.1:None", health_path="/health")
    assert (await seen_of(entry, os.getpid())).healthy_s is None


@pytest.fixture
async def stalled():
    """Yield the port of a server that accepts connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    yield server.getsockname()[1]
    server.close()


async def test_a_stalled_process_is_not_healthy(stalled, entry_of, monkeypatch):
    """Its port accepts connections, but it does not answer."""
    monkeypatch.setattr(probes, "_TIMEOUTS", Timeouts(connect_s=1.0, first_byte_s=0.05))
    entry = entry_of("decode", url=f"http://127.0.0.1:{stalled}", health_path="/health")
    assert (await seen_of(entry, os.getpid())).healthy_s is None


@pytest.mark.parametrize(("pid", "is_healthy"), [(7, True), (8, False), (None, False)])
async def test_a_planner_is_ready_once_it_has_written_of_itself(tmp_path, entry_of, pid, is_healthy):
    """A planner that ends at its start is never ready, however long it took, so its reason stays shown."""
    state = {"pid": pid, "phase": "observing", "at_s": 1.0, "next_decision_s": None}
    if pid is not None:
        (tmp_path / "state.json").write_text(json.dumps(state))
    entry = entry_of("planner", "planner")
    assert ((await seen_of(entry, 7, planner_log_dir=str(tmp_path))).healthy_s is not None) is is_healthy


async def test_a_stopped_child_is_a_fault_although_the_leader_answers(spawn, foreign, entry_of):
    """The engine core of vLLM stopped: its API server answers 200 for minutes, and no request gets on."""
    leader = spawn(PARENT)
    leader.stdout.readline()
    (child,) = psutil.Process(leader.pid).children()
    entry = entry_of("decode", url=f"http://127.0.0.1:{foreign}", health_path="/health", liveness_s=600.0)
    assert (await seen_of(entry, leader.pid, healthy_s=1.0)).fault is None
    os.kill(child.pid, signal.SIGSTOP)
    while child.status() != psutil.STATUS_STOPPED:
        pass
    seen = await seen_of(entry, leader.pid, healthy_s=1.0)
    assert seen.healthy_s == 1.0
    assert (seen.fault.allowed_s, seen.fault.reason) == (
        60.0,
        f"its process {child.pid} ({child.name()}) is stopped by a signal or a debugger",
    )


@pytest.fixture
async def hung_engine():
    """Yield the port of a server that is worker and router in one: the engine has a request and makes no token."""
    page = "vllm:generation_tokens_total 7\nvllm:num_requests_running {running}\n"
    worker = {"name": "n_frontend", "state": "ready", "inflight_requests": 1, "inflight_tokens": 5}

    def answer(request, responder):
        if request.path == "/workers":
            body = json.dumps({"workers": [worker]})
        else:
            body = page.format(running=worker.get("running", 0))
        responder.send(200, body.encode())

    async with serving(answer) as port:
        yield port, worker


@pytest.mark.parametrize("changes", [{}, {"running": 1, "inflight_requests": 0}])
async def test_an_engine_that_makes_no_token_is_a_fault_although_it_answers(hung_engine, entry_of, changes):
    """By its own gauges, or by the router's count where the core hung before it saw the request."""
    port, worker = hung_engine
    worker.update(changes)
    url = f"http://127.0.0.1:{port}"
    entry = entry_of("decode", url=url, health_path="/health", stall_s=0.01)
    seen = await seen_of(entry, os.getpid(), times=2, pause_s=0.02, healthy_s=1.0, router_url=url)
    assert seen.fault == ProcessFault("its engine hangs: requests, but no token for 0.01 s (real)", 0.0)
    worker.update(running=0, inflight_requests=0)
    assert (await seen_of(entry, os.getpid(), times=2, pause_s=0.02, router_url=url)).fault is None


@pytest.mark.parametrize(("rate", "is_fault"), [(0.5, False), (0.0, True)])
async def test_an_engine_whose_children_compute_is_no_fault_while_a_start_may_take(
    hung_engine, entry_of, monkeypatch, rate, is_fault
):
    """An engine compiles for minutes at the first request of a kind: no token, but a child that computes."""
    port, _ = hung_engine
    url = f"http://127.0.0.1:{port}"
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(observer_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(
        observer_module,
        "computed_by_children",
        lambda _leader: ProcessorTime(clock.now_s, rate * clock.now_s),
    )
    entry = entry_of("decode", url=url, health_path="/health", stall_s=120.0)
    observed = {"n_frontend": ObservedProcess(pid=os.getpid(), started_s=0.0, healthy_s=1.0)}
    async with ProcessObserver(observed) as observer:
        for _ in range(8):
            await observer._health("n_frontend", entry, make_state("n", router_url=url))
            clock.now_s += 30.0
    assert (observed["n_frontend"].fault is not None) is is_fault


def test_processor_time_of_children_counts_and_that_of_the_leader_does_not(spawn, eventually):
    """An API server answers health checks for an engine core that hangs."""
    before = ProcessorTime(10.0, 1.0)
    assert ProcessorTime(12.0, 1.04).has_run_since(before)
    assert not ProcessorTime(12.0, 1.03).has_run_since(before)
    assert not ProcessorTime(10.0, 1.0).has_run_since(before)
    parent, alone = spawn("import os\nos.fork()\nwhile True: pass"), spawn("while True: pass")
    eventually(lambda: computed_by_children(identify(parent.pid)).cpu_s > 0.0)
    eventually(lambda: psutil.Process(alone.pid).cpu_times().user > 0.0)
    assert computed_by_children(identify(alone.pid)).cpu_s == 0.0


PAGE = "vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\nvllm:kv_cache_usage_perc {kv}\n"


@pytest.mark.parametrize(
    ("page", "keeps_leases", "busy"),
    [
        (PAGE.format(running=0, waiting=0, kv=0), True, False),
        (PAGE.format(running=1, waiting=0, kv=0.1), True, True),
        (PAGE.format(running=0, waiting=2, kv=0), False, True),
        (PAGE.format(running=0, waiting=0, kv=0.1), True, True),
        (PAGE.format(running=0, waiting=0, kv=0.1), False, False),
        (PAGE.format(running="NaN", waiting=0, kv=0), True, None),
        ("vllm:kv_cache_usage_perc 0\n", True, None),
        ("<html>", True, None),
    ],
)
async def test_a_prefill_worker_is_busy_while_its_blocks_are_leased(page, keeps_leases, busy):
    """It leaves once decode has read them or their leases are over; what decode caches is not waited for."""
    found = probes.Probes()
    async with serving(lambda _request, responder: responder.send(200, page.encode())) as port:
        assert await found.is_busy(f"http://127.0.0.1:{port}", keeps_leases=keeps_leases) is busy
    await found.close()
