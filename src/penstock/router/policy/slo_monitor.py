"""Measures whether the tiers meet their SLOs, and decides which fraction of the lower tiers to shed so that the higher ones do. Pure.

Each second `SloMonitor.evaluate` compares TTFT and TPOT over a sliding window, at the percentile of the tier's attainment,
with its targets for TTFT and ITL. While premium or standard misses a target, shedding takes the next step in the list `STEPS`
(standard is shed for premium alone). While both meet their targets by a margin, the last step is reversed, more slowly. Each
step is evaluated with the values that were measured since it was taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Self

from penstock.api import SloConfig, Tier, TiersConfig
from penstock.core.histogram import percentile
from penstock.router.policy.tiers import PRIORITIES, Slo, slo_of

EVALUATE_S: Final = 1.0
"""Interval of evaluations in simulated seconds. Chosen: a fifth of the shortest time between two steps by default."""


_Waits = Mapping[Tier, Iterable[float]]

STEPS: Final = (
    (Tier.BACKGROUND, 0.5),
    (Tier.BACKGROUND, 1.0),
    (Tier.STANDARD, 0.5),
    (Tier.STANDARD, 1.0),
)
"""Steps of shedding: a tier, and the fraction of its arrivals that is shed; each step adds to those before it. Chosen: halves, so
that a small overload does not cost an entire tier; premium and system are never shed."""

_PROTECTED: Final = {Tier.PREMIUM: len(STEPS), Tier.STANDARD: 2}
"""Number of steps that a tier's missed target can cause: standard is not shed to protect standard."""


class EndedRequest(NamedTuple):
    """Latencies of a request that has ended; None if the request has no such value.

    Attributes:
        ttft_s: Time from arrival to first token, in simulated seconds.
        tpot_s: Mean time per output token after the first one, in simulated seconds.
        e2e_s: Time from arrival to last token, in simulated seconds.
        is_failed: Whether it was admitted and got no complete response, so that it has missed every target.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    is_failed: bool = False

    @classmethod
    def after(cls, ttft_s: float | None, e2e_s: float, output_tokens: int, *, is_failed: bool) -> Self:
        """Return the latencies of a request that ended ``e2e_s`` after its arrival with ``output_tokens`` tokens.

        Args:
            ttft_s: Time from arrival to first token, in simulated seconds; None if there was no token.
            e2e_s: Time from arrival to the end, in simulated seconds.
            output_tokens: Number of output tokens.
            is_failed: Whether the request was admitted and got no complete response.
        """
        has_gaps = ttft_s is not None and output_tokens > 1
        tpot_s = (e2e_s - (ttft_s or 0.0)) / (output_tokens - 1) if has_gaps else None
        return cls(ttft_s, tpot_s, e2e_s, is_failed=is_failed)

    def meets(self, slo: Slo) -> bool:
        """Return whether the request has met the latency targets ``slo``; False if it failed.

        A target or latency that is None counts as met.
        """
        pairs = (
            (self.ttft_s, slo.ttft_seconds),
            (self.tpot_s, slo.itl_seconds),
            (self.e2e_s, slo.end_to_end_seconds),
        )
        return not self.is_failed and all(
            bound is None or value is None or value <= bound for value, bound in pairs
        )


_ATTAINMENT: Final = SloConfig().attainment
"""Attainment of a tier whose section has not been completed by `TiersConfig.under`."""

MAX_VALUES = 8192
"""Maximum number of values in a window; above it, the newest are kept. Chosen: 270 requests/s of one tier in 30 s."""


class SlidingWindow:
    """Values with the times at which they were measured; values older than ``length_s`` simulated seconds are deleted.

    At most 8,192 values (`MAX_VALUES`) are kept, the newest ones.
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float, now_s: float) -> None:
        """Add ``value``, measured at ``now_s`` (simulated seconds); ``now_s`` must not decrease from call to call."""
        self._values.append((now_s, value))

    def values(self, now_s: float, *, since_s: float = float("-inf")) -> list[float]:
        """Return the values measured within the window's length before ``now_s`` and after ``since_s``, the oldest first."""
        values = self._values
        while values and values[0][0] <= now_s - self.length_s:
            values.popleft()
        return [value for at_s, value in values if at_s > since_s]


class SloMonitor:
    """Recent latencies of every tier, and the present step of shedding (rejecting requests of lower tiers).

    Latencies are compared over a sliding window of ``windowSeconds``. All times are in simulated seconds.

    Attributes:
        tiers: Targets and shares of the tiers.
        settings: Settings of shedding.
        step: Number of steps of shedding in effect, 0 to 4: half of background, all of it, half of standard, all of it.
    """

    def __init__(self, tiers: TiersConfig) -> None:
        self.tiers = tiers
        self.settings = tiers.shedding
        self._ttft, self._tpot, self._attained = (
            {tier: SlidingWindow(tiers.shedding.window_seconds) for tier in PRIORITIES} for _ in range(3)
        )
        self.step = 0
        self._changed_s = float("-inf")
        self._shed_debt = dict.fromkeys(PRIORITIES, 0.0)

    def configure(self, tiers: TiersConfig) -> None:
        """Replace the tiers' targets and the settings of shedding; measured latencies and the present step of shedding stay."""
        self.tiers = tiers
        self.settings = tiers.shedding
        for windows in (self._ttft, self._tpot, self._attained):
            for window in windows.values():
                window.length_s = tiers.shedding.window_seconds

    # ------------------------------------------------------------------ what is measured

    def first_token(self, tier: Tier, ttft_s: float, now_s: float) -> None:
        """Record the TTFT (``ttft_s``) of a request of a tier, whose first token arrived at ``now_s``; both in simulated seconds."""
        self._ttft[tier].add(ttft_s, now_s)

    def ended(self, tier: Tier, request: EndedRequest, now_s: float) -> None:
        """Record the end of an admitted request at ``now_s`` (simulated seconds), with its latencies."""
        if request.tpot_s is not None:
            self._tpot[tier].add(request.tpot_s, now_s)
        self._attained[tier].add(float(request.meets(slo_of(self.tiers, tier))), now_s)

    def compliance(self, tier: Tier, now_s: float) -> float | None:
        """Return the fraction of a tier's requests that met all latency targets, 0-1.

        The requests that ended within the last ``windowSeconds`` (simulated) are counted. Returns None if no request of
        the tier has ended in that time.
        """
        met = self._attained[tier].values(now_s)
        return sum(met) / len(met) if met else None

    # ------------------------------------------------------------------ shedding

    def shed_fraction(self, tier: Tier) -> float:
        """Return the fraction of a tier's new requests that is shed now (rejected to protect higher tiers), 0-1."""
        taken = STEPS[: self.step] if self.settings.enabled else ()
        return max((fraction for each, fraction in taken if each is tier), default=0.0)

    def sheds(self, tier: Tier) -> bool:
        """Count a new request of ``tier``, and return whether the caller has to shed it (reject it to protect higher tiers).

        The shed requests are evenly distributed: every second one if the fraction is a half.
        """
        debt = self._shed_debt[tier] + self.shed_fraction(tier)
        is_shed = debt >= 1.0
        self._shed_debt[tier] = debt - is_shed
        return is_shed

    def evaluate(self, now_s: float, waits: _Waits | None = None) -> None:
        """Shed more requests of lower tiers if a higher tier misses its targets, or fewer if it meets them again.

        Requests are shed (rejected) in the steps `STEPS`. A step is taken at least ``stepSeconds`` after the last change,
        and taken back at least ``recoverSeconds`` after the last change.

        ``waits`` contains, by tier, how long the requests that wait now have waited, in simulated seconds. A wait above the
        TTFT target counts as a target missed already; while no worker makes progress, these waits are the only
        measurements. None counts no waiting requests.
        """
        settings, waits = self.settings, waits or {}
        since_s = self._changed_s
        most = max(
            (steps for tier, steps in _PROTECTED.items() if self._has_missed(tier, now_s, since_s, waits)),
            default=0,
        )
        if self.step < most:
            if now_s - since_s >= settings.step_seconds:
                self._move(1, now_s)
            return
        if self.step and now_s - since_s >= settings.recover_seconds:
            since_s = now_s - settings.recover_seconds
            # A step that protects premium alone is reversed as soon as premium meets its targets by a margin, regardless of
            # standard.
            guarded = (tier for tier, steps in _PROTECTED.items() if steps >= self.step)
            if all(self._is_well(tier, now_s, since_s, waits) for tier in guarded):
                self._move(-1, now_s)

    def _move(self, by: int, now_s: float) -> None:
        self.step += by
        self._changed_s = now_s

    def _has_missed(self, tier: Tier, now_s: float, since_s: float, waits: _Waits) -> bool:
        return any(
            len(values) >= self.settings.min_samples and self._percentile(tier, values) > target_s
            for values, target_s in self._measured(tier, now_s, since_s, waits)
        )

    def _is_well(self, tier: Tier, now_s: float, since_s: float, waits: _Waits) -> bool:
        """Return whether a tier meets its targets by the configured margin; True for a tier without values."""
        return all(
            self._percentile(tier, values) <= target_s * self.settings.recover_fraction
            for values, target_s in self._measured(tier, now_s, since_s, waits)
        )

    def _percentile(self, tier: Tier, values: list[float]) -> float:
        attainment = slo_of(self.tiers, tier).attainment
        return percentile(values, 100 * (_ATTAINMENT if attainment is None else attainment)) or 0.0

    def _measured(
        self, tier: Tier, now_s: float, since_s: float, waits: _Waits
    ) -> Iterator[tuple[list[float], float]]:
        """Yield, for each target of a tier, the values measured since a time, and the target."""
        slo = slo_of(self.tiers, tier)
        if slo.ttft_seconds is not None:
            overdue = [wait_s for wait_s in waits.get(tier, ()) if wait_s > slo.ttft_seconds]
            yield self._ttft[tier].values(now_s, since_s=since_s) + overdue, slo.ttft_seconds
        if slo.itl_seconds is not None:
            yield self._tpot[tier].values(now_s, since_s=since_s), slo.itl_seconds
