"""Sentences about faults that `status`, `doctor` and ``/ui`` share."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core.findings import NOT_RECORDED, full_disks, planner_faults

FULL = "the disk of /logs is full: 0 bytes are free"
STOPS = f"{FULL}; nothing new is decided, recorded or logged"


def mount_of(folder: Path) -> Path:
    """Return where the disk of a folder is mounted."""
    return next(each for each in [folder, *folder.parents] if os.path.ismount(each))


@pytest.mark.parametrize(
    ("full", "silent_s", "problems", "expected"),
    [
        ((), None, (), ()),
        ((), None, ("prometheus: no answer",), ("prometheus: no answer",)),
        ((), 53.2, ("old",), ("the planner last wrote 53 s ago (real): it hangs or is gone",)),
        ((FULL,), None, (f"{NOT_RECORDED}: no space", "gone"), (STOPS, "gone")),
        ((FULL,), 53.2, ("old",), (f"{STOPS} (the planner last wrote 53 s ago (real))",)),
    ],
)
def test_one_cause_is_one_sentence(full, silent_s, problems, expected):
    """A full disk explains both that the planner is silent and that it cannot record."""
    assert planner_faults(full, silent_s, problems) == expected


def test_folders_of_one_full_disk_are_one_sentence(tmp_path, monkeypatch):
    """However many of a graph's folders are on it; one that does not exist is left out."""
    inner = tmp_path / "planner"
    inner.mkdir()
    room = SimpleNamespace(f_bavail=1, f_frsize=4096, f_files=1, f_favail=1)
    monkeypatch.setattr(os, "statvfs", lambda _: room)

    found = full_disks([inner, tmp_path, tmp_path / "absent"])

    assert found == (f"the disk of {mount_of(tmp_path)} is full: 4,096 bytes are free",)


def test_a_disk_without_inodes_is_full(tmp_path, monkeypatch):
    """Room is of no use without an inode for a new file."""
    room = SimpleNamespace(f_bavail=1 << 20, f_frsize=4096, f_files=9, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: room)

    assert full_disks([tmp_path]) == (f"the disk of {mount_of(tmp_path)} is full: it has no inode left",)
