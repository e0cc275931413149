"""How much of the TTFT is a prompt's own computing, which no fleet of these workers can shorten. Pure.

A prompt is computed by one worker. Its service time is what that takes on an idle one, with the prefix that was cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.core.latency import PrefillModel
from penstock.report.series import Floats
from penstock.workload.record import RequestResult, RequestStatus
from penstock.workload.statistics import percentiles

_TAIL = 99.0


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """The served requests of a run; seconds are simulated.

    Attributes:
        slo_s: TTFT that counts as in time.
        requests: Served, with a first token, >= 1.
        too_long: Of them, prompts whose service time alone is above the SLO: late on any fleet.
        service_p99_s: 99th percentile of the service times: no fleet brings the TTFT's below it.
        ttft_p99_s: Of all.
        tail: Requests whose TTFT is at or above that, >= 1.
        tail_too_long: Of them, prompts whose service time alone is above the SLO.
        tail_service_s: Mean service time of the tail.
        tail_wait_s: Mean of the rest of the tail's TTFT: queues, KV transfer, first decode.
        fitting_p99_s: TTFT p99 of the requests whose service time fits the SLO; None when none does.
        fitting_in_time: Share of those in time; None when there are none.
    """

    slo_s: float
    requests: int
    too_long: int
    service_p99_s: float
    ttft_p99_s: float
    tail: int
    tail_too_long: int
    tail_service_s: float
    tail_wait_s: float
    fitting_p99_s: float | None
    fitting_in_time: float | None


def service_times(
    results: Sequence[RequestResult], prefill: PrefillModel, *, slo_s: float
) -> ServiceTimes | None:
    """Split the TTFT of the served requests into service and waiting; None when none was served.

    Args:
        results: Of a run; where a server did not say what was cached, nothing was.
        prefill: Of the workers that compute prompts.
        slo_s: TTFT that counts as in time, > 0.
    """
    served = [each for each in results if each.status is RequestStatus.OK and each.ttft_s is not None]
    if not served:
        return None
    ttft = np.array([each.ttft_s for each in served], dtype=np.float64)
    service = np.array([_service_s(each, prefill) for each in served], dtype=np.float64)
    p99 = _p99(ttft)
    is_tail, is_long = ttft >= p99, service > slo_s
    fitting = ttft[~is_long]
    return ServiceTimes(
        slo_s=slo_s,
        requests=len(served),
        too_long=int(is_long.sum()),
        service_p99_s=_p99(service),
        ttft_p99_s=p99,
        tail=int(is_tail.sum()),
        tail_too_long=int((is_tail & is_long).sum()),
        tail_service_s=float(service[is_tail].mean()),
        tail_wait_s=float(np.maximum(0.0, ttft - service)[is_tail].mean()),
        fitting_p99_s=_p99(fitting) if fitting.size else None,
        fitting_in_time=float((fitting < slo_s).mean()) if fitting.size else None,
    )


def service_lines(found: ServiceTimes) -> list[str]:
    """Return what the split says, in words."""
    tail = (
        f"TTFT p99 {found.ttft_p99_s:.1f} s: on average, {found.tail_service_s:.1f} s of the slowest {found.tail}"
        f" are their own prefill and {found.tail_wait_s:.1f} s waiting and KV transfer; {found.tail_too_long} of them,"
        f" and {found.too_long} of all {found.requests}, need more than the SLO of {found.slo_s:g} s on an idle worker."
        f" No number of these workers brings the p99 below {found.service_p99_s:.1f} s"
    )
    lines = [tail]
    if found.too_long and found.fitting_p99_s is not None and found.fitting_in_time is not None:
        lines.append(
            f"requests whose own prefill fits the SLO ({found.requests - found.too_long}): TTFT p99"
            f" {found.fitting_p99_s:.1f} s, {found.fitting_in_time:.1%} in time"
        )
    return lines


def _service_s(result: RequestResult, prefill: PrefillModel) -> float:
    tokens = result.prompt_tokens or result.trace_input_tokens
    cached = min(result.cached_tokens or 0, tokens)
    return prefill.ttft_s(tokens) - prefill.ttft_s(cached) + prefill.ttft_s(0)


def _p99(values: Floats) -> float:
    return percentiles(values, _TAIL)[0]
