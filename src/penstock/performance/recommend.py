"""Which engine size to run per role under TTFT and ITL targets: the best throughput per GPU of those that meet them.

Nothing outside the measured points is recommended. Where no size meets a target, the nearest is chosen, the result
says so and what it would take; a target that is missed by less than what measurements differ by counts as met, and the result
says so. The bounds for the planner's load mode are by the formulas of Dynamo's planner document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.flags import duration_flag, flag
from penstock.performance.sweep import EngineSweep, Sweep, by_context

LEAST = 0.1
"""The document's floor of every bound."""
_QUEUE_UP, _QUEUE_DOWN = 1.2, 0.8
_KV_MARGIN = 0.2
_DIGITS = 2
"""Bounds are printed with two digits, and written to the graph as they are printed."""

TOLERANCE = 0.02
"""Relative. Chosen: what repeated measurements of a quiet engine differ by."""
SAME_CONTEXT = 0.01
"""A context this close (relative) to the requested one counts as it: prompts come out a token or two longer."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What requests look like and what they may take; the help of its fields is the command line's."""

    isl: int = flag("Prompt tokens.", ge=1)
    osl: int = flag("Output tokens.", ge=1)
    ttft_s: float = duration_flag("TTFT to hold.", name="--ttft-slo", gt=0)
    itl_s: float = duration_flag("ITL to hold.", name="--itl-slo", gt=0)

    @property
    def context(self) -> float:
        """Tokens that a request holds on average while it decodes."""
        return self.isl + self.osl / 2


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """One engine size that prefills.

    Attributes:
        ttft_s: TTFT at the target's prompt length, without queueing, ``after_s`` included.
        tokens_per_s_per_gpu: Prompt tokens.
        after_s: What a first token takes after its prefill where another engine decodes: the KV's transfer and that engine's
            step; 0 where that is not known.
    """

    gpus: int
    ttft_s: float
    tokens_per_s_per_gpu: float
    meets: bool
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """One engine size and batch that decodes.

    Attributes:
        itl_s: Their ITL at the target's context.
        tokens_per_s_per_gpu: Output tokens.
        kv_usage: Share of the KV cache that they hold.
    """

    gpus: int
    concurrency: float
    itl_s: float
    tokens_per_s_per_gpu: float
    kv_usage: float
    meets: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """A pool grows above ``upper`` and shrinks below ``lower``, which is less than it and at least 0.1."""

    upper: float
    lower: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to run, and the bounds to plan it by.

    Attributes:
        queue: Of the prefill queue, requests.
        misses: What is not met, the nearest reachable, and what it takes; empty where all is met.
        notes: What is missed by less than the tolerance, and so counts as met.
    """

    targets: Targets
    prefill: PrefillChoice
    decode: DecodeChoice
    queue: Bounds
    kv: Bounds
    misses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the four lines of Dynamo's planner document."""
        prefill, decode = self.prefill, self.decode
        size = "Suggested %s TP:%d (%s %.2f ms, throughput %.2f tokens/s/GPU)"
        bounds = "Suggested planner upper/lower bound for %s: %.2f/%.2f"
        return [
            size % ("prefill", prefill.gpus, "TTFT", prefill.ttft_s * 1000, prefill.tokens_per_s_per_gpu),
            bounds % ("prefill queue size", self.queue.upper, self.queue.lower),
            size % ("decode", decode.gpus, "ITL", decode.itl_s * 1000, decode.tokens_per_s_per_gpu),
            bounds % ("decode kv cache utilization", self.kv.upper, self.kv.lower),
        ]


def recommend(sweep: Sweep, targets: Targets) -> Recommendation:
    """Return the best size per role; one size for both where the graph is aggregated.

    Raises:
        ConfigError: the prompt length or the context is beyond what was measured.
    """
    engines, after_s = sweep.engines, 0.0
    prefills = [prefill_choice(engine, targets) for engine in engines]
    decodes = [max(decode_choices(engine, targets), key=_decode_rank) for engine in engines]
    if sweep.is_aggregated:
        prefill, decode = max(
            zip(prefills, decodes, strict=True), key=lambda pair: _pair_rank(pair[0], pair[1], targets)
        )
    else:
        decode = max(decodes, key=_decode_rank)
        after_s = first_token_after_s(sweep.engine(decode.gpus), targets)
        prefill = max(
            (prefill_choice(engine, targets, after_s=after_s) for engine in engines), key=_prefill_rank
        )
    queue = queue_bounds(targets.ttft_s - after_s, prefill.ttft_s - after_s)
    misses, notes = _misses(targets, prefill, decode)
    return Recommendation(targets, prefill, decode, queue, kv_bounds(decode.kv_usage), misses, notes)


def first_token_after_s(engine: EngineSweep, targets: Targets) -> float:
    """Return what a first token takes after its prefill where an idle engine decodes it: the KV's transfer and its own step.

    0 where the transfer is not known.
    """
    if engine.transfer is None:
        return 0.0
    return engine.transfer.of(targets.isl) + engine.decode_table().itl_of(1, targets.isl)


_Rank = tuple[bool, float]
"""Choices that meet the targets by throughput per GPU, before the others, the fastest of those first."""


def _prefill_rank(choice: PrefillChoice) -> _Rank:
    return choice.meets, choice.tokens_per_s_per_gpu if choice.meets else -choice.ttft_s


def _decode_rank(choice: DecodeChoice) -> _Rank:
    return choice.meets, choice.tokens_per_s_per_gpu if choice.meets else -choice.itl_s


def _pair_rank(prefill: PrefillChoice, decode: DecodeChoice, targets: Targets) -> _Rank:
    """Rank a size that does both: it answers 1 / (ISL / prefill + OSL / decode) requests per second and GPU."""
    if prefill.meets and decode.meets:
        gpu_s = targets.isl / prefill.tokens_per_s_per_gpu + targets.osl / decode.tokens_per_s_per_gpu
        return True, 1 / gpu_s
    return False, -max(prefill.ttft_s / targets.ttft_s, decode.itl_s / targets.itl_s)


def prefill_choice(engine: EngineSweep, targets: Targets, *, after_s: float = 0.0) -> PrefillChoice:
    """Return what an engine does with the target's prompts; ``after_s`` comes on top of its own time.

    Raises:
        ConfigError: the prompt length is beyond what was measured.
    """
    table = engine.prefill_table()
    _check_inside("--isl", targets.isl, (table.prompt_tokens[0], table.prompt_tokens[-1]), "prompt tokens")
    ttft_s = table.ttft_of(targets.isl) + after_s
    rate = table.tokens_per_s(targets.isl) / engine.gpus
    return PrefillChoice(engine.gpus, ttft_s, rate, ttft_s <= targets.ttft_s, after_s)


def decode_choices(engine: EngineSweep, targets: Targets) -> list[DecodeChoice]:
    """Return every measured batch at the target's context, by requests in flight.

    A context that was measured keeps its points. Between two, ITL and throughput are interpolated at KV usages that both
    reach.

    Raises:
        ConfigError: the context is beyond what was measured.
    """
    rows, context = by_context(engine.decode), targets.context
    nearest, points = min(rows, key=lambda row: abs(row[0] - context))
    if abs(nearest - context) <= SAME_CONTEXT * context:
        found = [(each.concurrency, each.itl_s, each.tokens_per_s) for each in points]
    else:
        _check_inside("--isl plus half of --osl", context, (rows[0][0], rows[-1][0]), "tokens of context")
        found = _between(engine, context)
    return [
        DecodeChoice(
            gpus=engine.gpus,
            concurrency=concurrency,
            itl_s=itl_s,
            tokens_per_s_per_gpu=rate / engine.gpus,
            kv_usage=concurrency * context / engine.kv_tokens,
            meets=itl_s <= targets.itl_s,
        )
        for concurrency, itl_s, rate in found
    ]


def _between(engine: EngineSweep, context: float) -> list[tuple[float, float, float]]:
    """Return (requests in flight, ITL, throughput) at the usages of the two neighbouring contexts that both reach."""
    rows = by_context(engine.decode)
    above = next(place for place, (each, _) in enumerate(rows) if each > context)
    most = min(row[-1].concurrency * each for each, row in rows[above - 1 : above + 1])
    table = engine.decode_table()
    held = [usage * engine.kv_tokens for usage in table.kv_usage]
    counts = sorted({max(1.0, float(int(tokens / context))) for tokens in held if tokens <= most})
    return [(count, itl_s := table.itl_of(count, context), count / itl_s) for count in counts]


def _misses(
    targets: Targets, prefill: PrefillChoice, decode: DecodeChoice
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is missed by more than the tolerance, and what by less."""
    misses, notes = [], []
    aims = (
        (
            f"TTFT {targets.ttft_s * 1000:g} ms at {targets.isl:,} prompt tokens",
            f"the nearest is TP{prefill.gpus} with {prefill.ttft_s * 1000:.1f} ms",
            f"it takes --ttft-slo {_rounded_up(prefill.ttft_s)}, or a faster engine",
            prefill.ttft_s / targets.ttft_s,
        ),
        (
            f"ITL {targets.itl_s * 1000:g} ms at {targets.context:,.0f} tokens of context",
            f"the nearest is TP{decode.gpus} with {decode.itl_s * 1000:.1f} ms and {decode.concurrency:,.0f} in flight",
            f"it takes --itl-slo {_rounded_up(decode.itl_s)}, or a faster engine",
            decode.itl_s / targets.itl_s,
        ),
    )
    for aim, nearest, remedy, ratio in aims:
        if ratio > 1 + TOLERANCE:
            misses.append(f"no configuration meets {aim}: {nearest}; {remedy}")
        elif ratio > 1:
            notes.append(f"{aim}: {nearest}, which counts as met: measurements differ by {TOLERANCE:.0%}")
    return tuple(misses), tuple(notes)


def _rounded_up(seconds: float) -> str:
    return f"{math.ceil(seconds * 10_000) / 10:g}ms"


def _check_inside(key: str, value: float, bounds: tuple[float, float], unit: str) -> None:
    low, high = bounds
    if not low * (1 - SAME_CONTEXT) <= value <= high * (1 + SAME_CONTEXT):
        raise ConfigError(
            f"{key}: {value:g} {unit} are outside what was measured, {low:,.0f} to {high:,.0f}; nothing is recommended"
            " beyond it: profile with these lengths"
        )


def queue_bounds(ttft_target_s: float, ttft_s: float) -> Bounds:
    """Return the bounds of the prefill queue, in requests.

    A queue of q prompts makes the next one wait q times its TTFT. Upper: max(0.1, 1.2 · target / TTFT - 1); lower: the
    same with 0.8.

    Example: target 50 ms, TTFT 48.37 ms: 0.24 and 0.10.
    """
    ratio = ttft_target_s / ttft_s
    return _spread(_QUEUE_UP * ratio - 1, _QUEUE_DOWN * ratio - 1, most=math.inf)


def kv_bounds(kv_usage: float) -> Bounds:
    """Return the bounds of decode's KV usage: requests · (ISL + OSL / 2) / tokens of the cache, ± 0.2, within 0.1 to 1."""
    return _spread(kv_usage + _KV_MARGIN, kv_usage - _KV_MARGIN, most=1.0)


def _spread(upper: float, lower: float, *, most: float) -> Bounds:
    """Return bounds from `LEAST` to ``most``, 0.1 apart where they are equal, which a planner refuses."""
    upper, lower = (round(min(most, max(LEAST, each)), _DIGITS) for each in (upper, lower))
    if upper == lower:
        upper = min(most, lower + LEAST)
        lower = upper - LEAST
    return Bounds(round(upper, _DIGITS), round(lower, _DIGITS))
