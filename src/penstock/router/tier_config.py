"""What a graph's tiers section says, as the tier queue and the SLO monitor take it; the simulator's is made here too."""

from __future__ import annotations

from penstock.api import Tier, TiersConfig
from penstock.router.policy.slo_monitor import SheddingSettings
from penstock.router.policy.tiers import SloTarget, TierSettings


def tier_settings(config: TiersConfig) -> TierSettings:
    """Return how tiers share, and what they are promised."""
    shares, slo = config.shares, config.slo
    return TierSettings(
        shares={
            Tier.PREMIUM: shares.premium,
            Tier.STANDARD: shares.standard,
            Tier.BACKGROUND: shares.background,
        },
        round_tokens=float(config.round_tokens),
        aging_per_s=config.aging_per_second,
        max_aging=config.max_aging,
        max_tenant_share=config.max_tenant_share,
        targets={
            tier: SloTarget(each.ttft_seconds, each.tpot_seconds, each.end_to_end_seconds)
            for tier, each in (
                (Tier.PREMIUM, slo.premium),
                (Tier.STANDARD, slo.standard),
                (Tier.BACKGROUND, slo.background),
            )
        },
    )


def shedding_settings(config: TiersConfig) -> SheddingSettings:
    """Return when tiers are shed."""
    shedding = config.shedding
    return SheddingSettings(
        is_enabled=shedding.enabled,
        percent=shedding.percentile,
        window_s=shedding.window_seconds,
        min_samples=shedding.min_samples,
        step_s=shedding.step_seconds,
        recover_s=shedding.recover_seconds,
        recover_fraction=shedding.recover_fraction,
    )
