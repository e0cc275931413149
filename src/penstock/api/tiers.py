"""Settings of priority tiers: who belongs to one, how they share, what each is promised, when the lower are shed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.api.base import Flag, Integer, Number, ServedName, SpecModel, Text
from penstock.api.enums import Tier

Seconds = Annotated[Number, Field(gt=0, le=86400)]
Share = Annotated[Number, Field(gt=0, le=1)]

_TTFT = "p99 of the time from arrival to first token; seconds. null: no target."
_TPOT = "p99 of the mean time between a request's further tokens; seconds. null: no target."
_E2E = "Time from arrival to last token, after which a request that still waits is refused; seconds. null: no target."


class TierShares(SpecModel):
    """Fair share of capacity for each tier while all tiers want it."""

    premium: Share = Field(default=0.5, description="Share of tier premium, above 0, at most 1.")
    standard: Share = Field(default=0.35, description="Share of tier standard, above 0, at most 1.")
    background: Share = Field(default=0.15, description="Share of tier background, above 0, at most 1.")


class PremiumSlo(SpecModel):
    """What tier premium is promised."""

    ttft_seconds: Seconds | None = Field(default=0.2, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=0.03, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=5, description=_E2E)


class StandardSlo(SpecModel):
    """What tier standard is promised."""

    ttft_seconds: Seconds | None = Field(default=0.5, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=0.08, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=15, description=_E2E)


class BackgroundSlo(SpecModel):
    """What tier background is promised."""

    ttft_seconds: Seconds | None = Field(default=None, description=_TTFT)
    tpot_seconds: Seconds | None = Field(default=None, description=_TPOT)
    end_to_end_seconds: Seconds | None = Field(default=60, description=_E2E)


class TierSlos(SpecModel):
    """What each tier is promised."""

    premium: PremiumSlo = Field(default=PremiumSlo(), description="Targets of tier premium.")
    standard: StandardSlo = Field(default=StandardSlo(), description="Targets of tier standard.")
    background: BackgroundSlo = Field(default=BackgroundSlo(), description="Targets of tier background.")


class SheddingConfig(SpecModel):
    """When arrivals of background, then of standard, are refused so that the tiers above keep their targets."""

    enabled: Flag = Field(default=True, description="Shed; compliance is measured in either case.")
    percentile: Annotated[Number, Field(ge=50, le=100)] = Field(
        default=99,
        description="Percentile, by nearest rank, of TTFT and TPOT that is compared with the targets.",
    )
    window_seconds: Seconds = Field(default=60, description="Length of the sliding windows; seconds.")
    min_samples: Annotated[Integer, Field(ge=1, le=8192)] = Field(
        default=20, description="Fewer measurements since the last step are no proof of a missed target."
    )
    step_seconds: Seconds = Field(default=5, description="Least time before one more step up; seconds.")
    recover_seconds: Seconds = Field(
        default=15, description="Time well within the targets before one step down; seconds."
    )
    recover_fraction: Annotated[Number, Field(gt=0, le=1)] = Field(
        default=0.8, description="Well within: at most this fraction of the target."
    )


class TiersConfig(SpecModel):
    """Priority tiers of requests."""

    enabled: Flag = Field(
        default=False,
        description="Order requests by tier, in the router and in the workers, which then run with "
        "--scheduling-policy priority.",
    )
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] = Field(
        default="x-penstock-tier", description="Request header that names the tier."
    )
    default: Tier = Field(
        default=Tier.STANDARD,
        description="Tier of a request that names none and has no key of one; not system.",
    )
    models: dict[ServedName, Tier] = Field(
        default={},
        description="Further names of the model, each with the tier that asking by this name asks for.",
    )
    keys_secret: Text | None = Field(
        default=None,
        description="Secret whose values hold lines 'KEY TIER [TENANT]': bearer tokens with the tier that they allow "
        "and whose they are; on Kubernetes.",
    )
    keys_file: Text | None = Field(
        default=None,
        description="File of such lines; for local processes. Without keys every client may name any tier but system.",
    )
    shares: TierShares = Field(default=TierShares(), description="Fair shares; their sum is 1.")
    round_tokens: Annotated[Integer, Field(ge=1, le=10_000_000)] = Field(
        default=8192,
        description="Prompt tokens that all tiers together are given before each has its next share.",
    )
    aging_per_second: Annotated[Number, Field(ge=0, le=10)] = Field(
        default=0.1,
        description="Priority levels that a waiting request gains each second, never to premium's.",
    )
    max_aging: Annotated[Number, Field(ge=0, le=10)] = Field(
        default=1.5, description="Most priority levels that a waiting request gains."
    )
    max_tenant_share: Share = Field(
        default=0.5,
        description="Most that one tenant, known by its key, may have of what it has waiting and what is free for its "
        "tier in prefillQueue.maxRequests.",
    )
    slo: TierSlos = Field(default=TierSlos(), description="What each tier is promised.")
    shedding: SheddingConfig = Field(default=SheddingConfig(), description="Refusal of lower tiers by SLO.")
