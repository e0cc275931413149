"""Estimates the number of tokens of a prompt, learned from the usage that workers return, separately for each kind of part. Pure.

The number of tokens is approximately a sum: bytes of text times tokens per byte, plus the tokens of tools, tool calls and
images. Workers return only the sum. A Kalman filter with a diagonal covariance distributes the error of an estimate over the
parts of the prompt, in proportion to the uncertainty of each: after a hundred texts, the error of a text with an image is
attributed to the image. So images do not distort the estimate of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.lru_cache import LruCache
from penstock.router.proxy.prompt_parts import (
    AUDIO,
    CALLS,
    FILE,
    IMAGE,
    MESSAGE,
    TEXT,
    TOOLS,
    UNKNOWN,
    VIDEO,
    WIDE,
    PromptPart,
)

START_BYTES_PER_TOKEN: Final = 4.0
"""Initial bytes per token: English text with common tokenizers; exact for the simulated one."""
_NOISE: Final = 0.1
"""Chosen: texts of one kind differ by about a tenth in bytes per token."""
_TEMPLATE_TOKENS: Final = 20.0
"""Chosen: tokens that a chat template may add to a request, so that short prompts change the estimates little."""
_DRIFT: Final = 0.023
"""Minimum standard deviation of a rate, as a fraction of it, however much was learned: about the last 20 prompts count. Chosen
together with `_NOISE`."""
_BLOCK_DOUBT: Final = 0.5
"""Standard deviation of a new block's cost, as a fraction of it. Chosen: schemas and prose differ by up to a factor of two."""
_SPREAD: Final = 0.05
"""Fraction of a block's deviation that its kind adopts, so that a new block is estimated like the others."""
_BLOCKS: Final = 1024
"""Chosen: maximum number of remembered blocks; the agents of one graph have tens of tool sets and system prompts."""

_PIXELS_PER_TOKEN: Final = 784
"""Pixels per image token: 28 x 28, as for Qwen2-VL (arXiv 2409.12191); other models' are learned."""
_IMAGE_TOKENS: Final = 576
"""Tokens of an image of unknown size: those of LLaVA-1.5 (arXiv 2310.03744)."""
_MAX_IMAGE_TOKENS: Final = 16_384
"""Maximum number of tokens of one image in Qwen2-VL."""


@dataclass(slots=True)
class _Rate:
    """Tokens per unit: ``value``, its ``variance``, and the limits of the value."""

    value: float
    variance: float
    lowest: float
    highest: float

    def moved(self, by: float) -> None:
        self.value = min(max(self.value + by, self.lowest), self.highest)


def _start(kind: str) -> _Rate:
    """Return the initial rate of a kind, before any worker has counted it."""
    family, _, form = kind.partition("/")
    if family == IMAGE:
        # A class contains the images whose pixels are between half its power of two and that power.
        pixels = 0.75 * 2.0 ** int(form) if form != UNKNOWN else _IMAGE_TOKENS * _PIXELS_PER_TOKEN
        tokens = min(max(pixels / _PIXELS_PER_TOKEN, 64.0), 4096.0)
        return _Rate(tokens, tokens**2, 0.0, _MAX_IMAGE_TOKENS)
    if family == VIDEO:
        return _Rate(2048.0, 2048.0**2, 0.0, 1e6)
    if family == AUDIO:
        # 25 tokens/s as Qwen2-Audio (arXiv 2407.10759); 32 kB/s of 16-bit samples at 16 kHz or 16 kB/s of MP3, in base64.
        tokens = 25 / (32_000 * 4 / 3) if form == "wav" else 25 / (16_000 * 4 / 3)
        return _Rate(tokens, tokens**2, 0.0, 1.0)
    if family == MESSAGE:
        return _Rate(0.0, _TEMPLATE_TOKENS**2 / 4, 0.0, 200.0)
    tokens = 1 / START_BYTES_PER_TOKEN
    doubt = {TEXT: 0.3, WIDE: 0.5, TOOLS: 0.5, CALLS: 0.5, FILE: 1.0}[family]
    return _Rate(tokens, (doubt * tokens) ** 2, 0.0 if family in {CALLS, FILE} else 1 / 32, 2.0)


_OF_TEXT: Final = frozenset({TEXT, WIDE})


class PromptCosts:
    """Estimates the number of tokens of one model's prompts from the sizes of their parts, before a worker has counted them.

    The estimate is the sum of the parts' sizes, each times a cost: tokens per byte of text, per image, per byte of tool
    definitions and so on. The costs are learned from the numbers of tokens that workers count.
    """

    __slots__ = ("_blocks", "_rates", "_text")

    def __init__(self) -> None:
        self._text = _start(TEXT)
        self._rates = {TEXT: self._text}
        self._blocks: LruCache[int, _Rate] = LruCache(_BLOCKS)

    @property
    def bytes_per_token(self) -> float:
        """Estimated mean number of bytes per token of plain text; 4 before the first prompt."""
        return 1 / self._text.value

    def estimate(self, text_bytes: int, parts: Sequence[PromptPart] = ()) -> int:
        """Return the estimated number of tokens of a prompt, >= 1.

        Args:
            text_bytes: Number of bytes of all its text.
            parts: Parts other than plain text (images, tool definitions and so on), and long texts that often recur.
        """
        if not parts:
            return max(1, math.ceil(text_bytes * self._text.value))
        return max(1, math.ceil(sum(units * rate.value for units, rate, _ in self._terms(text_bytes, parts))))

    def learn(self, text_bytes: int, parts: Sequence[PromptPart], prompt_tokens: int) -> None:
        """Adjust the estimated costs to the number of tokens that a worker has counted for one prompt.

        Does nothing if the parts cannot have this number of tokens, which is a fault of the worker.

        Args:
            text_bytes: Number of bytes of all its text.
            parts: Parts other than plain text (images, tool definitions and so on), and long texts that often recur.
            prompt_tokens: Number of tokens that the worker has counted.
        """
        terms = self._terms(text_bytes, parts)
        lowest = sum(units * rate.lowest for units, rate, _ in terms)
        if not lowest <= prompt_tokens <= sum(units * rate.highest for units, rate, _ in terms):
            return
        estimate = sum(units * rate.value for units, rate, _ in terms)
        noise = (_NOISE * estimate) ** 2 + _TEMPLATE_TOKENS**2
        doubts = [units**2 * rate.variance for units, rate, _ in terms]
        whole = noise + sum(doubts)
        error = prompt_tokens - estimate
        for (units, rate, part), doubt in zip(terms, doubts, strict=True):
            gain = doubt / whole
            rate.moved(gain * error / units)
            rate.variance = max((1 - gain) * rate.variance, (_DRIFT * rate.value) ** 2)
            if part is not None and part.block is not None:
                self._blocks.put(part.block, rate)
                kind = self._rate(part.kind)
                kind.moved(_SPREAD * (rate.value - kind.value))

    def _terms(
        self, text_bytes: int, parts: Sequence[PromptPart]
    ) -> list[tuple[int, _Rate, PromptPart | None]]:
        """Return units (> 0), their rate, and the part of each term; the part is None for the rest of the text."""
        terms: list[tuple[int, _Rate, PromptPart | None]] = []
        for part in parts:
            if part.units <= 0:
                continue
            if part.kind in _OF_TEXT:
                text_bytes -= part.units
            rate = self._rate(part.kind) if part.block is None else self._block(part)
            terms.append((part.units, rate, part))
        if text_bytes > 0:
            terms.append((text_bytes, self._text, None))
        return terms

    def _rate(self, kind: str) -> _Rate:
        found = self._rates.get(kind)
        if found is None:
            found = self._rates[kind] = _start(kind)
        return found

    def _block(self, part: PromptPart) -> _Rate:
        known = self._blocks.get(part.block) if part.block is not None else None
        if known is not None:
            return known
        kind = self._rate(part.kind)
        return _Rate(kind.value, (_BLOCK_DOUBT * kind.value) ** 2, kind.lowest, kind.highest)
