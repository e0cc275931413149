"""Is a recorded process still that process, and how is it ended: by pid together with its start.

A recorded process leads a group; it counts as ended only when the entire group is empty, because the children of an
engine hold GPU memory after their leader is gone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.local.statefile import ProcessId, StateFile

MARK_VARIABLE = "PENSTOCK_STATEFILE"
"""Set in every child's environment to its statefile's path, so that a child that was never recorded is found."""

ARBITER_MODULE = "penstock.local.arbiter"
"""What the interpreter of an arbiter runs; the statefile is the argument after it."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_AFTER_COMMAND = 2
"""Fields of ``/proc/PID/stat`` before the state: pid and command; the start is field 22 (proc_pid_stat(5))."""
_START_FIELD = 22
_DEAD_STATES = frozenset({"Z", "X"})
_STOPPED_STATES = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})
_INIT = 1
_POLL_S = 0.02
_TRACKER = "multiprocessing.resource_tracker"
"""In the command of the process that each Python program with shared memory or semaphores starts."""
CLEANING_S = 5.0
"""Real seconds that resource trackers get once they are alone. Chosen: theirs is a few calls of the kernel, and a
busy machine takes seconds to come to them."""
_WORKING_FRACTION = 0.02
"""Fraction of one processor. Chosen: an engine's processes that wait for a request take a tenth of it; a compiler gets it where 50
programs share a processor."""
_KILL_S = 5.0
"""Real seconds that SIGKILL may take. Chosen: a process that frees much memory needs a moment."""


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None when there is none with this pid."""
    started = _start_of(pid)
    return None if started is None else ProcessId(pid, started)


def is_alive(recorded: ProcessId) -> bool:
    """Return whether exactly this process still runs."""
    return identify(recorded.pid) == recorded


def arbiter_is_alive(state: StateFile) -> bool:
    """Return whether the file's arbiter runs; False makes the file a stale one."""
    return state.arbiter.pid > 0 and is_alive(state.arbiter.process)


def group_of(leader: ProcessId) -> list[ProcessId]:
    """Return the running processes of the group that a recorded process leads or led, itself included.

    The kernel gives no pid away while a group of that number has members, so a group whose leader is gone is
    still the recorded one. A process that leads no group is returned alone.
    """
    if leader.pid <= _INIT:
        return []  # as a group these numbers mean the caller's own, or every process
    present = identify(leader.pid)
    if present is not None and present != leader:
        return []
    if present is None and leader.started.partition("/")[0] != _boot_id():
        return []
    if present is not None and _group_id(leader.pid) != leader.pid:
        return [leader]
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    members = (identify(pid) for pid in psutil.pids() if _group_id(pid) == leader.pid)
    return [member for member in members if member is not None]


def stopped_in_group(leader: ProcessId) -> str | None:
    """Return the message that a signal or a debugger has stopped a process of a group; None: none is.

    A child may be stopped while its leader answers for it: vLLM's engine core and its API server are two processes.
    """
    for member in group_of(leader):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(member.pid)
            if process.status() in _STOPPED_STATES:
                which = "it" if member == leader else f"its process {member.pid} ({process.name()})"
                return f"{which} is stopped by a signal or a debugger"
    return None


def recorded(state: StateFile | None) -> list[ProcessId]:
    """Return the processes that a statefile records, running or not; none if there is no file."""
    entries = () if state is None else state.entries.values()
    return [process for entry in entries if (process := entry.process) is not None]


def group_pids(leaders: Iterable[ProcessId]) -> list[int]:
    """Return the pids of the running processes of several groups."""
    return [member.pid for leader in leaders for member in group_of(leader)]


def family_pids(leaders: Iterable[ProcessId]) -> set[int]:
    """Return the pids of several groups and of all descendants: a child of an engine may lead a group of its own."""
    return {process.pid for leader in leaders for process in _family(leader)}


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """The processor time of a process' children so far, seconds, and when it was read."""

    at_s: float
    cpu_s: float

    def has_run_since(self, before: ProcessorTime) -> bool:
        """Return whether it has risen as that of programs at work, for which a busy machine has little time."""
        return self.cpu_s - before.cpu_s >= _WORKING_FRACTION * (self.at_s - before.at_s) > 0


def computed_by_children(leader: ProcessId) -> ProcessorTime:
    """Return what the children of a process have computed, those that have ended included; its own time is left out."""
    total_s = 0.0
    for process in _family(leader):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.children_user + times.children_system
            total_s += times.user + times.system if process.pid != leader.pid else 0.0
    return ProcessorTime(time.monotonic(), total_s)


def marked(statefile: str) -> list[ProcessId]:
    """Return the running processes, except for this one, that carry the path of a statefile in their environment."""
    return _running(lambda process: process.environ().get(MARK_VARIABLE) == statefile)


def arbiters_of(statefile: str) -> list[ProcessId]:
    """Return the running arbiters, except this process, that were started for a statefile, whatever its content."""
    return _running(lambda process: process.cmdline()[1:4] == ["-m", ARBITER_MODULE, statefile])


def _running(matches: Callable[[psutil.Process], bool]) -> list[ProcessId]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and matches(process):
                found.append(identify(process.pid))
    return [one for one in found if one is not None]


def leftovers(state: StateFile | None, statefile: str) -> list[ProcessId]:
    """Return what still belongs to a statefile: recorded processes whose group is not empty, and marked ones.

    Returns:
        Leaders of groups, a leader itself perhaps gone, and processes outside these groups.
    """
    found = [leader for leader in recorded(state) if group_of(leader)]
    others = marked(statefile)
    covered = group_pids(found)
    return [*found, *(one for one in others if one.pid not in covered)]


def unrecorded(state: StateFile, statefile: str) -> list[ProcessId]:
    """Return the marked processes that neither are recorded nor descend from one that is.

    The families are read last: what a recorded process starts meanwhile is not a stranger.
    """
    found = marked(statefile)
    covered = family_pids(recorded(state))
    return [one for one in found if one.pid not in covered]


def end(processes: Iterable[ProcessId], *, grace_s: float) -> list[ProcessId]:
    """Stop processes and their groups: SIGTERM, wait, SIGKILL; returns those whose group resists even that."""
    remaining = [process for process in processes if group_of(process)]
    steps: tuple[tuple[Callable[[ProcessId], None], float], ...] = (
        (lambda process: send(process, signal.SIGTERM), grace_s),
        (lambda process: send(process, signal.SIGKILL), CLEANING_S),
        (kill_trackers, _KILL_S),
    )
    for signal_to, patience_s in steps:
        for process in remaining:
            signal_to(process)
        deadline = time.monotonic() + patience_s
        while remaining and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            remaining = [process for process in remaining if group_of(process)]
    return remaining


def send(process: ProcessId, sent: signal.Signals) -> None:
    """Signal a process; SIGKILL, and any signal once the leader is gone, reaches each member of its group.

    Python's resource trackers are spared: they remove the shared memory and the semaphores that the others leave, and
    end once the last of those is gone.
    """
    alone = sent is not signal.SIGKILL and is_alive(process)
    _signal([process] if alone else [each for each in group_of(process) if not is_tracker(each)], sent)


def kill_trackers(process: ProcessId) -> None:
    """Send SIGKILL to a group of which resource trackers alone are left, which had `CLEANING_S` to end."""
    members = group_of(process)
    if all(map(is_tracker, members)):
        _signal(members, signal.SIGKILL)


def _signal(members: Iterable[ProcessId], sent: signal.Signals) -> None:
    for member in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member.pid, sent)


def is_tracker(process: ProcessId) -> bool:
    """Return whether a process is a resource tracker of Python's multiprocessing."""
    try:
        return any(_TRACKER in word for word in psutil.Process(process.pid).cmdline())
    except psutil.Error:
        return False


def _start_of(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 1 :].split()  # a command may hold spaces and brackets
    if fields[0] in _DEAD_STATES:
        return None
    return f"{_boot_id()}/{fields[_START_FIELD - _AFTER_COMMAND - 1]}"


@functools.cache
def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _group_id(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def holds_port(leader: ProcessId, port: int) -> bool | None:
    """Return whether a process, or one of its group or descendants, listens on a TCP port.

    Returns:
        None when the system does not let this user see all of their sockets, and none observed is this port.
    """
    is_unknown = False
    for process in _family(leader):
        try:
            connections = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        except psutil.Error:
            is_unknown = True
            continue
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections):
            return True
    return None if is_unknown else False


def _family(leader: ProcessId) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for member in group_of(leader):
        try:
            process = psutil.Process(member.pid)
            found[member.pid] = process
            found.update((child.pid, child) for child in process.children(recursive=True))
        except psutil.Error:
            continue
    return list(found.values())
