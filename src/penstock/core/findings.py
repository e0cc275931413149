"""Sentences about faults of a graph, the cause first, that `penstock status`, `penstock doctor` and ``/ui`` share.

One fault is one sentence: a full disk explains the planner's silence and its missing records. Reads only file systems.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

FULL_BYTES: Final = 1 << 20
"""Room below which a disk counts as full. Chosen: a statefile and a few decisions."""

NOT_RECORDED: Final = "decisions cannot be recorded, so they are not applied"
"""How a planner begins the sentence about its ledger."""


def full_disks(folders: Iterable[Path | str]) -> tuple[str, ...]:
    """Return as text which disks of these folders have no room for what is written there, one sentence a disk.

    A disk is named by its mount point, so that every reader of some of its folders says the same.
    """
    found = set()
    for folder in folders:
        try:
            disk, mount = os.statvfs(folder), _mount_of(Path(folder).absolute())
        except OSError:
            continue
        free = disk.f_bavail * disk.f_frsize
        if free < FULL_BYTES:
            found.add(f"the disk of {mount} is full: {free:,} bytes are free")
        elif disk.f_files and not disk.f_favail:
            found.add(f"the disk of {mount} is full: it has no inode left")
    return tuple(sorted(found))


def _mount_of(folder: Path) -> Path:
    device = folder.stat().st_dev
    while folder.parent != folder and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return folder


def planner_faults(
    full: Sequence[str], silent_real_s: float | None, problems: Sequence[str]
) -> tuple[str, ...]:
    """Return what keeps a planner from acting, one sentence a cause.

    Args:
        full: What `full_disks` says of the folders that it writes to.
        silent_real_s: Real seconds since it last wrote, where it should have written since; None: it has.
        problems: What it last said of itself; without a meaning once it is silent.
    """
    silent = "" if silent_real_s is None else f"the planner last wrote {silent_real_s:,.0f} s ago (real)"
    if full:
        since = f" ({silent})" if silent else ""
        others = [] if silent else [each for each in problems if not each.startswith(NOT_RECORDED)]
        return (*(f"{each}; nothing new is decided, recorded or logged{since}" for each in full), *others)
    return (f"{silent}: it hangs or is gone",) if silent else tuple(problems)


def worker_fault(name: str, reason: str) -> str:
    """Return why a worker cannot be used."""
    return f"{name}: {reason}"


def slow_worker(name: str, how: str) -> str:
    """Return how much slower than its equals a worker is."""
    return f"{name} is slow: {how}"
