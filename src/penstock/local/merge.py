"""Brings together what the supervisor could not write and what others wrote meanwhile. Pure."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from penstock.local.statefile import ArbiterInfo, ProcessEntry, StateFile

_T = TypeVar("_T", ArbiterInfo, ProcessEntry)


def merge(base: StateFile, ours: StateFile, theirs: StateFile) -> StateFile:
    """Return ``theirs`` with everything changed that ``ours`` changes against ``base``.

    Args:
        base: The file from which ``ours`` was made.
        ours: What was to be written.
        theirs: The file as it is now; where both sides changed one field, ours holds.
    """
    entries: dict[str, ProcessEntry] = {}
    for name in (*theirs.entries, *(name for name in ours.entries if name not in theirs.entries)):
        entry = _entry(base.entries.get(name), ours.entries.get(name), theirs.entries.get(name))
        if entry is not None:
            entries[name] = entry
    return StateFile(_changed(base.arbiter, ours.arbiter, theirs.arbiter), entries)


def _entry(
    base: ProcessEntry | None, ours: ProcessEntry | None, theirs: ProcessEntry | None
) -> ProcessEntry | None:
    """Return the merged entry; None for one that a side removed and the other did not change."""
    if ours is None or ours == base:
        return theirs if ours is not None or base is None else None
    if theirs is None or base is None:
        return ours
    return _changed(base, ours, theirs)


def _changed(base: _T, ours: _T, theirs: _T) -> _T:
    names = (field.name for field in fields(base))
    return replace(theirs, **{n: getattr(ours, n) for n in names if getattr(ours, n) != getattr(base, n)})
