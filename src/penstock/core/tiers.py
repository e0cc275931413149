"""The tiers of requests and the numbers that carry them to engines; router, engine and benchmarks share it. Pure.

vLLM's ``priority`` is an integer; lower values run first, 0 where a request has none.
"""

from __future__ import annotations

from enum import IntEnum


class TierPriority(IntEnum):
    """A tier's ``priority``: system before premium before standard before background.

    Premium is 0, vLLM's own default, so that requests without a tier are all equal and none is a
    victim. Source: the order of tiers is that of vLLM's field, system below all that clients may ask for.
    """

    SYSTEM = -1
    PREMIUM = 0
    STANDARD = 1
    BACKGROUND = 2


def priority_of(tier: str) -> int:
    """Return the ``priority`` that a tier's requests carry to a worker."""
    try:
        return int(TierPriority[tier.upper()])
    except KeyError as exc:
        known = ", ".join(each.name.lower() for each in TierPriority)
        raise ValueError(f"tier {tier!r} is unknown; choose one of {known}") from exc


def tier_of(priority: int) -> TierPriority:
    """Return the tier whose requests have this ``priority``; beyond the outermost tiers, the outermost."""
    return TierPriority(min(max(priority, TierPriority.SYSTEM), TierPriority.BACKGROUND))
