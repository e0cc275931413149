"""What mode ``sla`` remembers in addition to adaptive's memory; plain numbers, so that the ledger can hold it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.planner.decide.decision import Memory

_KEY = "sla"

PRIOR_S = 20.0
"""Chosen: the profile counts as much as so many seconds of computing or answering that agreed with it; observations
outweigh it within a minute."""

POISSON = 2.0
"""Ca2 + Cs2 of Poisson arrivals and exponential lengths: assumed before the first observation."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Seconds by the profile and seconds seen, both decayed alike."""

    expected_s: float = PRIOR_S
    observed_s: float = PRIOR_S


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """Arrivals over the last minutes, without a slope: requests and seconds, decayed alike."""

    requests: float = 0.0
    seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlaMemory:
    """Lengths, variability and corrections.

    Attributes:
        arrived: Requests, decayed over minutes.
        prompt_tokens: Of them, cached ones included, decayed alike.
        variability: Ca2 + Cs2 of arrivals and their tokens together.
    """

    arrived: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    answered: float = 0.0
    output_tokens: float = 0.0
    variability: float = POISSON
    running: float = 0.0
    prefill: Correction = Correction()
    ttft: Correction = Correction()
    itl: Correction = Correction()
    steady: SteadyRate = SteadyRate()

    @property
    def isl(self) -> float | None:
        """Return the mean prompt, tokens; None before the first."""
        return self.prompt_tokens / self.arrived if self.arrived > 0 else None

    @property
    def uncached_isl(self) -> float | None:
        """Return the mean of a prompt that must be computed, tokens; None before the first."""
        return self.uncached_tokens / self.arrived if self.uncached_tokens > 0 else None

    @property
    def osl(self) -> float | None:
        """Return the mean answer, tokens; None before the first."""
        return self.output_tokens / self.answered if self.output_tokens > 0 else None


def resumed(memory: SlaMemory, by_s: float, now_s: float) -> SlaMemory:
    """Return the memory on a clock that shows ``by_s`` more; no time is after ``now_s``."""
    del by_s, now_s  # it remembers durations alone
    return memory


def carried(memory: SlaMemory) -> SlaMemory:
    """Return what another graph of the same model starts from: lengths and corrections, not this traffic."""
    return replace(memory, running=0.0, steady=SteadyRate())


def read(plain: Memory) -> SlaMemory:
    """Return what `write` wrote; of another mode's memory, and of none, a blank one.

    Raises:
        KeyError, TypeError, ValueError: the data is not such a memory.
    """
    data: Any = plain.get(_KEY)
    if data is None:
        return SlaMemory()
    known = {each.name for each in fields(SlaMemory)}
    values = {key: value for key, value in data.items() if key in known}
    corrections = {key: Correction(**values[key]) for key in ("prefill", "ttft", "itl") if key in values}
    if "steady" in values:
        values["steady"] = SteadyRate(**values["steady"])
    return SlaMemory(**{**values, **corrections})


def write(memory: SlaMemory) -> Memory:
    """Return plain data for `PlannerState.memory`."""
    return {_KEY: asdict(memory)}
