"""Request tiers and the priorities that represent them at engines; shared by router, engine and benchmarks. Pure.

vLLM's ``priority`` is an integer; lower values run first, and requests without one have 0.
"""

from __future__ import annotations

from enum import IntEnum


class TierPriority(IntEnum):
    """Priority of each tier: system before premium before standard before background.

    Premium is 0, vLLM's default, so that requests without a tier are all equal and none is preempted in favour of
    another. Source: the order follows vLLM's field, with system before all tiers that clients can select.
    """

    SYSTEM = -1
    PREMIUM = 0
    STANDARD = 1
    BACKGROUND = 2


def priority_of(tier: str) -> int:
    """Return the ``priority`` with which a tier's requests are sent to workers.

    Args:
        tier: Name of the tier, in any case.

    Raises:
        ValueError: The tier is unknown.
    """
    try:
        return int(TierPriority[tier.upper()])
    except KeyError as exc:
        known = ", ".join(each.name.lower() for each in TierPriority)
        raise ValueError(f"tier {tier!r} is unknown; choose one of {known}") from exc


def tier_of(priority: int) -> TierPriority:
    """Return the tier of a ``priority``; a value below that of all tiers belongs to system, one above to background."""
    return TierPriority(min(max(priority, TierPriority.SYSTEM), TierPriority.BACKGROUND))
