"""Finds the latency profile that the observed fleet comes closest to, and scales it to the observed TTFT and gaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from penstock.assess.observed import Floats, Observed
from penstock.engine import profiles
from penstock.engine.profiles import Profile

CLOSE: Final = 0.03
"""A factor this close to 1 is 1: the scaling ends, and a profile that needs none is taken as it is."""
ROUNDS: Final = 4
"""Maximum number of simulations that look for the factors. Chosen: each brings them within a tenth of what is left."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """A profile and what its times are multiplied with; ``kv_tokens`` None: the profile's own capacity."""

    base: str
    prefill: float = 1.0
    decode: float = 1.0
    kv_tokens: int | None = None

    @property
    def name(self) -> str:
        """Return how it is shown."""
        if self.is_as_measured:
            return self.base
        return f"{self.base} (prefill x {self.prefill:.2f}, decode x {self.decode:.2f})"

    @property
    def is_as_measured(self) -> bool:
        """Whether no time is scaled."""
        return self.prefill == 1 and self.decode == 1

    def written_to(self, folder: Path) -> str:
        """Write the scaled profile into a folder that exists, and return its path; that of an unscaled one is its name."""
        if self.is_as_measured and self.kv_tokens is None:
            return self.base
        made = scaled(profiles.load(self.base), self)
        path = folder / ENGINE_FILE
        text = yaml.safe_dump(made.model_dump(mode="json", exclude_none=True), sort_keys=False)
        path.write_text(text, encoding="utf-8")
        return str(path)


ENGINE_FILE: Final = "engine.yaml"


def scaled(profile: Profile, fit: EngineFit) -> Profile:
    """Return a profile whose times are multiplied, with the KV capacity of the observed engines where it is known."""
    found: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    found["name"] = f"{profile.name}-assessed"
    prefill, decode = found["prefill"], found["decode"]
    for part in (prefill, prefill.get("beyond", {})):
        for key in ("overhead_ms", "added_overhead_ms", "per_token_ms", "per_token2_ms"):
            if key in part:
                part[key] *= fit.prefill
    if "points" in prefill:
        prefill["points"] = [[tokens, at_ms * fit.prefill] for tokens, at_ms in prefill["points"]]
    for part in (decode, decode.get("beyond", {})):
        if "base_ms" in part:
            part["scale"] = part.get("scale", 1.0) * fit.decode
    for curve in decode.get("curves", []):
        curve["points"] = [[batch, at_ms * fit.decode] for batch, at_ms in curve["points"]]
    note = f"{profile.name} with prefill x {fit.prefill:.4g} and decode x {fit.decode:.4g}, fitted to observed TTFT and ITL"
    for part in (prefill, decode):
        part["source"] = note
        part.pop("mean_error", None)
        part.pop("max_error", None)
    if fit.kv_tokens is not None:
        found["kv"] = {
            "bytes_per_token": profile.kv.bytes_per_token,
            "measured_tokens": fit.kv_tokens,
            "source": "vllm:cache_config_info of the observed engines",
        }
    return Profile.model_validate(found)


def calm_steps(observed: Observed) -> Floats:
    """Return which steps, as 0 or 1, tell the speed of an engine rather than its queue: no request waited.

    Where that is unknown or never so, the half of the steps with the lighter load.
    """
    arrivals = np.nan_to_num(observed.arrivals, nan=0.0)
    is_busy = arrivals > 0
    if observed.waiting is not None:
        none_waits = np.nan_to_num(observed.waiting, nan=1.0) == 0
        before = np.concatenate(([True], none_waits[:-1]))
        is_calm = is_busy & none_waits & before
        if is_calm.sum() >= max(1, int(0.05 * is_busy.sum())):
            return np.asarray(is_calm, dtype=np.float64)
    load = arrivals / observed.mean_replicas()
    bound = float(np.median(load[is_busy])) if is_busy.any() else 0.0
    return np.asarray(is_busy & (load <= bound), dtype=np.float64)


def mean_in(sums: Floats, counts: Floats, weights: Floats) -> float | None:
    """Return the mean of samples in the weighted steps; None without any."""
    is_known = ~np.isnan(sums) & ~np.isnan(counts)
    count = float((counts * weights)[is_known].sum())
    return float((sums * weights)[is_known].sum()) / count if count > 0 else None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Mean TTFT in the calm steps, and mean gap between tokens, seconds; None: unknown."""

    ttft_s: float | None
    gap_s: float | None


def observed_speeds(observed: Observed) -> Speeds:
    """Return what the engines did."""
    calm = calm_steps(observed)
    ttft = None if observed.ttft is None else mean_in(observed.ttft.sums, observed.ttft.samples, calm)
    return Speeds(ttft, None if observed.gaps is None else observed.gaps.mean())


Runs = Callable[[EngineFit], Sequence[Speeds]]
"""Simulates the fleet that ran in several windows, and returns its speeds in each."""


def nearest(candidates: Sequence[EngineFit], seen: Sequence[Speeds], simulated: Runs) -> EngineFit:
    """Return the engine on which a simulation of the fleet that ran is closest to the observed speeds, once it is scaled.

    A factor that is the same in all windows can be scaled away; what differs between light and heavy load cannot, and counts
    most.
    """

    def distance(fit: EngineFit) -> float:
        got = simulated(fit)
        total = 0.0
        for logs in (_logs(seen, got, "ttft_s"), _logs(seen, got, "gap_s")):
            if logs:
                total += float(np.std(logs)) + _SCALED_AWAY * abs(float(np.mean(logs)))
        return total

    return min(candidates, key=distance)


_SCALED_AWAY: Final = 0.5
"""Weight of a factor that is the same in all windows. Chosen: of two profiles that fit alike, the one that is scaled less."""


def _logs(seen: Sequence[Speeds], got: Sequence[Speeds], name: str) -> list[float]:
    """Return the logarithms of observed by simulated figures of each window in which both are known."""
    pairs = [(getattr(one, name), getattr(other, name)) for one, other in zip(seen, got, strict=True)]
    return [math.log(one / other) for one, other in pairs if one and other]


def refined(fit: EngineFit, seen: Sequence[Speeds], simulated: Runs) -> EngineFit:
    """Return the factors with which a simulation of the fleet that ran has the observed speeds on average."""
    for _ in range(ROUNDS):
        got = simulated(fit)
        prefill, decode = (_correction(_logs(seen, got, name)) for name in ("ttft_s", "gap_s"))
        if max(abs(prefill - 1), abs(decode - 1)) <= CLOSE:
            break
        fit = replace(fit, prefill=fit.prefill * prefill, decode=fit.decode * decode)
    return replace(fit, prefill=_settled(fit.prefill), decode=_settled(fit.decode))


def _correction(logs: Sequence[float]) -> float:
    return min(max(math.exp(float(np.mean(logs))), 0.25), 4.0) if logs else 1.0


def _settled(factor: float) -> float:
    return 1.0 if abs(factor - 1) <= CLOSE else round(factor, 4)
