"""Is a recorded process still that process, and how is it ended: by pid together with its start time.

A pid alone may have been given to a stranger since; the pair cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from penstock_local.statefile import StateFile

MARK_VARIABLE = "PENSTOCK_STATEFILE"
"""Set in every child's environment to its statefile's path, so that a child that was never recorded is found."""

_SAME_START_S = 2.0
"""psutil derives start times from the boot time, which moves when the wall clock is set. Chosen."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for good: pid and start time (seconds since the epoch)."""

    pid: int
    create_time: float


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None when there is none with this pid."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return ProcessId(pid, process.create_time())
    except psutil.Error:
        return None


def is_alive(recorded: ProcessId) -> bool:
    """Return whether exactly this process still runs."""
    found = identify(recorded.pid)
    return found is not None and abs(found.create_time - recorded.create_time) < _SAME_START_S


def arbiter_is_alive(state: StateFile) -> bool:
    """Return whether the file's arbiter runs; False makes the file a stale one."""
    return state.arbiter.pid > 0 and is_alive(ProcessId(state.arbiter.pid, state.arbiter.create_time))


def leftovers(state: StateFile | None, statefile: str) -> list[ProcessId]:
    """Return the processes that belong to a statefile: recorded ones that still run, and marked ones.

    Args:
        state: Its content, or None when it is gone or unreadable; then only marks count.
        statefile: Its path.
    """
    found: dict[int, ProcessId] = {}
    for entry in state.entries.values() if state is not None else ():
        if entry.pid is None or entry.create_time is None:
            continue
        recorded = ProcessId(entry.pid, entry.create_time)
        if is_alive(recorded):
            found[recorded.pid] = recorded
    for process in psutil.process_iter():
        if process.pid in found or process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK_VARIABLE) == statefile and (one := identify(process.pid)):
                found[one.pid] = one
    return list(found.values())


def end(processes: Iterable[ProcessId], *, grace_s: float) -> list[ProcessId]:
    """Stop processes: SIGTERM, wait, SIGKILL to what is left; returns those that resist even that.

    Args:
        processes: Each is signalled only while it is still itself.
        grace_s: How long SIGTERM may take, real seconds.
    """
    remaining = [process for process in processes if is_alive(process)]
    for sent, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in remaining:
            _signal_group(process, sent)
        deadline = time.monotonic() + patience_s
        while remaining and time.monotonic() < deadline:
            time.sleep(0.02)
            remaining = [process for process in remaining if is_alive(process)]
    return remaining


def _signal_group(process: ProcessId, sent: signal.Signals) -> None:
    """Signal the process, and with SIGKILL its whole group when it leads one (children of real engines)."""
    if not is_alive(process):
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sent is signal.SIGKILL and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, sent)
        else:
            os.kill(process.pid, sent)
