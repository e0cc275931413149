"""Priority tiers: their order, shares and targets, and what the queue and the SLO monitor make of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.api import Tier, TiersConfig
from penstock.core.tiers import priority_of

PRIORITIES: Final[Mapping[Tier, int]] = {tier: priority_of(tier) for tier in Tier}
"""As vLLM's ``priority`` of a request: lower goes first. From the highest tier to the lowest."""

SHARED: Final = (Tier.PREMIUM, Tier.STANDARD, Tier.BACKGROUND)
"""Tiers that share capacity, highest first; system goes before them and has no share."""

_AGED_PRIORITY: Final = 0.5
"""Where aging ends: before a fresh standard request, behind any premium one."""


@dataclass(frozen=True, slots=True)
class SloTarget:
    """What a tier is promised, simulated seconds; None: nothing.

    Attributes:
        ttft_s: Arrival to first token.
        tpot_s: Mean time between the tokens that follow it.
        e2e_s: Arrival to last token; a request that still waits then is refused.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


_DEFAULTS: Final = TiersConfig()


def _shares(config: TiersConfig) -> dict[Tier, float]:
    shares = config.shares
    return dict(zip(SHARED, (shares.premium, shares.standard, shares.background), strict=True))


def _targets(config: TiersConfig) -> dict[Tier, SloTarget]:
    slo = config.slo
    return {
        tier: SloTarget(each.ttft_seconds, each.tpot_seconds, each.end_to_end_seconds)
        for tier, each in (
            (Tier.PREMIUM, slo.premium),
            (Tier.STANDARD, slo.standard),
            (Tier.BACKGROUND, slo.background),
        )
    }


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How tiers share the capacity; the defaults are those of a manifest without the section.

    Attributes:
        shares: Of each tier of `SHARED`, each > 0; they need not sum to 1, only their ratios count.
        round_tokens: Tokens that all tiers together get in one round, > 0.
        aging_per_s: Priority that a waiting request gains each second, >= 0.
        max_aging: Most priority that it gains.
        max_tenant_share: Of what a tenant has waiting and what is free for its tier, the most that it may have, 0-1.
        targets: By tier; absent: none.
    """

    shares: Mapping[Tier, float] = field(default_factory=lambda: _shares(_DEFAULTS))
    round_tokens: float = _DEFAULTS.round_tokens
    aging_per_s: float = _DEFAULTS.aging_per_second
    max_aging: float = _DEFAULTS.max_aging
    max_tenant_share: float = _DEFAULTS.max_tenant_share
    targets: Mapping[Tier, SloTarget] = field(default_factory=lambda: _targets(_DEFAULTS))

    def quantum(self, tier: Tier) -> float:
        """Return the tokens that a tier of `SHARED` gets in one round."""
        return self.round_tokens * self.shares[tier] / sum(self.shares.values())

    def effective_priority(self, tier: Tier, waited_s: float) -> float:
        """Return the priority of a request that has waited; lower goes first.

        Background reaches 1 after 10 s and ends at 0.5 after 15 s; standard reaches 0.5 after 5 s. No age brings a
        request before fresh premium.
        """
        base = PRIORITIES[tier]
        if base <= 0:
            return base
        return max(_AGED_PRIORITY, base - min(self.max_aging, self.aging_per_s * max(0.0, waited_s)))

    def target(self, tier: Tier) -> SloTarget:
        """Return what a tier is promised."""
        return self.targets.get(tier, SloTarget())


def tier_settings(config: TiersConfig) -> TierSettings:
    """Return how tiers share, and what they are promised, as a graph's tiers section says."""
    return TierSettings(
        shares=_shares(config),
        round_tokens=float(config.round_tokens),
        aging_per_s=config.aging_per_second,
        max_aging=config.max_aging,
        max_tenant_share=config.max_tenant_share,
        targets=_targets(config),
    )
