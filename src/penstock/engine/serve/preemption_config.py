"""Reads ``--preemption-config``: JSON that makes workers of tiers preempt, and turns it into the core's terms.

`serve.settings` and the simulator call it, so that a graph means the same to live and simulated workers.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.api import PreemptionConfig
from penstock.api.base import Number
from penstock.core.validation import read_json_flag
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.profiles import Profile

DEFAULT_PREEMPTIONS, DEFAULT_RESERVED_FRACTION = 3, 0.3
"""Chosen; `PreemptionConfig` says so to users."""


class PreemptionFlag(PreemptionConfig):
    """The JSON's keys: those of ``spec.engine.preemption``, and the link's to host memory.

    The link is PCIe 4.0 x16 by default, 25 GB/s in practice for each GPU.
    """

    swap_link_gigabytes_per_second: Annotated[Number, Field(gt=0)] = 25.0
    swap_link_latency_ms: Annotated[Number, Field(ge=0)] = 1.0

    def terms(self, profile: Profile, block_size: int) -> PreemptionTerms:
        """Return the core's terms for a worker of ``profile`` with blocks of ``block_size`` tokens."""
        block_bytes = profile.kv.bytes_per_token * block_size
        bytes_per_s = self.swap_link_gigabytes_per_second * 1e9 * profile.tensor_parallel
        most, reserved = self.max_per_request, self.premium_reserved_fraction
        return PreemptionTerms(
            max_per_request=DEFAULT_PREEMPTIONS if most is None else most,
            reserved_fraction=DEFAULT_RESERVED_FRACTION if reserved is None else reserved,
            host_blocks=int((self.swap_gigabytes or 0) * 1e9 // block_bytes),
            host_link=LinkTerms(self.swap_link_latency_ms / 1000, bytes_per_s),
            drop_above_s=self.drop_above_seconds,
        )


def parse_preemption_config(text: str) -> PreemptionFlag:
    """Return what ``text`` says."""
    return read_json_flag(PreemptionFlag, text, "--preemption-config")
