"""Summarises a load run: counts, percentiles by nearest rank, rates, and whether the client kept up. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.api import Role, Tier
from penstock.workload.probe import ServerLag
from penstock.workload.record import RequestResult, RequestStatus

PERCENTILE_METHOD: Final = "nearest rank over the ok requests"

LAG_FLOOR_S: Final = 0.05
"""Chosen: a lateness of 50 ms moves no planner reading (pulled each second) and no queue worth scaling."""

LAG_SHARE_OF_TTFT: Final = 0.05
"""Chosen: the accuracy required of the engine's own TTFT; a client less exact than it would hide it."""

ITL_LAG_FLOOR_S: Final = 0.002
"""Chosen: what the simulated engine's own inter-token accuracy allows alongside its share."""

LAG_SHARE_OF_ITL_P99: Final = 0.2
"""Chosen: one gap in a hundred may be wrong by the p99 lag, so that is what the p99 gap is held against."""

TIMER_TICK_S: Final = 0.001
"""Real seconds: uvloop's timers fire on full milliseconds, in the servers and in this client."""

_EXAMPLES = 5

Floats = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScheduleLag:
    """How well each process kept to its own schedule.

    Attributes:
        loop_lag_p99_s: Lateness of a timer in the client's event loop, simulated seconds: what every
            measured time may be too long by.
        cpu_share: CPU seconds of the client per real second, 1 is one core.
    """

    send_lag_p99_s: float | None
    loop_lag_p99_s: float | None
    cpu_share: float | None
    servers: tuple[ServerLag, ...] = ()


def percentiles(values: Floats | Sequence[float], *percents: float) -> tuple[float, ...]:
    """Return percentiles by nearest rank, each a value that occurred; there must be one at least."""
    found = np.percentile(np.asarray(values, dtype=np.float64), percents, method="inverted_cdf")
    return tuple(map(float, found))


def describe(values: Floats | Sequence[float]) -> dict[str, float | int | None]:
    """Return count, mean, p50, p90, p99 and max; all but the count are None without values."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    p50, p90, p99 = percentiles(array, 50, 90, 99)
    figures = {"mean": array.mean(), "p50": p50, "p90": p90, "p99": p99, "max": array.max()}
    return {"count": int(array.size), **{name: round(float(value), 6) for name, value in figures.items()}}


def pooled_gaps(results: Iterable[RequestResult]) -> NDArray[np.float32]:
    """Return the inter-token gaps of all ok requests, in seconds, in no order that means anything."""
    parts = [
        np.frombuffer(r.itl_s, dtype=np.float32) for r in results if r.status is RequestStatus.OK and r.itl_s
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)


def summarise(
    results: Sequence[RequestResult], *, duration_s: float, speed: float, schedule_lag: ScheduleLag
) -> dict[str, Any]:
    """Return everything that the results alone can say; the caller adds settings and origin."""
    ok = [result for result in results if result.status is RequestStatus.OK]
    times, itl = _times(ok), describe(pooled_gaps(ok))
    latency = {"percentile_method": PERCENTILE_METHOD, "ttft_s": times["ttft_s"], "itl_s": itl, **times}
    tokens = _tokens(ok)
    lag = assess_lag(schedule_lag, ttft_p50_s=times["ttft_s"]["p50"], itl_p99_s=itl["p99"])
    return {
        "requests": _ends(results),
        "errors": dict(Counter(result.error_class for result in results if result.error_class).most_common()),
        "latency": latency,
        "tokens": tokens,
        "throughput": _throughput(len(ok), tokens, duration_s),
        "tiers": summarise_tiers(results),
        "usage_mismatches": _mismatches(ok),
        "lag": {**lag, **_resolution(speed, tpot_p50_s=times["tpot_s"]["p50"])},
    }


def summarise_tiers(results: Sequence[RequestResult]) -> dict[str, dict[str, Any]]:
    """Return requests and latencies by tier, highest first; empty where requests asked for none."""
    by_tier = {tier: [result for result in results if result.tier is tier] for tier in Tier}
    return {
        tier.value: {
            "requests": _ends(own),
            **_times([result for result in own if result.status is RequestStatus.OK]),
        }
        for tier, own in by_tier.items()
        if own
    }


def _ends(results: Sequence[RequestResult]) -> dict[str, int]:
    return {status.value: sum(result.status is status for result in results) for status in RequestStatus}


def _times(ok: Sequence[RequestResult]) -> dict[str, dict[str, float | int | None]]:
    found = {key: [getattr(each, key) for each in ok] for key in ("ttft_s", "tpot_s", "e2e_s")}
    return {key: describe([value for value in values if value is not None]) for key, values in found.items()}


def assess_lag(
    schedule_lag: ScheduleLag, *, ttft_p50_s: float | None, itl_p99_s: float | None
) -> dict[str, Any]:
    """Return every process's lag against two bounds, and the ones past them.

    Past the larger of 50 ms and 5% of the median TTFT the run is marked distorted: arrivals came later
    than the trace says, tokens were seen later than they came, or a server worked slower than it models.
    Single gaps are marked far earlier: past the larger of 2 ms and a fifth of the p99 gap.
    """
    bound_s = max(LAG_FLOOR_S, LAG_SHARE_OF_TTFT * (ttft_p50_s or 0.0))
    itl_bound_s = max(ITL_LAG_FLOOR_S, LAG_SHARE_OF_ITL_P99 * (itl_p99_s or 0.0))
    measured = {
        "client sending": schedule_lag.send_lag_p99_s,
        "client event loop": schedule_lag.loop_lag_p99_s,
        **{server.name: server.p99_s for server in schedule_lag.servers},
    }
    lags = {name: lag_s for name, lag_s in measured.items() if lag_s is not None}
    late = [name for name, lag_s in lags.items() if lag_s > bound_s]
    # A late arrival moves no gap, nor does a worker whose requests continue elsewhere after the first token.
    not_in_gaps = {"client sending"} | {
        server.name for server in schedule_lag.servers if server.role == Role.PREFILL
    }
    late_for_itl = [name for name, lag_s in lags.items() if lag_s > itl_bound_s and name not in not_in_gaps]
    return {
        "send_p99_s": _rounded(schedule_lag.send_lag_p99_s),
        "loop_p99_s": _rounded(schedule_lag.loop_lag_p99_s),
        "servers": [
            {"name": server.name, "role": server.role, "p99_s": _rounded(server.p99_s)}
            for server in schedule_lag.servers
        ],
        "bound_s": round(bound_s, 6),
        "bound_rule": "max(50 ms, 5% of TTFT p50), simulated",
        "late": late,
        "is_distorted": bool(late),
        "itl_bound_s": round(itl_bound_s, 6),
        "itl_bound_rule": "max(2 ms, 20% of ITL p99), simulated",
        "late_for_itl": late_for_itl,
        "is_itl_distorted": itl_p99_s is not None and bool(late_for_itl),
        "client_cpu_share": _rounded(schedule_lag.cpu_share),
    }


def _resolution(speed: float, *, tpot_p50_s: float | None) -> dict[str, Any]:
    """Return the shortest gap that timers can show, and whether typical gaps are too close to it.

    Below two ticks tokens leave in bunches, so single gaps are multiples of a tick; TPOT averages over them.
    """
    tick_s = TIMER_TICK_S * speed
    return {
        "resolution_s": round(tick_s, 6),
        "is_itl_unresolved": tpot_p50_s is not None and tpot_p50_s < 2 * tick_s,
    }


def _tokens(ok: Sequence[RequestResult]) -> dict[str, Any]:
    prompt = sum(r.prompt_tokens or 0 for r in ok)
    reported = [r for r in ok if r.cached_tokens is not None and r.prompt_tokens]
    cached = sum(r.cached_tokens or 0 for r in reported)
    prompt_tokens = sum(r.prompt_tokens or 0 for r in reported)
    return {
        "prompt": prompt,
        "output": sum(r.output_tokens or 0 for r in ok),
        "cached": cached if reported else None,
        "prefix_cache_hit_rate": round(cached / prompt_tokens, 6) if prompt_tokens else None,
    }


def _throughput(ok: int, tokens: dict[str, Any], duration_s: float) -> dict[str, Any]:
    def per_second(amount: float) -> float | None:
        return round(amount / duration_s, 6) if duration_s > 0 else None

    return {
        "duration_s": round(duration_s, 6),
        "requests_per_s": per_second(ok),
        "prompt_tokens_per_s": per_second(tokens["prompt"]),
        "output_tokens_per_s": per_second(tokens["output"]),
    }


def _mismatches(ok: Sequence[RequestResult]) -> dict[str, Any]:
    reported = [r for r in ok if r.prompt_tokens is not None and r.output_tokens is not None]
    prompt = [r for r in reported if r.is_prompt_exact and r.prompt_tokens != r.trace_input_tokens]
    output = [r for r in reported if r.output_tokens != r.trace_output_tokens]
    examples = list({r.id: r for r in (*prompt, *output)}.values())[:_EXAMPLES]
    return {
        "checked_prompt": sum(r.is_prompt_exact for r in reported),
        "checked_output": len(reported),
        "without_usage": len(ok) - len(reported),
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "examples": [
            f"{r.id}: prompt {r.prompt_tokens} of {r.trace_input_tokens},"
            f" output {r.output_tokens} of {r.trace_output_tokens}"
            for r in examples
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
