"""Compares what another autoscaler held with what a shadow planner would have held, from the planner's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.api import Role
from penstock.assess.observed import Floats
from penstock.assess.shadow.record import ShadowRecord, shadow_record_of
from penstock.core.errors import ConfigError, LedgerError
from penstock.report.ledger_view import LoadOrigin, PlannerRun, view_of
from penstock_planner.core.records import MALFORMED, Record
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.ledger import read_ledger

LONG_GAP_S: Final = 600.0
"""Simulated seconds without a reading from which a note names the gap. Chosen: a restart of Prometheus takes less."""


@dataclass(frozen=True, slots=True)
class Held:
    """Replicas of one role of one fleet over time.

    Attributes:
        at_s: Times of the readings, simulated seconds from the first one.
        ready: Ready replicas at each reading.
        replicas: Ready and starting replicas at each reading.
        hours: GPU-hours of ready and starting replicas, from the first to the last reading.
        changes: Number of times at which the number of replicas changed.
    """

    at_s: Floats
    ready: Floats
    replicas: Floats
    hours: float
    changes: int

    @property
    def peak(self) -> int:
        """Largest number of ready and starting replicas."""
        return int(self.replicas.max())

    @property
    def mean(self) -> float:
        """Mean number of ready and starting replicas over time."""
        spans = np.diff(self.at_s)
        return float((self.replicas[:-1] * spans).sum() / spans.sum())

    def at(self, times_s: Floats) -> Floats:
        """Return the ready replicas at given times; before the first reading those of the first."""
        places = np.searchsorted(self.at_s, times_s, side="right") - 1
        return np.asarray(self.ready[np.maximum(places, 0)])


@dataclass(frozen=True, slots=True)
class ShadowHistory:
    """A shadow planner's run, as its ledger has it.

    Attributes:
        record: Where the watched fleet was read.
        speed: Time factor, simulated seconds per real second.
        start_s: Real seconds since 1970 of the first reading.
        duration_s: Simulated seconds from the first to the last reading.
        watched: Replicas that the other autoscaler held, by role.
        shadow: Replicas that the planner would have held, by role.
        run: Decisions and metrics; its times count from the first reading.
        notes: Sentences for the reader.
    """

    record: ShadowRecord
    speed: float
    start_s: float
    duration_s: float
    watched: dict[Role, Held]
    shadow: dict[Role, Held]
    run: PlannerRun
    notes: tuple[str, ...] = ()

    @property
    def end_s(self) -> float:
        """Real seconds since 1970 of the last reading."""
        return self.start_s + self.duration_s / self.speed

    @property
    def watched_hours(self) -> float:
        """GPU-hours of the watched fleet."""
        return sum(each.hours for each in self.watched.values())

    @property
    def shadow_hours(self) -> float:
        """GPU-hours of the shadow fleet."""
        return sum(each.hours for each in self.shadow.values())


def load_history(path: Path) -> ShadowHistory:
    """Return the newest run in a shadow planner's ledger.

    Args:
        path: Ledger file, or the folder that contains it.

    Raises:
        ConfigError: the ledger is of a planner that watched no other fleet, or has too few readings.
        LedgerError: the ledger cannot be read.
    """
    found = read_ledger(path)
    try:
        return _history_of(path, found.records, found.notes)
    except MALFORMED as exc:
        raise LedgerError(f"{path}: a record lacks what its type promises: {exc!r}") from exc


def _history_of(path: Path, records: Sequence[Record], notes: Sequence[str]) -> ShadowHistory:
    header = next((each for each in reversed(records) if each["type"] == "header"), None)
    record = None if header is None else shadow_record_of(header)
    if header is None or record is None:
        raise ConfigError(
            f"--run: required, because {path} is not of a shadow planner; give the output directory of `penstock load`"
        )
    begun = [each for each in records if each["type"] == "header" and each["timeline"] == header["timeline"]]
    pulled = [each["at_s"] for each in records if each["type"] == "pull" and each["at_s"] >= begun[0]["at_s"]]
    if len(pulled) < 2:
        raise ConfigError(
            f"--ledger: {path} has {len(pulled)} readings of the watched fleet; let the planner run longer"
        )
    speed = float(header["speed"])
    start_s = begun[0]["wall_s"] + (pulled[0] - begun[0]["at_s"]) / speed
    run = view_of(records, origin=LoadOrigin(pulled[0], start_s, speed))
    assert run is not None  # noqa: S101 - there is a header
    pulls = [each for each in run.pulls if each.watched is not None]
    at_s = np.array([each.at_s for each in pulls])
    watched = {
        role: _held(at_s, [(each.watched or {})[role] for each in pulls]) for role in pulls[0].watched or {}
    }
    shadow = {role: _held(at_s, [each.pools[role] for each in pulls]) for role in watched}
    return ShadowHistory(
        record,
        speed,
        start_s,
        float(at_s[-1]),
        watched,
        shadow,
        run,
        (*notes, *_notes(record, at_s)),
    )


def _held(at_s: Floats, pools: Sequence[PoolCounts]) -> Held:
    ready, replicas = (
        np.array([getattr(each, name) for each in pools], dtype=np.float64) for name in ("ready", "replicas")
    )
    gpus = max(each.gpus for each in pools)
    hours = float((replicas[:-1] * np.diff(at_s)).sum()) * gpus / 3600
    return Held(at_s, ready, replicas, hours, int(np.count_nonzero(np.diff(replicas))))


def _notes(record: ShadowRecord, at_s: Floats) -> list[str]:
    found = []
    longest_s = float(np.diff(at_s).max())
    if longest_s > LONG_GAP_S:
        found.append(
            f"the watched fleet could not be read for {longest_s / 60:.0f} min at a time; both fleets count as unchanged then"
        )
    if any("{" in each for each in record.pools):
        found.append(
            "replicas of the watched fleet are scraped processes, which a starting replica is not: its GPU-hours lack its starts,"
            " the shadow fleet's have them"
        )
    return found
