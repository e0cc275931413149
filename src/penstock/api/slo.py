"""The service-level objective of a graph: one target for its router, planner, profiles, reports and simulations.

A tier of requests, or a profile request, may have targets of its own; what it leaves out is the graph's. Pure.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from penstock.api.base import Number, SpecModel, entry
from penstock.api.durations import Duration

Attainment = Annotated[Number, Field(ge=0.5, lt=1)]

UNUSUAL_TTFT_S: Final = 60.0
"""A longer TTFT target is probably a mistake in the unit, and `penstock validate` warns. Chosen: no interactive client waits
for a minute."""
UNUSUAL_ITL_S: Final = 1.0
"""Likewise of the ITL. Chosen: one token a second is far slower than anyone reads."""


class SloConfig(SpecModel):
    """Latency that requests should have, and the fraction of them that must have it.

    The default TTFT is the one of the DualMap paper's experiments, by which the default routing policy was chosen. There is no
    default ITL: what a model can reach depends on its size and GPUs.
    """

    ttft_seconds: Duration = entry(
        5.0, "Target for the time from arrival to the first token, queueing included.", alias="ttft"
    )
    itl_seconds: Duration | None = entry(
        None,
        "Target for the time between two tokens of a request. null: none; mode sla of the planner then sizes decode by capacity "
        "alone.",
        alias="itl",
    )
    attainment: Attainment = entry(
        0.99,
        "Fraction of the requests that must meet the targets; nothing is spent on more. 0.5 to below 1.",
    )

    def with_given(self, *, ttft_s: float | None, itl_s: float | None, attainment: float | None) -> SloConfig:
        """Return these targets with others, such as a command's flags, in their place; None: not given."""
        given = {"ttft_seconds": ttft_s, "itl_seconds": itl_s, "attainment": attainment}
        return self.model_copy(update={key: value for key, value in given.items() if value is not None})


class TierSlo(SpecModel):
    """Targets of one tier."""

    ttft_seconds: Duration | None = entry(
        None, "TTFT target of the tier. null: spec.slo.ttft, for background none.", alias="ttft"
    )
    itl_seconds: Duration | None = entry(
        None,
        "ITL target of the tier, compared with each request's mean time between tokens. null: spec.slo.itl, for background none.",
        alias="itl",
    )
    attainment: Attainment | None = entry(
        None,
        "Fraction of the tier's requests that must meet its targets; null: spec.slo.attainment.",
    )

    def under(self, slo: SloConfig) -> dict[str, float | None]:
        """Return the targets with those of the graph where the tier has none."""
        own = (self.ttft_seconds, self.itl_seconds, self.attainment)
        graph = (slo.ttft_seconds, slo.itl_seconds, slo.attainment)
        names = ("ttft_seconds", "itl_seconds", "attainment")
        return {
            name: theirs if mine is None else mine
            for name, mine, theirs in zip(names, own, graph, strict=True)
        }


class ProfileSlo(SpecModel):
    """Targets of a profile request."""

    ttft_seconds: Duration | None = entry(None, "TTFT to plan for; null: the graph's slo.ttft.", alias="ttft")
    itl_seconds: Duration | None = entry(None, "ITL to plan for; null: the graph's slo.itl.", alias="itl")
