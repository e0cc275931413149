"""The arbiter with real circus and tiny real processes."""

import os
import signal

import psutil
import pytest

from penstock_local import liveness
from penstock_local.statefile import EntryState


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
