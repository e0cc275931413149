"""KV usage of the answers that a number of workers will have to decode, and how it changes with that number. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock_planner.decide.demand.load import SLOWDOWN, idle_speed_usage

LOAD_MOST = 2.0
"""Maximum KV load of one worker: an overloaded one counts as at most two full workers, because the excess cannot be
observed."""


class Decoding(Protocol):
    """Model of the KV usage of the answers that will have to be decoded when a replica requested now could be ready."""

    def load_on(self, workers: int) -> float:
        """Return the KV usage summed over all workers (1.0 for a full one) if the expected answers are spread over ``workers``.

        With 0 workers, returns the sum if workers decoded as fast as idle ones.
        """
        ...


@dataclass(frozen=True, slots=True)
class ObservedDecoding:
    """Model of KV usage in which answers need as much KV per prompt token as those of the last minutes.

    Attributes:
        light: KV usage of the expected answers, summed over the workers (1.0 for a full one), if the workers stayed as
            fast as idle ones.
    """

    light: float

    def load_on(self, workers: int) -> float:
        """Return the KV usage summed over all workers (1.0 for a full one) if the expected answers are spread over ``workers``.

        It is at most 2 (`LOAD_MOST`) for each worker. A worker at usage u takes 1 + s u times (s = 3, `SLOWDOWN`) as
        long per token as an idle one, and holds the KV longer by the same factor: u = h (1 + s u), where h is the usage
        of that worker if it stayed fast (``light / workers``). Hence u = h / (1 - s h). With 0 workers, returns
        ``light``, the sum if workers decoded as fast as idle ones.
        """
        if workers < 1:
            return self.light
        share = self.light / workers
        left = 1.0 - SLOWDOWN * share
        return workers * (LOAD_MOST if share > LOAD_MOST * left else share / left)


@dataclass(frozen=True, slots=True)
class KvView:
    """KV usage in the form that the rules of one decision need.

    Attributes:
        load: KV usage summed over all workers of the role (1.0 for a full one), waiting requests included. It is
            assumed to stay constant: a filling cache rises fast, then levels off.
        decoding: Model of the KV usage of the answers to be decoded when a replica requested now could be ready.
        error: Standard error of ``load``.
    """

    load: float
    decoding: Decoding
    error: float = 0.0

    @property
    def kept_load(self) -> float:
        """Return the KV usage for which the workers of a role must keep room, summed over these workers (1.0 for a full one).

        It is the observed usage plus its standard error.
        """
        return self.load + self.error

    def moved(self, ready: int, workers: int) -> float:
        """Return the KV usage, summed over workers (1.0 for a full one), if the present answers ran on another number of workers.

        The present usage includes its standard error. With fewer workers each worker decodes more slowly and holds its
        requests for longer, so the sum increases.

        Args:
            ready: Number of workers on which the answers run now; 0 returns the present usage.
            workers: Number of workers on which they would run.
        """
        load = self.kept_load
        return ObservedDecoding(ready * idle_speed_usage(load / ready)).load_on(workers) if ready else load
