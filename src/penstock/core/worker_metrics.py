"""What a worker's page says, by vLLM's names; the router's scraper and the planner's sources share it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core import metric_names as names
from penstock.core.exposition import Sample

WAITING_NAMES: Final = (names.VLLM_WAITING, names.VLLM_WAITING_BY_REASON)
"""What `waiting_by_engine` reads."""

_CAPACITY: Final = "capacity"
"""The reason that counts: ``deferred`` requests wait for a KV transfer, not for room."""


def waiting_by_engine(samples: Sequence[Sample]) -> list[float]:
    """Return the requests that wait for room in each of a worker's engines.

    Older workers do not report why a request waits; all of theirs count.

    Args:
        samples: Of one worker; other names are skipped.

    Returns:
        As written, one number per engine; empty if the page does not say.
    """
    return [
        sample.value
        for sample in samples
        if sample.name == names.VLLM_WAITING_BY_REASON and sample.labels.get("reason") == _CAPACITY
    ] or [sample.value for sample in samples if sample.name == names.VLLM_WAITING]
