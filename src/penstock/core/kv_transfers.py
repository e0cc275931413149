"""What became of the prompts that prefill computed for decode, and whether that is worth a finding. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class TransferResult(StrEnum):
    """What became of a prompt's KV; a label of `metric_names.ROUTER_KV_TRANSFERS`.

    ``none``: the prefill worker kept no KV, so the decode worker computes the prompt again. ``lost``: the KV did not
    arrive, or not within its lease, so the prompt is prefilled again.
    """

    DONE = "done"
    NONE = "none"
    LOST = "lost"


_ENOUGH: Final = 20
"""Prompts below which nothing is said. Chosen: a few short ones, of less than a block, are not a finding."""
_FRACTION: Final = 0.5
"""Fraction of the prompts that may be computed twice. Chosen, as the alert's default: short prompts are a part of any traffic."""


@dataclass(frozen=True, slots=True)
class KvTransferCounts:
    """Prompts by result since the router started."""

    done: int = 0
    none: int = 0
    lost: int = 0

    @property
    def total(self) -> int:
        """Return the count of all transfers."""
        return self.done + self.none + self.lost

    def __str__(self) -> str:
        """Return them as text."""
        return f"{self.done} done, {self.none} none, {self.lost} lost"

    def problem(self) -> str | None:
        """Return what is wrong, for people; None: nothing, or too few prompts."""
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
