"""Finds processes of local graphs without a supervisor, and supervised ones that hang; `penstock doctor` asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from penstock.core.local_state import EntryState
from penstock.local import liveness
from penstock.local.liveness import ProcessId
from penstock.local.probes import Health, Probes
from penstock.local.statefile import StateFile
from penstock.local.store import StateStore

_COMMAND_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process of a graph that no arbiter supervises."""

    namespace: str
    pid: int
    command: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hung:
    """A supervised process that does not work: its entry's name or ``arbiter``, its pid and what is wrong."""

    name: str
    pid: int
    reason: str


def orphans(folder: Path) -> tuple[Orphan, ...]:
    """Return the leaked processes of every graph of a state folder, by pid.

    Args:
        folder: Where the statefiles are, or were: processes of a graph whose file is gone are found by their mark.
    """
    by_file: dict[Path, set[int]] = {path: set() for path in folder.glob("*.json")}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mark = process.environ().get(liveness.MARK_VARIABLE)
            if mark is not None and Path(mark).parent == folder:
                by_file.setdefault(Path(mark), set()).add(process.pid)
    found = [orphan for path, marked in by_file.items() for orphan in _orphans_of(path, marked)]
    return tuple(sorted(found, key=lambda orphan: orphan.pid))


def _orphans_of(path: Path, marked: set[int]) -> Iterator[Orphan]:
    state = StateStore(path).read_quietly()
    leaders = liveness.recorded(state)
    grouped = {member.pid for leader in leaders for member in liveness.group_of(leader)}
    if state is None or not liveness.arbiter_is_alive(state):
        reason = "its graph has no arbiter"
        leaked = marked | grouped
    else:
        reason = "its graph's statefile does not name it"
        leaked = marked - grouped - _descendants(state.arbiter.pid)
    for pid in leaked:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield Orphan(path.stem, pid, " ".join(process.cmdline())[:_COMMAND_CHARACTERS], reason)


def _descendants(arbiter: int) -> set[int]:
    """Return the arbiter and all below it: its watchdog, and what it has started and not recorded yet."""
    try:
        return {arbiter, *(child.pid for child in psutil.Process(arbiter).children(recursive=True))}
    except psutil.Error:
        return {arbiter}


async def hung(state: StateFile) -> tuple[Hung, ...]:
    """Return the processes of a running graph that are stopped, as a whole or in part, or do not answer."""
    found = _stopped("arbiter", ProcessId(state.arbiter.pid, state.arbiter.started))
    probed: list[tuple[str, int, str]] = []
    for name, entry in state.entries.items():
        if entry.pid is None or entry.started is None:
            continue
        if stopped := _stopped(name, ProcessId(entry.pid, entry.started)):
            found += stopped
        elif entry.state is EntryState.READY and entry.url is not None and entry.health_path is not None:
            probed.append((name, entry.pid, entry.url + entry.health_path))
    probes = Probes()
    try:
        answers = await asyncio.gather(*(probes.health(url) for _, _, url in probed))
    finally:
        await probes.close()
    for (name, pid, url), answer in zip(probed, answers, strict=True):
        if answer is not Health.HEALTHY:
            found.append(Hung(name, pid, f"probed at {url}: {answer.value}"))
    return tuple(found)


def _stopped(name: str, leader: ProcessId) -> list[Hung]:
    member = liveness.stopped_in_group(leader)
    return [] if member is None else [Hung(name, leader.pid, liveness.stopped_words(leader, member))]
