"""What a shadow planner's ledger says about the watched fleet, so that a report can read the same history. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock_planner.decide.codec import from_plain

KEY: Final = "shadow"
"""Key of the record in the ledger's header."""


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """Where the watched fleet was read.

    Attributes:
        prometheus: URL of the server.
        credentials: File with its credentials; None: none.
        model: Model's name in the metrics' labels.
        matchers: Further PromQL matchers of the engines' series.
        pools: Watched pools, as ``--shadow`` takes them.
        replicas_from: Source of the replica counts.
        cold_start_s: Simulated seconds from requesting a replica until it serves.
        scrape_s: Real seconds between two scrapes.
    """

    prometheus: str
    credentials: str | None
    model: str
    matchers: tuple[str, ...]
    pools: tuple[str, ...]
    replicas_from: str
    cold_start_s: float
    scrape_s: float


def shadow_record_of(header: Mapping[str, Any]) -> ShadowRecord | None:
    """Return the record in a ledger's header; None: the planner watched no other fleet.

    Raises:
        AttributeError, TypeError, ValueError: the record is malformed.
    """
    plain = header.get(KEY)
    return None if plain is None else from_plain(ShadowRecord, plain, skips_unknown=True)
