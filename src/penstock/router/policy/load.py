"""What a router counts of one worker, and what it last read of the worker's own gauges. Pure."""

from __future__ import annotations

KV_MAX_AGE_S = 10.0
"""Chosen: ten scrapes; an older KV reading says nothing about now, so policies compare tokens instead."""


class WorkerLoad:
    """One worker's load as this router knows it.

    Attributes:
        name: Unique.
        inflight_requests: Requests that this router has under way there, >= 0.
        inflight_tokens: Their tokens: prompts, and what was generated for them so far, >= 0.
        kv_usage_fraction: KV blocks in use when last scraped, 0-1; None: unknown.
        scraped_tokens: ``inflight_tokens`` at that scrape.
        metrics_at_s: When the worker's metrics were last read, simulated seconds; None: never.
        kv_ranks: ``kv_usage_fraction`` of each of its data-parallel ranks; empty: not told apart.
        kv_total_blocks: KV blocks of all ranks together; None: unknown.
        kv_capacity_tokens: Tokens that these hold; None: unknown.
    """

    __slots__ = (
        "inflight_requests",
        "inflight_tokens",
        "kv_capacity_tokens",
        "kv_ranks",
        "kv_total_blocks",
        "kv_usage_fraction",
        "metrics_at_s",
        "name",
        "scraped_tokens",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.inflight_requests = 0
        self.inflight_tokens = 0
        self.kv_usage_fraction: float | None = None
        self.scraped_tokens = 0
        self.metrics_at_s: float | None = None
        self.kv_ranks: tuple[float, ...] = ()
        self.kv_total_blocks: int | None = None
        self.kv_capacity_tokens: int | None = None

    def kv_ranks_now(self, inflight_tokens: int, now_s: float) -> tuple[float | None, ...]:
        """Return the KV usage of each rank, with what came and went since the scrape; None: unknown or too old.

        What was sent there since counts in full, although a cache may hold some of it, and evenly for all ranks.
        Above 1 more is on its way than there is room for. Half full of 100,000 tokens, 10,000 more since: 0.6.

        Args:
            inflight_tokens: Tokens in flight there now, those of other routers included where they are known.
            now_s: Simulated seconds.
        """
        usage, capacity = self.kv_usage_fraction, self.kv_capacity_tokens
        if usage is None or self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S:
            return (None,)
        ranks = self.kv_ranks or (usage,)
        if not capacity:
            projected = self.projected_kv_usage(inflight_tokens, now_s)
            change = 0.0 if projected is None else projected - usage
        else:
            change = (inflight_tokens - self.scraped_tokens) / capacity
        return tuple(max(0.0, each + change) for each in ranks)

    def projected_kv_usage(self, inflight_tokens: int, now_s: float) -> float | None:
        """Return the KV usage scaled by how the in-flight tokens changed since the scrape; None: unknown or too old.

        A scrape is up to a second old; without the projection every request of that second would go to
        the worker that was emptiest at its start. Half full at 1,000 tokens in flight and 1,500 now: 0.75.

        Args:
            inflight_tokens: Tokens in flight there now, those of other routers included where they are known.
            now_s: Simulated seconds.
        """
        usage, scraped = self.kv_usage_fraction, self.scraped_tokens
        if usage is None or self.metrics_at_s is None or now_s - self.metrics_at_s > KV_MAX_AGE_S:
            return None
        if scraped <= 0 and usage == 0:
            # Idle when scraped and busy now: its usage says nothing about the requests sent since.
            return 0.0 if inflight_tokens <= 0 else None
        if scraped <= 0:
            return usage
        return min(1.0, usage * inflight_tokens / scraped)
