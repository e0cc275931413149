"""Who listens on a port: an answer from a port proves nothing of the process that was meant to hold it."""

from __future__ import annotations

import psutil

from penstock.local.liveness import ProcessId, group_of


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
