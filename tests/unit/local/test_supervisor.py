"""The supervisor's loop over a fake launcher: every wait of a stop is bounded."""

import signal
from dataclasses import replace

import pytest

from penstock.core.local_state import EntryState
from penstock.local import plan, process_log
from penstock.local import supervisor as supervisor_module
from penstock.local.launcher import Ended
from penstock.local.plan import ObservedProcess
from penstock.local.store import StateStore
from penstock.local.supervisor import Supervisor


class Unkillable:
    """A launcher whose processes resist every signal."""

    def __init__(self):
        self.sent = []

    def adopt(self, name, process):
        """Take charge of it."""

    def send(self, name, number):
        """Note the signal."""
        self.sent.append((name, number))

    def reap(self):
        """Nothing ever ends."""
        return []


@pytest.fixture
def store(state_of, entry_of):
    """Return the store of a graph with one ready worker."""
    made = StateStore.of("n")
    entry = entry_of("decode", state=EntryState.READY, pid=7, started="b/1")
    made.write(state_of("n").with_entry("n_decode", entry))
    return made


async def test_a_stop_does_not_wait_for_ever_for_a_process_that_resists_sigkill(store, monkeypatch):
    """After SIGTERM, the grace and SIGKILL the supervisor ends; `down` then names what is left."""
    monkeypatch.setattr(supervisor_module, "UNKILLABLE_S", 0.0)
    monkeypatch.setattr(supervisor_module, "TICK_S", 0.0)
    launcher = Unkillable()
    monkeypatch.setattr(plan, "GRACE_FLOOR_S", 0.0)
    supervisor = Supervisor(store, launcher, store.read())
    supervisor.adopt()
    supervisor.request_stop(force=True)
    await supervisor.run()
    assert launcher.sent == [("n_decode", signal.SIGTERM), ("n_decode", signal.SIGKILL)]


@pytest.mark.parametrize(
    ("code", "reason"), [(0, "exit code 0: no model given"), (-signal.SIGTERM, "killed by SIGTERM")]
)
def test_a_process_that_ends_by_itself_is_quoted_whatever_its_code(store, tmp_path, code, reason):
    """An engine that prints its usage ends with 0, and the reason says why; a signal is no fault of the process."""
    state = store.read()
    process_log.log_path(str(tmp_path), "n_decode").write_text("no model given\n")
    state = replace(state, arbiter=replace(state.arbiter, log_dir=str(tmp_path)))
    supervisor = Supervisor(store, Unkillable(), state)
    assert supervisor._exit_reason(Ended("n_decode", 7, code), ObservedProcess(pid=7)) == reason


async def test_a_stop_that_had_begun_goes_on_after_a_kill_of_the_arbiter(store):
    """The successor reads `stopping` and stops, in place of serving again."""
    state = store.read()
    stopping = replace(state, arbiter=replace(state.arbiter, stopping=True))
    store.write(stopping)
    launcher = Unkillable()
    supervisor = Supervisor(store, launcher, stopping)
    supervisor.adopt()
    await supervisor.stop_tick()
    assert launcher.sent == [("n_decode", signal.SIGTERM)]
