"""Settings of priority tiers: their shares, what each is promised, and when the lower ones are shed. Seconds are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from penstock.api.base import (
    Flag,
    Integer,
    Number,
    ServedName,
    Share,
    SpecModel,
    Text,
    WholeSeconds,
    entry,
)
from penstock.api.durations import Duration
from penstock.api.enums import Tier
from penstock.api.rule import Breach, Rule
from penstock.api.slo import SloConfig, TierSlo

_E2E = "Time from arrival to last token, after which a request that still waits is refused. null: no target."


class TierShares(SpecModel):
    """Fair share of capacity for each tier while all tiers want it."""

    premium: Share = entry(0.5, "Share of tier premium, above 0, at most 1.")
    standard: Share = entry(0.35, "Share of tier standard, above 0, at most 1.")
    background: Share = entry(0.15, "Share of tier background, above 0, at most 1.")


class PremiumSlo(TierSlo):
    """Targets of tier premium."""

    end_to_end_seconds: Duration | None = entry(5.0, _E2E, alias="endToEnd")


class StandardSlo(TierSlo):
    """Targets of tier standard."""

    end_to_end_seconds: Duration | None = entry(15.0, _E2E, alias="endToEnd")


class BackgroundSlo(TierSlo):
    """Targets of tier background."""

    end_to_end_seconds: Duration | None = entry(60.0, _E2E, alias="endToEnd")


class TierSlos(SpecModel):
    """Targets of each tier."""

    premium: PremiumSlo = entry(PremiumSlo(), "Targets of tier premium.")
    standard: StandardSlo = entry(StandardSlo(), "Targets of tier standard.")
    background: BackgroundSlo = entry(BackgroundSlo(), "Targets of tier background.")


class SheddingConfig(SpecModel):
    """When arrivals of background, then of standard, are refused so that the tiers above keep their targets."""

    enabled: Flag = entry(True, "Shed; compliance is measured in either case.")
    window_seconds: WholeSeconds = entry(60, "Length of the sliding windows; seconds.")
    min_samples: Annotated[Integer, Field(ge=1, le=8192)] = entry(
        20, "Minimum number of measurements since the last step for a target to count as missed."
    )
    step_seconds: WholeSeconds = entry(5, "Minimum time between two steps up; seconds.")
    recover_seconds: WholeSeconds = entry(
        15, "Time for which the targets must be comfortably met before one step down; seconds."
    )
    recover_fraction: Share = entry(0.8, "Fraction of the target below which it counts as comfortably met.")


_ROUNDING = 1e-9
"""Above the error of adding three fractions."""


def _incomplete_shares(tiers: Any) -> Iterator[Breach]:
    total = tiers.shares.premium + tiers.shares.standard + tiers.shares.background
    if abs(total - 1) > _ROUNDING:
        yield Breach(values=(total,))


_SHARES = "self.shares.premium + self.shares.standard + self.shares.background"


class TiersConfig(SpecModel):
    """Priority tiers of requests."""

    enabled: Flag = entry(
        False,
        "Order requests by tier, in the router and in the workers, which then run with "
        "--scheduling-policy priority.",
    )
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] = entry(
        "x-penstock-tier", "Request header that names the tier."
    )
    default: Tier = entry(
        Tier.STANDARD, "Tier of a request that neither names one nor has a key that carries one; not system."
    )
    models: dict[ServedName, Tier] = entry({}, "Additional model names and the tier that each one selects.")
    keys_secret: Text | None = entry(
        None,
        "Secret whose values hold lines 'KEY TIER [TENANT]': a bearer token, the tier that it allows, and its tenant; "
        "on Kubernetes.",
    )
    keys_file: Text | None = entry(
        None,
        "File with the same lines; for local processes. Without keys every client may name any tier but system.",
    )
    shares: TierShares = entry(TierShares(), "Fair shares; their sum is 1.")
    round_tokens: Annotated[Integer, Field(ge=1, le=10_000_000)] = entry(
        8192, "Prompt tokens that all tiers together receive before each gets its next share."
    )
    aging_per_second: Annotated[Number, Field(ge=0, le=10)] = entry(
        0.1, "Priority levels that a waiting request gains each second; it never reaches premium's."
    )
    max_aging: Annotated[Number, Field(ge=0, le=10)] = entry(
        1.5, "Maximum number of priority levels that a waiting request gains."
    )
    max_tenant_share: Share = entry(
        0.5,
        "Maximum fraction of the queue slots open to its tier (prefillQueue.maxRequests) that one tenant, identified by its key, "
        "may occupy.",
    )
    slo: TierSlos = entry(TierSlos(), "Targets of each tier, in place of spec.slo.")
    shedding: SheddingConfig = entry(SheddingConfig(), "Refusal of lower tiers by SLO.")

    rules = (
        Rule(
            path="shares",
            must="the tiers' shares add up to 1",
            cel=f"{_SHARES} <= {1 + _ROUNDING} && {_SHARES} >= {1 - _ROUNDING}",
            find=_incomplete_shares,
            text="sum %s is not 1",
            values=(_SHARES,),
            remedy="change one of the shares",
        ),
        Rule(
            path="default",
            must="the default tier is not system",
            cel=f"self.default != '{Tier.SYSTEM}'",
            holds=lambda tiers: tiers.default is not Tier.SYSTEM,
            text="%s goes before all others and is for keys alone",
            values=("self.default",),
            remedy="choose premium, standard or background",
        ),
    )

    def under(self, slo: SloConfig) -> TiersConfig:
        """Return the section with the graph's targets where a tier has none; background has no latency target but its own."""
        own = self.slo
        resolved = TierSlos(
            premium=own.premium.model_copy(update=own.premium.under(slo)),
            standard=own.standard.model_copy(update=own.standard.under(slo)),
            background=own.background.model_copy(
                update={"attainment": own.background.under(slo)["attainment"]}
            ),
        )
        return self.model_copy(update={"slo": resolved})
