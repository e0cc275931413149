"""Asks sources in order, each only for what the earlier ones could not provide.

A reading that came from a backup says so in its ``source``; a queue from a backup that sees only the workers'
own queues is a lower bound. When none answers, the last fresh value is
kept with its growing age until it is too old.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.core.errors import ObservationError
from penstock.core.logs import get_logger
from penstock.planner.decide.observation import Demand
from penstock.planner.decide.reading import RANK, Quality, Reading, assess, missing
from penstock.planner.sources.base import Buckets, PullBackoff, Query, Readings, ReadingSource, in_short

Key = tuple[str, str]
"""What a reading is of, and which worker's."""

_KV, _WAITING = "kv", "waiting"
_QUEUE: Key = ("queue", "")

log = get_logger(__name__)


class SourceChain:
    """Sources by preference."""

    name = "chain"
    counts_demand = True

    def __init__(
        self, sources: Sequence[ReadingSource], *, now_s: Callable[[], float], real_now_s: Callable[[], float]
    ) -> None:
        self._sources = tuple(sources)
        self._now_s = now_s
        self._real_now_s = real_now_s
        self._health = {source.name: PullBackoff() for source in sources}
        self._last: dict[Key, tuple[float, Reading]] = {}
        self._serving = sources[0].name

    async def read(self, query: Query) -> Readings:
        """Return one reading for everything requested; never raises for a source's failure.

        The demand is the first source's that knows it; a source that cannot is not asked for it.
        """
        workers = [worker.name for worker in query.kv_workers]
        wanted: list[Key] = [(_KV, name) for name in workers]
        if query.prefill_workers or not workers:
            wanted.append(_QUEUE)
        found: dict[Key, Reading] = {}
        latency: Mapping[str, Buckets] = {}
        demand: Demand | None = None
        for position, source in enumerate(self._sources):
            is_complete = all(key in found and found[key].is_known for key in wanted)
            if is_complete and (demand is not None or not source.counts_demand):
                continue
            answer = await self._ask(source, query)
            if isinstance(answer, str):
                known = [(_WAITING, name) for name in workers if (_WAITING, name) in self._last]
                readings = dict.fromkeys([*wanted, *known], missing(answer, source=source.name))
            else:
                readings = _by_key(answer, is_backup=position > 0)
                latency = latency or answer.latency
                demand = demand or answer.demand
            _merge(found, readings, is_backup=position > 0)
        self._remember(found)
        kept = {key: self._kept(key, reading, query.max_age_s) for key, reading in found.items()}
        self._note([kept[key] for key in wanted if key in kept])
        waiting = {name: kept[_WAITING, name] for name in workers if (_WAITING, name) in kept}
        return Readings(
            {name: kept[_KV, name] for name in workers},
            kept.get(_QUEUE) or missing("not asked", source="none"),
            demand=demand,
            worker_waiting=waiting or None,
            latency=latency,
        )

    async def _ask(self, source: ReadingSource, query: Query) -> Readings | str:
        """Return the source's readings, or why it has none."""
        health = self._health[source.name]
        if health.is_pausing(self._real_now_s()):
            return health.why
        try:
            answer = await source.read(query)
        except ObservationError as exc:
            health.failed(in_short(exc), self._real_now_s())
            if health.failures == 1:
                log.warning("metrics source gone", source=source.name, why=health.why)
            return health.why
        if health.failures:
            log.info("metrics source back", source=source.name, failures=health.failures)
        health.succeeded()
        return answer

    def _remember(self, found: Mapping[Key, Reading]) -> None:
        now_s = self._now_s()
        self._last = {key: self._last[key] for key in found if key in self._last}
        for key, reading in found.items():
            if reading.is_known:
                self._last[key] = (now_s - (reading.age_s or 0.0), reading)

    def _kept(self, key: Key, reading: Reading, max_age_s: float) -> Reading:
        if reading.quality is not Quality.MISSING or key not in self._last:
            return reading
        measured_s, last = self._last[key]
        aged = assess(last.value, age_s=self._now_s() - measured_s, max_age_s=max_age_s, source=last.source)
        return aged if aged.is_known else replace(aged, why=f"{aged.why}; {reading.why}")

    def _note(self, readings: Sequence[Reading]) -> None:
        known = [reading.source.split(" ")[0] for reading in readings if reading.is_known]
        serving = known[-1] if known else "none"
        if serving != self._serving:
            log.warning("metrics come from another source", source=serving, before=self._serving)
            self._serving = serving


def _by_key(answer: Readings, *, is_backup: bool) -> dict[Key, Reading]:
    # A router that is too busy to answer may hold a long queue that no worker knows of.
    is_part = answer.queue.at_least or (is_backup and not answer.queue_is_complete)
    waiting = answer.worker_waiting or {}
    return {
        **{(_KV, name): reading for name, reading in answer.kv.items()},
        **{(_WAITING, name): reading for name, reading in waiting.items()},
        _QUEUE: replace(answer.queue, at_least=is_part),
    }


def _merge(found: dict[Key, Reading], readings: Mapping[Key, Reading], *, is_backup: bool) -> None:
    """Take over what is better than what is there: fresh over stale over missing, reasons joined."""
    for key, reading in readings.items():
        before = found.get(key)
        if before is None:
            found[key] = reading
        elif RANK[reading.quality] > RANK[before.quality]:
            source = f"{reading.source} (backup of {before.source})" if is_backup else reading.source
            why = f"{before.source}: {before.why}" + (f"; {reading.why}" if reading.why else "")
            found[key] = replace(reading, source=source, why="" if reading.is_known else why)
        elif not before.is_known:
            why = f"{before.why}; {reading.source}: {reading.why}"
            found[key] = replace(before, why=why)
