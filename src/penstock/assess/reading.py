"""Reads one model's history from a Prometheus: finds its runtime, asks for load, latencies and replicas, names what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.assess.autoscaler import PREFIX, Autoscaler, autoscaler_of
from penstock.assess.engine_metrics import engines, engines_in, present
from penstock.assess.history import Period, PrometheusHistory
from penstock.assess.observed import LONG_GAP_S, Buckets, Floats, Observed, arrivals_of, buckets_of, gaps_in
from penstock.core.closest import did_you_mean
from penstock.core.engine_metrics import EngineMetrics
from penstock.core.errors import ConfigError, ObservationError
from penstock_planner.sources.prometheus import escaped

MINUTE_S: Final = 60.0
_SCRAPES: Final = 4
"""Samples that a step holds at least, so that a lost one leaves a rate. Chosen: Prometheus' own advice."""
MOST_PROCESSES: Final = 1000
"""Chosen: the processes of a large fleet; more are the wrong selection, and each has hundreds of series."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Which series are read.

    Attributes:
        model: Its name in the series.
        matchers: Further PromQL matchers, such as ``namespace="prod"``.
        deployment: Deployment whose replicas kube-state-metrics counts; None: the scraped processes are counted.
        setting: Flag that names the model, for messages.
    """

    model: str
    matchers: tuple[str, ...] = ()
    deployment: str | None = None
    setting: str = "--model"

    def selector(self, engine: EngineMetrics, *extra: str) -> str:
        """Return the PromQL selector of a runtime's series of the model."""
        named = [] if engine.model_label is None else [f'{engine.model_label}="{escaped(self.model)}"']
        return "{" + ",".join((*named, *self.matchers, *extra)) + "}"


def read_history(
    history: PrometheusHistory, subject: Subject, *, end_s: float, since_s: float, step_s: float = MINUTE_S
) -> Observed:
    """Return what the server has kept of the model.

    Args:
        history: The server.
        subject: Which series.
        end_s: Real seconds since 1970 up to which it is read, rounded down to a step.
        since_s: How long before.
        step_s: Real seconds of a step; longer ones are taken where scrapes are rare.

    Raises:
        ConfigError: the server knows no such model; the message names those that it knows.
        ObservationError: the server does not answer, or lacks what cannot be done without.
    """
    count = max(1, round(since_s / step_s))
    steps = Period(end_s // step_s * step_s - count * step_s, count, step_s)
    engine, known = engine_of(history, subject, steps)
    return _Reader(history, subject, engine, known, steps).read()


def engine_of(
    history: PrometheusHistory, subject: Subject, period: Period
) -> tuple[EngineMetrics, frozenset[str]]:
    """Return the model's runtime, and the names of all its series.

    Raises:
        ConfigError: the server knows no such model; the message names those that it knows.
        ObservationError: the server does not answer, or has no histogram of prompt tokens.
    """
    selectors = [subject.selector(each) for each in engines() if each.model_label is not None]
    unnamed = [
        f"{each.prompt_tokens[0]}_count{subject.selector(each)}"
        for each in engines()
        if each.model_label is None
    ]
    known = frozenset(history.label_values("__name__", [*dict.fromkeys(selectors), *unnamed], period))
    found = engines_in(known)
    if not found:
        _refuse_model(history, subject, period)
    engine = found[0]
    if present(engine.prompt_tokens, known, suffix="_bucket") is None:
        histograms = engine.prompt_tokens or ("a histogram of prompt tokens",)
        raise ObservationError(
            f"prometheus: {subject.model} ({engine.runtime}) has no {histograms[0]}, so that the lengths of its requests are"
            " unknown; keep the histograms in the scrape's relabelling, or give --trace"
        )
    if engine.model_label is None:
        known |= frozenset(history.label_values("__name__", ['{__name__=~"tgi_.+"}'], period))
    return engine, known


def _refuse_model(history: PrometheusHistory, subject: Subject, period: Period) -> None:
    served: set[str] = set()
    for label in dict.fromkeys(each.model_label for each in engines() if each.model_label is not None):
        counted = [each for each in engines() if each.model_label == label]
        match = [f"{name}{_braces(subject.matchers)}" for each in counted for name in each.running]
        match += [
            f"{name}_count{_braces(subject.matchers)}" for each in counted for name in each.prompt_tokens
        ]
        served.update(history.label_values(label, match, period))
    if served:
        known = sorted(served)
        raise ConfigError(
            f"{subject.setting} {subject.model}: Prometheus has no series of it in this time; it has {', '.join(known)}"
            f"{did_you_mean(subject.model, known)}"
        )
    raise ConfigError(
        f"{subject.setting} {subject.model}: Prometheus has no series of vLLM, SGLang, TensorRT-LLM, Dynamo or text-generation-inference in"
        " this time; check that the engines are scraped, --since and --match"
    )


def _braces(matchers: Sequence[str]) -> str:
    return "{" + ",".join(matchers) + "}" if matchers else ""


class _Reader:
    """Asks one question after the other, and collects what is missing."""

    def __init__(
        self,
        history: PrometheusHistory,
        subject: Subject,
        engine: EngineMetrics,
        known: frozenset[str],
        minutes: Period,
    ) -> None:
        self._history = history
        self._subject = subject
        self._engine = engine
        self._known = known
        self._period = minutes
        self._identity = "instance"
        self._notes: list[str] = []

    def read(self) -> Observed:
        """Return everything."""
        self._identify()
        interval_s = self._scrape_interval()
        self._period = _steps(self._period, interval_s)
        engine = self._engine
        prompts = self._required(engine.prompt_tokens, "prompt tokens")
        answers = self._required(engine.answer_tokens, "generated tokens")
        ttft = self._histogram(engine.ttft)
        gaps = self._histogram(engine.gap)
        waiting = self._gauge(engine.waiting)
        first_tokens = prompts.samples if ttft is None else ttft.samples
        arrivals = arrivals_of(first_tokens, waiting)
        if not np.nansum(arrivals) >= 1:
            raise ObservationError(
                f"prometheus: {self._subject.model} served no request in this time; choose another --since"
            )
        if ttft is None:
            self._notes.append(
                f"no time to first token ({' or '.join(engine.ttft) or engine.runtime + ' does not export it'}): the"
                " simulated one is compared with nothing"
            )
        if gaps is None:
            self._notes.append(
                "no time between tokens: the speed of decoding is the profile's, and compared with nothing"
            )
        self._note_gaps(arrivals)
        fine, fine_s = self._fine(arrivals, interval_s)
        fleet = _split(self._period, interval_s)
        return Observed(
            model=self._subject.model,
            runtime=engine.runtime,
            start_s=self._period.start_s,
            step_s=self._period.step_s,
            arrivals=arrivals,
            prompts=prompts,
            answers=answers,
            ttft=ttft,
            gaps=gaps,
            replicas=self._replicas(fleet),
            replica_step_s=fleet.step_s,
            waiting=waiting,
            running=self._gauge(engine.running),
            hit_rate=self._hit_rate(),
            fine=fine,
            fine_step_s=fine_s,
            kv_tokens=self._kv_tokens(arrivals),
            autoscaler=self._autoscaler(),
            notes=tuple(self._notes),
        )

    # -- which processes --------------------------------------------------------------------------------

    def _counting(self) -> str:
        """Return a metric that each process exports."""
        engine = self._engine
        name = present(engine.running, self._known)
        if name is None:
            ttft = present((*engine.ttft, *engine.prompt_tokens), self._known, suffix="_count")
            name = f"{ttft}_count"
        return name + self._subject.selector(engine)

    def _identify(self) -> None:
        """Choose the label that tells processes apart, as the planner does: the target, else the pod."""
        if not self._history.label_values("instance", [self._counting()], self._period):
            self._identity = "pod"

    def _scrape_interval(self) -> float:
        """Return the seconds between two samples of a series in the busiest ten minutes; a minute where it is unknown."""
        length_s = self._period.end_s - self._period.start_s
        count = max(1, int(length_s // 3600))
        hour_s = min(3600.0, length_s)
        hours = Period(self._period.end_s - count * hour_s, count, hour_s)
        window_s = min(600.0, length_s)
        counts = self._history.line(f"max(count_over_time({self._counting()}[{_duration(window_s)}]))", hours)
        most = float(np.nanmax(counts)) if np.isfinite(counts).any() else window_s / MINUTE_S
        return window_s / max(1.0, most)

    def _summed(self, inner: str, by: str = "") -> str:
        """Return the sum over processes; of two scrapes of one page the larger counts."""
        outer = f" by ({by})" if by else ""
        labels = ",".join(filter(None, (self._identity, "engine", by)))
        return f"sum{outer} (max by ({labels}) ({inner}))"

    # -- load and latencies -----------------------------------------------------------------------------

    def _increase(self, series: str, *extra: str) -> str:
        window = _duration(self._period.step_s)
        return f"increase({series}{self._subject.selector(self._engine, *extra)}[{window}])"

    def _required(self, candidates: Sequence[str], what: str) -> Buckets:
        found = self._histogram(candidates)
        if found is None or not np.nansum(found.counts) > 0:
            raise ObservationError(
                f"prometheus: {' or '.join(candidates)}: no sample of the {what} of {self._subject.model} in this time;"
                " choose another --since"
            )
        return found

    def _histogram(self, candidates: Sequence[str]) -> Buckets | None:
        name = present(candidates, self._known, suffix="_bucket")
        if name is None:
            return None
        lines = self._history.lines(self._summed(self._increase(f"{name}_bucket"), "le"), self._period)
        sums = self._history.line(self._summed(self._increase(f"{name}_sum")), self._period)
        return buckets_of({each.labels["le"]: each.values for each in lines if "le" in each.labels}, sums)

    def _gauge(self, candidates: Sequence[str]) -> Floats | None:
        name = present(candidates, self._known)
        if name is None:
            return None
        return self._history.line(
            self._summed(self._recent(name + self._subject.selector(self._engine))), self._period
        )

    def _recent(self, series: str, within_s: float = 0.0) -> str:
        """Return a gauge's last sample within the step: Prometheus itself shows one of a process that is gone for minutes."""
        return f"last_over_time({series}[{_duration(within_s or self._period.step_s)}])"

    def _hit_rate(self) -> Floats | None:
        """Return the fraction of prompt tokens found in the prefix cache; of a step without a look-up it is unknown."""
        for queries, hits in self._engine.cache_tokens:
            if queries in self._known and hits in self._known:
                asked = self._history.line(self._summed(self._increase(queries)), self._period)
                found = self._history.line(self._summed(self._increase(hits)), self._period)
                with np.errstate(invalid="ignore", divide="ignore"):
                    return np.where(asked > 0, np.clip(found / asked, 0.0, 1.0), math.nan)
        name = present(self._engine.hit_rate, self._known)
        if name is not None:
            return self._history.line(f"avg({name}{self._subject.selector(self._engine)})", self._period)
        self._notes.append(
            "no prefix-cache hits: every prompt counts as its own, so that more is computed than was"
        )
        return None

    def _fine(self, arrivals: Floats, interval_s: float) -> tuple[Floats | None, float]:
        """Return the requests of the busiest hour by the shortest step that the scrapes allow, and that step."""
        step_s = math.ceil(interval_s)
        if not self._period.step_s > 2 * step_s:
            self._notes.append(
                f"scraped every {interval_s:.0f} s: arrivals within {self._period.step_s:.0f} s count as random"
            )
            return None, 0.0
        busiest = int(np.nanargmax(arrivals))
        begin_s = self._period.start_s + busiest * self._period.step_s - 1800.0
        begin_s = min(max(begin_s, self._period.start_s), self._period.end_s - 3600.0)
        begin_s = max(begin_s, self._period.start_s)
        length_s = min(3600.0, self._period.end_s - begin_s)
        steps = Period(begin_s, max(1, int(length_s // step_s)), float(step_s))
        name = present((*self._engine.ttft, *self._engine.prompt_tokens), self._known, suffix="_count")
        series = f"{name}_count{self._subject.selector(self._engine)}"
        total = self._history.line(self._summed(series), steps)
        counts = np.diff(total, prepend=math.nan)
        return np.where(counts < 0, math.nan, counts), float(step_s)

    # -- the fleet --------------------------------------------------------------------------------------

    def _replicas(self, period: Period) -> Floats:
        deployment = self._subject.deployment
        if deployment is not None:
            matchers = ",".join((f'deployment="{escaped(deployment)}"', *self._subject.matchers))
            found = self._history.line(f"max(kube_deployment_status_replicas_ready{{{matchers}}})", period)
            if np.isfinite(found).any():
                return found
            raise ObservationError(
                f"prometheus: kube-state-metrics has no kube_deployment_status_replicas_ready of {deployment}; leave out"
                " --deployment to count scraped processes"
            )
        recent = self._recent(self._counting(), 2 * period.step_s)
        found = self._history.line(f"count(max by ({self._identity}) ({recent}))", period)
        most = float(np.nanmax(found)) if np.isfinite(found).any() else 0.0
        if most > MOST_PROCESSES:
            raise ObservationError(
                f"prometheus: {most:,.0f} processes serve {self._subject.model} at a time, more than {MOST_PROCESSES:,}; choose"
                " one fleet with --match"
            )
        return found

    def _autoscaler(self) -> Autoscaler | None:
        """Return the HPA of the Deployment as it was configured last; None: no Deployment is given, or nothing scales it."""
        deployment, period = self._subject.deployment, self._period
        if deployment is None:
            return None

        def last(*matching: str) -> list[tuple[dict[str, str], float]]:
            braces = ",".join((*matching, *self._subject.matchers))
            length_s = period.end_s - period.start_s
            return self._history.labels_now(
                f"last_over_time({{{braces}}}[{_duration(length_s)}])", period.end_s
            )

        found = last(f'__name__="{PREFIX}_info"', f'scaletargetref_name="{escaped(deployment)}"')
        names = [
            labels["horizontalpodautoscaler"] for labels, _ in found if "horizontalpodautoscaler" in labels
        ]
        if not names:
            self._notes.append(
                f"kube-state-metrics knows no HPA of {deployment}: the HPA has common settings"
            )
            return None
        specs = last(
            f'__name__=~"{PREFIX}_spec_(min_replicas|max_replicas|target_metric)"',
            f'horizontalpodautoscaler="{escaped(names[0])}"',
        )
        made = autoscaler_of(names[0], specs)
        if made.note is not None:
            self._notes.append(made.note)
        return made

    def _kv_tokens(self, arrivals: Floats) -> int | None:
        """Return the KV capacity of a replica, of engines that export it alongside their other metrics."""
        config = self._engine.cache_config
        if config is None:
            return None
        last = int(np.flatnonzero(np.nan_to_num(arrivals, nan=0.0) > 0)[-1])
        at_s = self._period.start_s + (last + 1) * self._period.step_s
        found = self._history.labels_now(f"{config} and on ({self._identity}) {self._counting()}", at_s)
        sizes = []
        for labels, _ in found:
            try:
                sizes.append(int(labels["num_gpu_blocks"]) * int(labels["block_size"]))
            except (KeyError, ValueError):
                continue
        return min(sizes, default=None)

    def _note_gaps(self, arrivals: Floats) -> None:
        missing = int(np.isnan(arrivals).sum())
        if missing * self._period.step_s < LONG_GAP_S:
            return  # a lost scrape, or the first step, before which there is none
        longest = max(end - first for first, end in gaps_in(arrivals)) * self._period.step_s
        self._notes.append(
            f"{missing * self._period.step_s / 3600:.1f} of {self._period.steps * self._period.step_s / 3600:.1f} hours have no"
            f" samples, the longest gap {longest / 3600:.1f} h: they are left out, not taken for idle"
        )


def _duration(seconds: float) -> str:
    """Return a duration as PromQL has it, which knows whole numbers only."""
    return f"{seconds:.0f}s" if seconds == round(seconds) else f"{seconds * 1000:.0f}ms"


def _steps(period: Period, interval_s: float) -> Period:
    """Return the same time, in longer steps where a step holds too few samples."""
    if interval_s <= period.step_s / 2:
        return period
    step_s = math.ceil(_SCRAPES * interval_s / period.step_s) * period.step_s
    count = max(1, int(period.steps * period.step_s // step_s))
    return Period(period.end_s - count * step_s, count, step_s)


def _split(period: Period, interval_s: float) -> Period:
    """Return the same time in shorter steps, of about a scrape each; replicas come and go within a minute."""
    parts = max(1, round(period.step_s / max(interval_s, _FLEET_STEP_S)))
    return Period(period.start_s, period.steps * parts, period.step_s / parts)


_FLEET_STEP_S: Final = 15.0
"""Shortest step of the replicas. Chosen: a week is then 28 queries."""
