"""Sentences about faults of a graph, for `penstock status`, `penstock doctor` and ``/ui``, so that all of them show the same text.

Each fault is one sentence with its cause: a full disk, for example, explains both that the planner stopped writing
and that decisions are not recorded. The only I/O is reading the state of file systems.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

FULL_BYTES: Final = 1 << 20
"""Free bytes below which a disk counts as full. Chosen: a statefile and a few decisions."""

NOT_RECORDED: Final = "decisions cannot be recorded, so they are not applied"
"""Start of the sentence with which a planner reports that it cannot write its ledger."""


def full_disks(folders: Iterable[Path | str]) -> tuple[str, ...]:
    """Return one sentence for each full disk among the disks of these folders, sorted.

    A disk is named by its mount point, so that readers of different folders on it show the same sentence. Folders
    that cannot be checked are ignored.
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
    """Return the faults that keep a planner from acting, one sentence per cause; empty if there are none.

    Args:
        full: Result of `full_disks` for the folders that the planner writes to.
        silent_real_s: Wall-clock seconds since the planner last wrote its state, if it should have written since then;
            None if its last write is recent enough.
        problems: Problems that the planner last reported; ignored if ``silent_real_s`` is not None, since they are
            outdated then.
    """
    silent = "" if silent_real_s is None else f"the planner last wrote {silent_real_s:,.0f} s ago (real)"
    if full:
        since = f" ({silent})" if silent else ""
        others = [] if silent else [each for each in problems if not each.startswith(NOT_RECORDED)]
        return (*(f"{each}; nothing new is decided, recorded or logged{since}" for each in full), *others)
    return (f"{silent}: it hangs or is gone",) if silent else tuple(problems)


def worker_fault(name: str, reason: str) -> str:
    """Return a sentence that names a worker and the reason why it cannot be used."""
    return f"{name}: {reason}"


def slow_worker(name: str, how: str) -> str:
    """Return a sentence that names a worker that is slower than other workers of its kind.

    Args:
        name: Name of the worker.
        how: Description of the difference, such as how many times as long it takes.
    """
    return f"{name} is slow: {how}"
