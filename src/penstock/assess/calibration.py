"""Compares a simulation of the fleet that ran with what Prometheus says was served, hour by hour. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.api import SloConfig
from penstock.assess.engine_fit import Speeds, calm_steps, mean_in
from penstock.assess.observed import Floats, Observed
from penstock.core.histogram import quantile, share_within
from penstock.simulator.observer import Recording

MOST_SHARE_OFF: Final = 0.05
"""Difference of the shares in time, as a fraction, above which nothing is recommended. Chosen: fleets that are compared differ by a
few points."""
MOST_TTFT_OFF: Final = 0.5
"""Relative error of the mean TTFT, likewise. Chosen: a queue's length is sensitive to small errors of its load."""
MOST_GAP_OFF: Final = 0.2
"""Relative error of the mean time between tokens, likewise."""

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ServedHour:
    """One hour, as observed and as simulated; None: unknown, or no request. Times in seconds, shares 0-1."""

    at_s: float
    requests: float
    observed_in_time: float | None
    simulated_in_time: float | None
    observed_ttft_p50_s: float | None
    simulated_ttft_p50_s: float | None
    observed_ttft_p90_s: float | None
    simulated_ttft_p90_s: float | None
    observed_gap_s: float | None
    simulated_gap_s: float | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far the model of the fleet that ran is off.

    Attributes:
        whole: All hours together.
        share_off: Simulated less observed share in time; None: not observed.
        ttft_off: Simulated by observed mean TTFT, less 1; None likewise.
        gap_off: Simulated by observed mean time between tokens, less 1; None likewise.
    """

    whole: ServedHour
    hours: tuple[ServedHour, ...]
    share_off: float | None
    ttft_off: float | None
    gap_off: float | None

    @property
    def refusals(self) -> tuple[str, ...]:
        """Return why nothing is recommended, one sentence each; empty: the model is close enough."""
        found = []
        for value, bound, what in (
            (self.share_off, MOST_SHARE_OFF, "share in time"),
            (self.ttft_off, MOST_TTFT_OFF, "mean time to the first token"),
            (self.gap_off, MOST_GAP_OFF, "mean time between tokens"),
        ):
            if value is not None and abs(value) > bound:
                unit = "points" if what.startswith("share") else "%"
                found.append(
                    f"the simulated {what} is off by {100 * value:+z.1f} {unit}; at most {100 * bound:.0f} {unit} are"
                    " accepted"
                )
        return tuple(found)


def simulated_speeds(observed: Observed, recording: Recording) -> Speeds:
    """Return the mean TTFT of a run in the observed calm steps, and its mean gap."""
    requests = recording.requests
    calm = calm_steps(observed)
    places = np.minimum((requests.arrival_s // observed.step_s).astype(np.int64), observed.steps - 1)
    is_known = ~np.isnan(requests.ttft_s)
    counts = np.bincount(places[is_known], minlength=observed.steps).astype(np.float64)
    weights = requests.ttft_s[is_known]
    sums = np.bincount(places[is_known], weights=weights, minlength=observed.steps).astype(np.float64)
    return Speeds(mean_in(sums, counts, calm), _mean_gap(recording, np.ones(len(places), dtype=bool)))


def calibrate(observed: Observed, recording: Recording, slo: SloConfig) -> Calibration:
    """Return the comparison; ``recording`` is of the trace made from ``observed``, whose second 0 is its start."""
    hour = max(1, round(HOUR_S / observed.step_s))
    hours = [
        _hour(observed.cut(first, min(first + hour, observed.steps)), recording, slo, first * observed.step_s)
        for first in range(0, observed.steps, hour)
    ]
    whole = _hour(observed, recording, slo, 0.0)
    ttft_s = None if observed.ttft is None else observed.ttft.mean()
    served = recording.requests.ttft_s[~np.isnan(recording.requests.ttft_s)]
    simulated_ttft_s = float(served.mean()) if served.size else None
    share_off = None
    if whole.observed_in_time is not None and whole.simulated_in_time is not None:
        share_off = whole.simulated_in_time - whole.observed_in_time
    return Calibration(
        whole,
        tuple(each for each in hours if each.requests >= 1),
        share_off,
        _off(simulated_ttft_s, ttft_s),
        _off(whole.simulated_gap_s, whole.observed_gap_s),
    )


def _off(simulated: float | None, observed: float | None) -> float | None:
    if simulated is None or observed is None or observed <= 0:
        return None
    return simulated / observed - 1


def _hour(part: Observed, recording: Recording, slo: SloConfig, from_s: float) -> ServedHour:
    requests = recording.requests
    is_own = (requests.arrival_s >= from_s) & (requests.arrival_s < from_s + part.duration_s)
    ttft = requests.ttft_s[is_own]
    missed = float(np.isnan(ttft).sum())
    seen = None if part.ttft is None else part.ttft.cumulative()
    # The same buckets on both sides, so that both are rounded alike.
    bounds = (math.inf,) if part.ttft is None else part.ttft.bounds
    same = _cumulative(bounds, ttft[~np.isnan(ttft)])
    return ServedHour(
        at_s=part.start_s,
        requests=part.requests,
        observed_in_time=None if seen is None else share_within(seen, slo.ttft_seconds),
        simulated_in_time=None if seen is None else share_within(same, slo.ttft_seconds, missed=missed),
        observed_ttft_p50_s=None if seen is None else quantile(seen, 0.5),
        simulated_ttft_p50_s=None if seen is None else quantile(same, 0.5),
        observed_ttft_p90_s=None if seen is None else quantile(seen, 0.9),
        simulated_ttft_p90_s=None if seen is None else quantile(same, 0.9),
        observed_gap_s=None if part.gaps is None else part.gaps.mean(),
        simulated_gap_s=_mean_gap(recording, is_own),
    )


def _cumulative(bounds: Sequence[float], values: Floats) -> list[tuple[float, float]]:
    places = np.searchsorted(np.array(bounds), values, side="left")
    counts = np.bincount(places, minlength=len(bounds))
    return list(zip(bounds, np.cumsum(counts).astype(float).tolist(), strict=True))


def _mean_gap(recording: Recording, is_own: NDArray[np.bool_]) -> float | None:
    """Return the mean over all gaps, not over requests."""
    requests = recording.requests
    is_known = is_own & ~np.isnan(requests.e2e_s) & (requests.output_tokens > 1)
    gaps = float((requests.output_tokens[is_known] - 1).sum())
    spent = float((requests.e2e_s - requests.ttft_s)[is_known].sum())
    return spent / gaps if gaps else None
