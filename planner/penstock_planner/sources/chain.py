"""Asks sources in order, each only for what those before it could not tell.

A reading that came from a backup says so in its ``source``; a queue from a backup that sees only the workers'
own queues is a lower bound. When nobody answers, the last fresh value is
kept with its growing age until it is too old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock_core.errors import ObservationError
from penstock_core.logs import get_logger
from penstock_planner.decide.reading import Quality, Reading, judge, missing
from penstock_planner.sources.base import Buckets, Query, Readings, Source, in_short

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Real seconds without asking a source that failed as a whole, doubling. Chosen: a hanging source costs its
time-out once per pause instead of once per pull, and one that is back is noticed within half a minute."""

_QUEUE = ""
"""Key of the queue beside the workers' names in the memory of last values."""

log = get_logger(__name__)


@dataclass(slots=True)
class _Health:
    failures: int = 0
    retry_at_s: float = 0.0
    why: str = ""


class SourceChain:
    """Sources by preference."""

    name = "chain"

    def __init__(
        self, sources: Sequence[Source], *, now_s: Callable[[], float], real_now_s: Callable[[], float]
    ) -> None:
        """Build the chain.

        Args:
            sources: First the preferred one; at least one.
            now_s: Modelled seconds, for the age of kept values.
            real_now_s: Real seconds, for pauses.
        """
        self._sources = tuple(sources)
        self._now_s = now_s
        self._real_now_s = real_now_s
        self._health = {source.name: _Health() for source in sources}
        self._last: dict[str, tuple[float, Reading]] = {}
        self._serving = sources[0].name

    @property
    def serving(self) -> str:
        """Return the name of the source that told the newest readings."""
        return self._serving

    async def read(self, query: Query) -> Readings:
        """Return one reading for everything asked; never raises for a source's failure."""
        wanted = [worker.name for worker in query.kv_workers]
        needs_queue = bool(query.prefill_workers) or not wanted
        found: dict[str, Reading] = {}
        latency: Mapping[str, Buckets] = {}
        for position, source in enumerate(self._sources):
            keys = [*wanted, *([_QUEUE] if needs_queue else [])]
            if all(key in found and found[key].is_known for key in keys):
                break
            answer = await self._ask(source, query)
            if isinstance(answer, str):
                readings = dict.fromkeys(keys, missing(answer, source=source.name))
            else:
                # A router that is too busy to answer may hold a long queue that no worker knows of.
                is_part = position > 0 and not answer.queue_is_whole
                readings = {**answer.kv, _QUEUE: replace(answer.queue, at_least=is_part)}
                latency = latency or answer.latency
            _merge(found, readings, is_backup=position > 0)
        self._remember(found)
        kept = {key: self._kept(key, reading, query.max_age_s) for key, reading in found.items()}
        self._note(kept)
        queue = kept.pop(_QUEUE, None) or missing("not asked", source="none")
        return Readings(kept, queue, latency=latency)

    async def _ask(self, source: Source, query: Query) -> Readings | str:
        """Return the source's readings, or why it has none."""
        health = self._health[source.name]
        if self._real_now_s() < health.retry_at_s:
            return health.why
        try:
            answer = await source.read(query)
        except ObservationError as exc:
            health.failures += 1
            pause_s = min(FIRST_PAUSE_S * 2 ** min(health.failures - 1, 16), LONGEST_PAUSE_S)
            health.retry_at_s = self._real_now_s() + pause_s
            health.why = in_short(exc)
            if health.failures == 1:
                log.warning("metrics source gone", source=source.name, why=health.why)
            return health.why
        if health.failures:
            log.info("metrics source back", source=source.name, failures=health.failures)
        health.failures, health.retry_at_s = 0, 0.0
        return answer

    def _remember(self, found: Mapping[str, Reading]) -> None:
        now_s = self._now_s()
        self._last = {key: self._last[key] for key in found if key in self._last}
        for key, reading in found.items():
            if reading.is_known:
                self._last[key] = (now_s - (reading.age_s or 0.0), reading)

    def _kept(self, key: str, reading: Reading, max_age_s: float) -> Reading:
        if reading.quality is not Quality.MISSING or key not in self._last:
            return reading
        measured_s, last = self._last[key]
        aged = judge(last.value, age_s=self._now_s() - measured_s, max_age_s=max_age_s, source=last.source)
        return aged if aged.is_known else replace(aged, why=f"{aged.why}; {reading.why}")

    def _note(self, readings: Mapping[str, Reading]) -> None:
        known = [reading.source.split(" ")[0] for reading in readings.values() if reading.is_known]
        serving = known[-1] if known else "none"
        if serving != self._serving:
            log.warning("metrics come from another source", source=serving, before=self._serving)
            self._serving = serving


def _merge(found: dict[str, Reading], readings: Mapping[str, Reading], *, is_backup: bool) -> None:
    """Take over what is better than what is there: fresh over stale over missing, reasons joined."""
    rank = {Quality.FRESH: 2, Quality.STALE: 1, Quality.MISSING: 0}
    for key, reading in readings.items():
        before = found.get(key)
        if before is None:
            found[key] = reading
        elif rank[reading.quality] > rank[before.quality]:
            source = f"{reading.source} (backup of {before.source})" if is_backup else reading.source
            why = f"{before.source}: {before.why}" + (f"; {reading.why}" if reading.why else "")
            found[key] = replace(reading, source=source, why="" if reading.is_known else why)
        elif not before.is_known:
            why = f"{before.why}; {reading.source}: {reading.why}"
            found[key] = replace(before, why=why)
