"""The ledger's last pulls, to gather again what is not in the planner's state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.planner.core.records import Record
from penstock.planner.decide.codec import pull_from
from penstock.planner.decide.observation import Pull


def recent_pulls(records: Iterable[Record], *, timeline: str, span_s: float) -> list[Pull]:
    """Return the pulls of the last seconds, oldest first.

    Args:
        records: Of a ledger, newest first, read as far as needed.
        timeline: Whose times are comparable; at records of another one the search ends.
        span_s: How far back at least, from the newest pull, simulated seconds.

    Raises:
        KeyError, TypeError, ValueError: a record lacks what its type promises.
    """
    found: list[Record] = []
    # Pulls do not say of which timeline they are; the next older record that does vouches for them.
    unproved: list[Record] = []
    newest_s: float | None = None
    for record in records:
        if record["type"] == "pull":
            newest_s = record["at_s"] if newest_s is None else newest_s
            unproved.append(record)
        elif "timeline" in record:
            if record["timeline"] != timeline:
                break
            found += unproved
            unproved = []
            if newest_s is not None and newest_s - record["at_s"] > span_s:
                break
    return [pull_from(record["pull"]) for record in reversed(found)]
