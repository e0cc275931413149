"""The watchdog's take-over, with the arbiter killed at each step of its work: before and after every write, fork and signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from penstock.core.backoff import Backoff
from penstock.core.local_state import EntryState
from penstock.local import arbiter, liveness, plan
from penstock.local import supervisor as supervisor_module
from penstock.local.launcher import ExitedProcess
from penstock.local.statefile import ProcessId, StateFile, scale, switch
from penstock.local.store import StateStore
from penstock.local.supervisor import Supervisor

Story = Callable[..., Awaitable[None]]
TICKS = 12
"""Enough for every restart and drain of the story: each takes at most four."""


class Killed(BaseException):
    """The arbiter that takes this step ends here."""


class Machine:
    """The processes of one machine, which live on when their arbiter is killed."""

    def __init__(self, dies_at: int) -> None:
        self.alive: dict[int, ProcessId] = {os.getpid(): ProcessId(os.getpid(), "b/0")}
        self.started: list[tuple[str, ProcessId]] = []
        self.steps = 0
        self.dies_at = dies_at

    def step(self) -> None:
        """Count one step of the first arbiter; it dies at the chosen one."""
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed

    def fork(self, name: str) -> ProcessId:
        """Start a process."""
        process = ProcessId(1000 + len(self.started), f"b/{len(self.started)}")
        self.started.append((name, process))
        self.alive[process.pid] = process
        return process

    def end(self, process: ProcessId, sent: signal.Signals = signal.SIGKILL) -> None:
        """End a process."""
        self.alive.pop(process.pid, None)

    def group(self, process: ProcessId) -> list[ProcessId]:
        """Return the process while it runs."""
        return [process] if self.alive.get(process.pid) == process else []

    def children(self) -> list[ProcessId]:
        """Return everything that runs except for the arbiter."""
        return [one for one in self.alive.values() if one.pid != os.getpid()]


class Store(StateStore):
    """A statefile whose writes are steps."""

    machine: Machine

    def _replace(self, state):
        self.machine.step()
        super()._replace(state)
        self.machine.step()


class Launcher:
    """What the arbiter does to processes: each is a step."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._processes: dict[str, ProcessId] = {}

    async def start(self, name, argv, env, log, *, held=None):
        """Fork; the kill may come before it, or before the pid is known."""
        self._machine.step()
        process = self._machine.fork(name)
        self._machine.step()
        self._processes[name] = process
        return process

    def adopt(self, name, process):
        """Take charge."""
        self._processes[name] = process

    def rename(self, name, after):
        """Know it by another name."""
        self._processes[after] = self._processes.pop(name)

    def send(self, name, number):
        """End the process by whatever signal."""
        self._machine.step()
        self._machine.end(self._processes[name])
        self._machine.step()

    def reap(self):
        """Return what has ended."""
        gone = [(name, one) for name, one in self._processes.items() if not self._machine.group(one)]
        for name, _ in gone:
            del self._processes[name]
        return [ExitedProcess(name, one.pid, None) for name, one in gone]

    async def forget(self, name):
        """There is no watcher to remove."""


class Observer:
    """Finds every process healthy and idle at once."""

    def __init__(self, observed):
        self._observed = observed

    def forget(self, name):
        """Nothing is remembered."""

    def close_connections(self, entry):
        """There are no connections."""

    def probe(self, state):
        """Note the answers."""
        for name, known in self._observed.items():
            if known.pid is not None and name in state.entries:
                drain = known.drain and replace(known.drain, acknowledged=True, idle=True)
                self._observed[name] = replace(known, healthy_s=known.started_s, drain=drain)


@pytest.fixture
def machine_that_dies_at(monkeypatch, state_folder):
    """Return the maker of a machine whose arbiter dies at one step."""
    monkeypatch.setattr(supervisor_module, "ProcessObserver", Observer)
    monkeypatch.setattr(plan, "RESTARTS", Backoff(0.0, 0.0))
    monkeypatch.setattr(plan, "STABLE_AFTER_S", 0.0)

    def make(step: int) -> Machine:
        machine = Machine(step)
        monkeypatch.setattr(liveness, "identify", machine.alive.get)
        monkeypatch.setattr(liveness, "group_of", machine.group)
        monkeypatch.setattr(liveness, "holds_port", lambda process, _port: bool(machine.group(process)))
        monkeypatch.setattr(
            liveness,
            "family_pids",
            lambda leaders: {one.pid for each in leaders for one in machine.group(each)},
        )
        monkeypatch.setattr(liveness, "marked", lambda _statefile: machine.children())
        monkeypatch.setattr(liveness, "send", machine.end)
        return machine

    return make


async def ticks(supervisor: Supervisor, store: StateStore, *, until=lambda _state: False) -> None:
    """Let a supervisor work until a condition holds, at most `TICKS`."""
    for _ in range(TICKS):
        if until(store.read()):
            return
        await supervisor.tick()


def is_settled(state) -> bool:
    """Whether every entry serves."""
    return all(entry.state is EntryState.READY for entry in state.entries.values())


async def story(store: Store, machine: Machine, living: dict[str, int]) -> None:
    """Start two workers, lose one, add a third, take it back; note in ``living`` which have served and are wanted on."""
    supervisor = Supervisor(store, Launcher(machine), store.read())
    await ticks(supervisor, store, until=is_settled)
    state = store.read()
    living.update({name: entry.pid for name, entry in state.entries.items()})
    lost = state.entries["n_prefill"].process
    del living["n_prefill"]
    machine.end(lost)
    await ticks(supervisor, store, until=lambda state: state.entries["n_prefill"].restarts == 1)
    await ticks(supervisor, store, until=is_settled)
    living["n_prefill"] = store.read().entries["n_prefill"].pid
    store.update(lambda state: (scale(state, "decode", 2, {}).state, None))
    await ticks(supervisor, store, until=is_settled)
    store.update(lambda state: (scale(state, "decode", 1, {"n_decode": 1.0, "n_decode_1": 0.0}).state, None))
    await ticks(supervisor, store, until=lambda state: "n_decode_1" not in state.entries)


async def take_over(store: Store, machine: Machine) -> None:
    """Let the successor of an arbiter that was killed work."""
    machine.dies_at = 0
    machine.alive[os.getpid()] = ProcessId(os.getpid(), "b/successor")
    state = arbiter.resume(store)
    arbiter.end_unrecorded(store, state, arbiter.Watchdog([], {}))
    successor = Supervisor(store, Launcher(machine), state)
    successor.adopt()
    await ticks(successor, store)


async def switching_story(store: Store, machine: Machine, living: dict[str, int]) -> None:
    """Let one of two decode workers take prefill's role, and come back; no process of the three is to end."""
    supervisor = Supervisor(store, Launcher(machine), store.read())
    await ticks(supervisor, store, until=is_settled)
    living.update({name: entry.pid for name, entry in store.read().entries.items()})
    for giver, taker in (("decode", "prefill"), ("prefill", "decode")):
        replicas = {giver: 1, taker: 2}
        store.update(lambda state, to=(giver, taker), n=replicas: (switch(state, *to, n, {}).state, None))
        await ticks(supervisor, store, until=is_settled)


async def renewing_story(store: Store, machine: Machine, living: dict[str, int]) -> None:
    """Restart the router; the worker is to live on."""
    supervisor = Supervisor(store, Launcher(machine), store.read())
    await ticks(supervisor, store, until=is_settled)
    living["n_decode"] = store.read().entries["n_decode"].pid
    store.update(lambda state: (state.change("n_frontend", renew=True), None))
    await ticks(supervisor, store, until=lambda state: is_settled(state) and len(machine.started) == 3)


async def killed_at(machine: Machine, state: StateFile, story: Story = story) -> StateFile:
    """Live through the story with its kill; return the file that the successor leaves, having checked who lives on."""
    store = Store(StateStore.of("n").path)
    store.machine = machine
    StateStore(store.path).write(state)
    living: dict[str, int] = {}
    try:
        await story(store, machine, living)
    except Killed:
        dead = store.read().entries
        wanted = {name: pid for name, pid in living.items() if dead[name].is_replica or dead[name].takes}
        await take_over(store, machine)
        after = store.read().entries
        assert {name: after[name].pid for name in wanted} == wanted, f"step {machine.steps}"
    return store.read()


async def test_no_kill_of_the_arbiter_replaces_a_living_worker_or_leaves_one_behind(
    machine_that_dies_at, state_of, entry_of
):
    """Whatever step the kill falls on: who served serves on, what is wanted runs once, nothing else runs."""
    state = state_of("n", gpus=4)
    for service in ("decode", "prefill"):
        state = state.with_entry(f"n_{service}", entry_of(service, service, gpus=(len(state.entries),)))
    whole = machine_that_dies_at(0)
    await killed_at(whole, state)
    assert whole.steps >= 40
    for step in range(1, whole.steps + 1):
        machine = machine_that_dies_at(step)
        entries = (await killed_at(machine, state)).entries.values()
        assert {entry.pid for entry in entries if entry.pid} == {one.pid for one in machine.children()}, step
        assert len({gpu for entry in entries for gpu in entry.gpus}) == len(machine.children()), step


async def test_no_kill_of_the_arbiter_loses_a_worker_that_switches_or_empties_a_role(
    machine_that_dies_at, state_of, entry_of
):
    """Whatever step the kill falls on: its process lives on, no GPU is held twice or lost, each role keeps a worker."""
    state = state_of("n", gpus=3)
    for gpu, (name, role) in enumerate(
        (("decode", "decode"), ("prefill", "prefill"), ("decode_1", "decode"))
    ):
        state = state.with_entry(f"n_{name}", entry_of(role, role, gpus=(gpu,), order=gpu))
    whole = machine_that_dies_at(0)
    after = await killed_at(whole, state, switching_story)
    assert after.entries["n_decode_1"].role == "decode"
    assert [name for name, _ in whole.started] == list(state.entries)
    roles = set()
    for step in range(1, whole.steps + 1):
        machine = machine_that_dies_at(step)
        entries = (await killed_at(machine, state, switching_story)).entries
        roles.add(entries["n_decode_1"].role)
        assert {entry.pid for entry in entries.values()} == {one.pid for one in machine.children()}, step
        assert sorted(gpu for entry in entries.values() for gpu in entry.gpus) == [0, 1, 2], step
        assert {entry.role for entry in entries.values()} == {"prefill", "decode"}, step
        assert {entry.state for entry in entries.values()} == {EntryState.READY}, step
    assert roles == {"prefill", "decode"}


async def test_no_kill_of_the_arbiter_leaves_a_restart_of_the_router_half_done(
    machine_that_dies_at, state_of, entry_of
):
    """Whatever step the kill falls on: one router serves in the end, the one before it has ended, and no entry is left of it."""
    state = state_of("n", gpus=1).with_entry("n_decode", entry_of("decode", "decode", gpus=(0,)))
    router = entry_of("frontend", "router", ports={"port": 8000}, health_path="/health")
    state = state.with_entry("n_frontend", router)
    whole = machine_that_dies_at(0)
    after = await killed_at(whole, state, renewing_story)
    assert [name for name, _ in whole.started] == ["n_decode", "n_frontend", "n_frontend"]
    assert after.entries["n_frontend"].pid == whole.started[-1][1].pid
    for step in range(1, whole.steps + 1):
        machine = machine_that_dies_at(step)
        entries = (await killed_at(machine, state, renewing_story)).entries
        assert set(entries) == {"n_decode", "n_frontend"}, step
        assert {entry.pid for entry in entries.values()} == {one.pid for one in machine.children()}, step
        assert {(entry.state, entry.renew) for entry in entries.values()} == {(EntryState.READY, False)}, step
