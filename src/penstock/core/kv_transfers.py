"""Results of KV transfers from prefill to decode, and whether they indicate a problem. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class TransferResult(StrEnum):
    """Result of a prompt's KV transfer; a label value of `metric_names.ROUTER_KV_TRANSFERS`.

    Attributes:
        DONE: The decode worker received the KV.
        NONE: The prefill worker kept no KV, so the decode worker computes the prompt again.
        LOST: The KV did not arrive in the time for which the prefill worker keeps it (its lease), so the prompt is
            prefilled again.
    """

    DONE = "done"
    NONE = "none"
    LOST = "lost"


_ENOUGH: Final = 20
"""Number of prompts below which nothing is reported. Chosen: a few prompts shorter than a block are normal."""
_FRACTION: Final = 0.5
"""Maximum fraction of prompts that are computed twice. Chosen, equal to the alert's default: short prompts are a part
of any traffic."""


@dataclass(frozen=True, slots=True)
class KvTransferCounts:
    """Number of prompts by result of their KV transfer since the router's start.

    Attributes:
        done: Prompts whose KV the decode worker received.
        none: Prompts of which the prefill worker kept no KV.
        lost: Prompts whose KV did not arrive in time.
    """

    done: int = 0
    none: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        """Number of all prompts."""
        return self.done + self.none + self.lost

    def __str__(self) -> str:
        """Return the counts as text."""
        return f"{self.done} done, {self.none} none, {self.lost} lost"

    def problem(self) -> str | None:
        """Return a sentence if too many prompts were computed by prefill and again by decode; else None.

        Returns None as well if there are too few prompts to tell.
        """
        again = self.none + self.lost
        if self.total < _ENOUGH or again <= _FRACTION * self.total:
            return None
        return (
            f"of {self.total} prompts {again} were computed twice, because their KV did not come from prefill to decode "
            f"({self})"
        )


REMEDY: Final = (
    "of none: both roles need the NIXL connector (penstock validate; --kv-transfer-config in args); of lost: see the logs of "
    "the workers, and docs/leases.md"
)
"""Remedy for the problem that `KvTransferCounts.problem` reports."""
