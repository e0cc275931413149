"""Reads ``--preemption-config``: JSON that makes workers of tiers preempt, and turns it into the core's terms.

`serve.settings` and the simulator call it, so that a graph means the same to live and simulated workers.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from penstock.core.validation import read_json_flag
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.profiles import Profile

Finite = Annotated[float, Field(allow_inf_nan=False)]


class PreemptionConfig(BaseModel):
    """The JSON's keys, those of ``spec.engine.preemption`` and the link's.

    The link is PCIe 4.0 x16 by default, 25 GB/s in practice for each GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    maxPerRequest: Annotated[int, Field(ge=0, le=100)] = 3  # noqa: N815 - the wire's spelling
    premiumReservedFraction: Annotated[Finite, Field(ge=0, lt=1)] = 0.3  # noqa: N815
    swapGigabytes: Annotated[Finite, Field(ge=0)] = 0.0  # noqa: N815
    dropAboveSeconds: Annotated[Finite, Field(gt=0)] | None = None  # noqa: N815
    swapLinkGigabytesPerSecond: Annotated[Finite, Field(gt=0)] = 25.0  # noqa: N815
    swapLinkLatencyMs: Annotated[Finite, Field(ge=0)] = 1.0  # noqa: N815

    def terms(self, profile: Profile, block_size: int) -> PreemptionTerms:
        """Return the core's terms for a worker of ``profile`` with blocks of ``block_size`` tokens."""
        block_bytes = profile.kv.bytes_per_token * block_size
        bytes_per_s = self.swapLinkGigabytesPerSecond * 1e9 * profile.tensor_parallel
        return PreemptionTerms(
            max_per_request=self.maxPerRequest,
            reserved_fraction=self.premiumReservedFraction,
            host_blocks=int(self.swapGigabytes * 1e9 // block_bytes),
            host_link=LinkTerms(self.swapLinkLatencyMs / 1000, bytes_per_s),
            drop_above_s=self.dropAboveSeconds,
        )


def parse_preemption_config(text: str) -> PreemptionConfig:
    """Return what ``text`` says.

    Raises:
        ConfigError: it is not JSON, or a key is unknown or out of its bounds; each is named.
    """
    return read_json_flag(PreemptionConfig, text, "--preemption-config")
