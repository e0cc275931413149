"""The arbiter with real circus and tiny real processes."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import psutil
import pytest
from reserved_ports import reserved_port

from penstock.api import Role
from penstock.core.local_state import EntryState
from penstock.local import liveness, watchdog_child
from penstock.local.target import LocalTarget


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_of_a_worker_that_is_gone_are_ended_before_its_successor_starts(
    graph, tmp_path, eventually, number
):
    """They have blank environments, as vLLM's engine core has, and hold the GPU of the next worker."""
    child_file = tmp_path / "child"
    graph.start(graph.entry("decode", "decode", "--child", str(child_file), gpus=(0,)))
    first = graph.wait_state("test_decode", EntryState.READY)
    child = int(child_file.read_text())
    os.kill(first.pid, number)
    eventually(lambda: graph.get("test_decode").restarts == 1)
    assert liveness.identify(child) is None
    graph.wait_state("test_decode", EntryState.READY)
    successor = int(child_file.read_text())
    assert graph.stop() == 0
    assert liveness.identify(successor) is None


def watchdogs(graph):
    """Return the pids of the watchdog processes of the graph."""
    processes = [psutil.Process(one.pid) for one in liveness.marked(str(graph.store.path))]
    return [each.pid for each in processes if watchdog_child.__file__ in each.cmdline()]


def test_a_killed_arbiter_is_started_again_and_adopts_the_living_workers(graph, eventually):
    """Kill -9 of the arbiter: another takes over, workers keep their processes, a dead one is restarted."""
    graph.start(graph.entry("decode", "decode"), graph.entry("other", "prefill"))
    kept = graph.wait_state("test_decode", EntryState.READY)
    lost = graph.wait_state("test_other", EntryState.READY)
    killed = graph.store.read().arbiter
    graph.arbiter.kill()
    os.kill(lost.pid, signal.SIGKILL)
    graph.arbiter.wait()
    resumed = eventually(graph.store.running).arbiter
    assert resumed.pid != killed.pid
    assert resumed.restarts == 1
    eventually(lambda: graph.get("test_other").restarts == 1)
    graph.wait_state("test_other", EntryState.READY)
    assert (graph.get("test_decode").pid, graph.get("test_decode").started) == (kept.pid, kept.started)
    os.kill(kept.pid, signal.SIGKILL)
    eventually(lambda: graph.get("test_decode").restarts == 1)
    graph.wait_state("test_decode", EntryState.READY)
    os.kill(resumed.pid, signal.SIGTERM)
    eventually(lambda: liveness.identify(resumed.pid) is None)
    assert liveness.marked(str(graph.store.path)) == []
    assert list(graph.store.path.parent.iterdir()) == []


def test_a_killed_watchdog_is_started_again(graph, eventually):
    """Either of arbiter and watchdog brings the other back."""
    graph.start(graph.entry("decode", "decode"))
    graph.wait_state("test_decode", EntryState.READY)
    (first,) = watchdogs(graph)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: [pid for pid in watchdogs(graph) if pid != first])
    assert graph.stop() == 0
    assert watchdogs(graph) == []


def test_only_the_owner_reaches_circus(graph):
    """Its sockets are Unix sockets in a folder of mode 0700, and it listens on no TCP port."""
    graph.start(graph.entry("decode", "decode"))
    graph.wait_state("test_decode", EntryState.READY)
    arbiter = graph.store.read().arbiter
    for endpoint in (arbiter.endpoint, arbiter.pubsub_endpoint):
        scheme, _, path = endpoint.partition("://")
        assert scheme == "ipc"
        assert Path(path).is_socket()
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    connections = psutil.Process(arbiter.pid).net_connections("tcp")
    assert [each for each in connections if each.status == psutil.CONN_LISTEN] == []


def test_scaling_through_the_target_adds_and_drains_a_worker(graph, tmp_path, eventually):
    """A desired replica becomes a ready worker; taking it back waits until the worker is idle."""
    busy, drains = tmp_path / "busy", tmp_path / "drains"
    router = graph.entry("frontend", "router", "--drains", str(drains), ports={"port": reserved_port()})
    decode = graph.entry("decode", "decode", "--busy-while", str(busy), gpus=(0,), grace_s=60.0)
    graph.start(router, decode, router_url=f"http://127.0.0.1:{router.port}")
    graph.wait_state("test_decode", EntryState.READY)
    graph.wait_state("test_frontend", EntryState.READY)

    async def scale(replicas):
        target = LocalTarget(graph.store)
        await target.scale(Role.DECODE, replicas, decision_id="d000001")
        await target.close()

    asyncio.run(scale(2))
    added = graph.wait_state("test_decode_1", EntryState.READY)
    assert added.gpus == (1,)
    busy.touch()
    asyncio.run(scale(1))
    eventually(lambda: drains.exists() and "/workers/test_decode_1/drain" in drains.read_text())
    draining = graph.get("test_decode_1")
    assert draining.state is EntryState.DRAINING
    assert draining.gpus == (1,)
    assert psutil.pid_exists(added.pid)
    busy.unlink()
    eventually(lambda: graph.get("test_decode_1") is None)
    assert not psutil.pid_exists(added.pid)
