"""What the DualMap paper reports, alongside which our figures are put; nothing here is measured by us.

Source: Yuan et al., "DualMap: Enabling both cache affinity and load balancing for distributed LLM serving";
its figures are given as text only where the paper states numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of the paper.

    Attributes:
        key: Which of our figures is alongside it.
        text: What is compared.
        paper: The paper's number, as printed.
    """

    key: str
    text: str
    paper: str


CLAIMS = (
    Claim("conversation.capacity_gain", "Conversation: capacity over the best baseline", "+40.6% to +80%"),
    Claim("conversation.capacity_gain.but_preble", "the same without Preble", "+40.6% to +80%"),
    Claim("conversation.goodput_gain", "Conversation: goodput over the best baseline", "+14.3% to +40%"),
    Claim("conversation.goodput_gain.but_preble", "the same without Preble", "+14.3% to +40%"),
    Claim("toolagent.capacity_gain", "Tool&Agent: capacity over the best baseline", "up to +125%"),
    Claim("toolagent.capacity_gain.but_preble", "the same without Preble", "up to +125%"),
    Claim("toolagent.goodput_gain", "Tool&Agent: goodput over the best baseline", "+16.7% to +48%"),
    Claim("toolagent.goodput_gain.but_preble", "the same without Preble", "+16.7% to +48%"),
    Claim("conversation.p50_change", "high rate: P50 TTFT against the best baseline", "-55.4% to -97.4%"),
    Claim("conversation.p50_change.but_preble", "the same without Preble", "-55.4% to -97.4%"),
    Claim("conversation.p90_change", "high rate: P90 TTFT against the best baseline", "-82.3% to -97%"),
    Claim("conversation.p90_change.but_preble", "the same without Preble", "-82.3% to -97%"),
    Claim("conversation.affinity_over_load", "Conversation: hits, cache-affinity / least-loaded", "1.21"),
    Claim("conversation.bound_share", "Conversation: DualMap's hits of the bound", "62.5%"),
    Claim("toolagent.bound_share", "Tool&Agent: DualMap's hits of the bound", "96.4%"),
    Claim("ablation.slo_p50", "14B: SLO-aware without rebalancing against pair min-TTFT, P50", "-23.5%"),
    Claim("ablation.slo_p90", "the same, P90", "-18.5%"),
    Claim("ablation.rebalance_p90", "rebalancing on top, P90", "-11.3%"),
    Claim("elasticity.up", "4 to 8 instances at 74 s, QPS 4: attainment afterwards", "90%"),
    Claim("elasticity.down", "8 to 4 instances from 1,809 s, QPS 2: attainment", "> 90%"),
    Claim("scaling.ratio", "goodput per instance, 32 instances / 8", "near-linear"),
)

KEY_DEPTHS = {"Conversation": "2: 95%", "Tool&Agent": "2: 45.2%, 6: 14.9%, 13: 37.8%"}
"""Figure 6: hash keys by their length in blocks."""
