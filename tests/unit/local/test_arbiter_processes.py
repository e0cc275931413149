"""The arbiter with real circus and tiny real processes."""

import asyncio
import os
import signal

import psutil
import pytest

from penstock_core.local_state import EntryState
from penstock_graph.models import Role
from penstock_local import liveness
from penstock_local.ports import ephemeral_port
from penstock_local.replicas import withdraw
from penstock_local.target import LocalTarget


def test_a_requested_worker_becomes_ready_with_its_gpu_and_url(graph):
    """A requested entry gets a process, a port, its GPU and, once it answers, state ready."""
    graph.start(graph.entry("decode", "decode", gpus=(2,)))
    entry = graph.wait_state("test_decode", EntryState.READY)
    process = psutil.Process(entry.pid)
    assert entry.url == f"http://127.0.0.1:{entry.port}"
    assert process.environ()["CUDA_VISIBLE_DEVICES"] == "2"
    assert graph.stop() == 0
    assert not process.is_running()
    assert not graph.store.path.exists()
    assert not graph.store.lock_path.exists()


def test_a_killed_worker_is_restarted_and_the_reason_is_kept_until_it_serves(graph, eventually):
    """Kill -9 of a worker is recovered with one restart more and a new process."""
    graph.start(graph.entry("decode", "decode", gpus=(0,)))
    first = graph.wait_state("test_decode", EntryState.READY)
    os.kill(first.pid, signal.SIGKILL)
    restarted = eventually(lambda: (entry := graph.get("test_decode")).restarts == 1 and entry)
    assert "SIGKILL" in restarted.reason
    again = graph.wait_state("test_decode", EntryState.READY)
    assert again.pid != first.pid
    assert again.port == first.port
    assert again.gpus == (0,)
    assert again.reason is None


@pytest.mark.slow
def test_a_worker_that_dies_at_start_is_given_up_with_its_last_words_and_frees_its_gpus(graph, crasher):
    """Five failures in a row end in state failed, the reason quoting exit code and stderr, no GPUs held."""
    graph.start(graph.entry("decode", "decode", cmd=crasher, gpus=(0,)))
    failed = graph.wait_state("test_decode", EntryState.FAILED, timeout_s=20)
    assert failed.gpus == ()
    assert failed.pid is None
    assert "exit code 3" in failed.reason
    assert "CUDA error: no such device" in failed.reason


def test_kill_9_of_the_arbiter_ends_its_workers_and_leaves_a_stale_file(graph, eventually):
    """The kernel tells the workers; the file that stays is recognised as stale."""
    graph.start(graph.entry("decode", "decode"))
    entry = graph.wait_state("test_decode", EntryState.READY)
    worker = liveness.ProcessId(entry.pid, entry.create_time)
    graph.arbiter.kill()
    graph.arbiter.wait()
    eventually(lambda: not liveness.is_alive(worker))
    assert not liveness.arbiter_is_alive(graph.store.read())


def test_scaling_through_the_target_adds_and_drains_a_worker(graph, tmp_path, eventually):
    """The planner's wish becomes a ready worker; taking it back waits until the worker is idle."""
    busy, drains = tmp_path / "busy", tmp_path / "drains"
    router = graph.entry("frontend", "router", "--drains", str(drains), ports={"port": ephemeral_port()})
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


def test_a_statefile_deleted_by_hand_is_written_again(graph, eventually):
    """The processes it describes still run, so it comes back with them."""
    graph.start(graph.entry("decode", "decode"))
    before = graph.wait_state("test_decode", EntryState.READY)
    graph.store.path.unlink()
    eventually(graph.store.path.exists)
    assert graph.get("test_decode").pid == before.pid


def test_a_base_worker_that_is_withdrawn_stays_as_a_stopped_entry(graph, eventually):
    """With the router away the worker is ended after a moment; its entry keeps the command."""
    graph.start(graph.entry("decode", "decode", gpus=(0,)))
    worker = graph.wait_state("test_decode", EntryState.READY)
    graph.store.update(lambda state: (withdraw(state, "test_decode"), None))
    kept = graph.wait_state("test_decode", EntryState.STOPPED)
    assert kept.cmd == worker.cmd
    assert kept.gpus == ()


def test_a_second_arbiter_of_the_namespace_refuses_to_start(graph):
    """The first one's file is left alone."""
    graph.start(graph.entry("decode", "decode"))
    graph.wait_state("test_decode", EntryState.READY)
    first, graph.arbiter = graph.arbiter, None
    try:
        graph.start(graph.entry("decode", "decode"))
        assert graph.arbiter.wait(8) == 1
        assert graph.store.read().arbiter.pid == first.pid
    finally:
        graph.arbiter = first
    assert "already running" in (graph.log_dir / "arbiter.log").read_text()
