"""How many tokens a prompt has, before a worker has counted them."""

from __future__ import annotations

import math

START_BYTES_PER_TOKEN = 4.0
"""English text under the usual tokenizers; exact for the simulated one."""
_LOWEST, _HIGHEST = 0.5, 32.0
"""Chosen: a reading outside is a fault of the worker's count, not a tokenizer."""
_WEIGHT = 0.05
"""Chosen: the mean of about the last 20 prompts, weighted by nothing else."""


class TokenEstimator:
    """Bytes per token of one model, learnt from the usage that workers return."""

    __slots__ = ("bytes_per_token",)

    def __init__(self) -> None:
        self.bytes_per_token = START_BYTES_PER_TOKEN

    def estimate(self, prompt_bytes: int) -> int:
        """Return the estimated tokens of a prompt, >= 1."""
        return max(1, math.ceil(prompt_bytes / self.bytes_per_token))

    def learn(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Move the ratio towards what one prompt showed; empty or absurd readings are ignored."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_bytes / prompt_tokens
        if _LOWEST <= ratio <= _HIGHEST:
            self.bytes_per_token += _WEIGHT * (ratio - self.bytes_per_token)
