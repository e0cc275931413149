"""Asks a Prometheus for what it has kept, in range queries of bounded size; nothing is written to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from penstock.assess.observed import Floats
from penstock.core.errors import ObservationError
from penstock_planner.sources.prometheus import asked

QUERY_TIMEOUT_S: Final = 60.0
"""Real seconds of one query. Chosen: half of Prometheus' own default limit of two minutes."""
QUERY_STEPS: Final = 1440
"""Maximum points of a series in one answer: a day of minutes. Prometheus refuses more than 11,000."""
MOST_SERIES: Final = 500
"""Maximum series in one answer. Chosen: a sum by bucket has about thirty."""

SETTING: Final = "--prometheus"


@dataclass(frozen=True, slots=True)
class Period:
    """Steps of equal length up to an end; values are read at the end of each."""

    start_s: float
    steps: int
    step_s: float

    @property
    def end_s(self) -> float:
        """Real seconds since 1970 at which the last step ends."""
        return self.start_s + self.steps * self.step_s


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer, NaN where it has no sample."""

    labels: Mapping[str, str]
    values: Floats


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of one series at the time of a query, real seconds since 1970."""

    labels: Mapping[str, str]
    value: float
    asked_s: float


class PrometheusHistory:
    """One server; counts its queries and reports each to ``on_query``."""

    def __init__(
        self,
        client: Any,
        *,
        on_query: Callable[[int], None] = lambda _count: None,
        setting: str = SETTING,
    ) -> None:
        """Create a reader; ``setting`` is the flag that names the server, for messages."""
        self._client = client
        self._setting = setting
        self._on_query = on_query
        self.queries = 0

    def label_values(self, label: str, match: Sequence[str], period: Period) -> list[str]:
        """Return the values that a label has in any series that matches one of the selectors."""
        params = {"match[]": list(match), "start": period.start_s, "end": period.end_s}
        found = self._asked(lambda: self._client.get_label_values(label, params=params))
        return sorted(str(each) for each in found)

    def lines(self, promql: str, period: Period) -> list[Line]:
        """Return the series of a query at the end of each step, asked for in parts.

        Raises:
            ObservationError: the server does not answer, or with too many series.
        """
        found: dict[frozenset[tuple[str, str]], Floats] = {}
        for first in range(0, period.steps, QUERY_STEPS):
            count = min(QUERY_STEPS, period.steps - first)
            answered = self._range(promql, period.start_s + first * period.step_s, count, period.step_s)
            if len(answered) > MOST_SERIES:
                raise ObservationError(
                    f"prometheus: {promql} has {len(answered):,} series, more than {MOST_SERIES}; choose fewer with --match"
                )
            for labels, values in answered:
                key = frozenset(labels.items())
                whole = found.setdefault(key, np.full(period.steps, math.nan))
                whole[first : first + count] = values
        return [Line(dict(key), values) for key, values in found.items()]

    def line(self, promql: str, period: Period) -> Floats:
        """Return the only series of a query without labels; NaN throughout where there is none."""
        found = self.lines(promql, period)
        return found[0].values if found else np.full(period.steps, math.nan)

    def labels_now(self, promql: str, at_s: float) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each series of a query at one time."""
        found = self._asked(lambda: self._client.custom_query(promql, params={"time": at_s}))
        return [(dict(each["metric"]), _number(each["value"][1])) for each in found]

    def newest(self, promql: str) -> list[Sample]:
        """Return the newest sample of each series of a query, as the server's own clock has it."""
        found = self._asked(lambda: self._client.custom_query(promql))
        return [
            Sample(dict(each["metric"]), _number(each["value"][1]), float(each["value"][0])) for each in found
        ]

    def sample_times(self, promql: str) -> list[list[float]]:
        """Return the times of each series' samples, real seconds since 1970; the query must be a range vector."""
        found = self._asked(lambda: self._client.custom_query(promql))
        return [[float(at_s) for at_s, _ in each["values"]] for each in found]

    def _range(
        self, promql: str, start_s: float, count: int, step_s: float
    ) -> list[tuple[dict[str, str], Floats]]:
        first_s = start_s + step_s
        begin, end = (datetime.fromtimestamp(at_s, UTC) for at_s in (first_s, first_s + (count - 1) * step_s))
        answer = self._asked(
            lambda: self._client.custom_query_range(
                promql, start_time=begin, end_time=end, step=f"{step_s:g}"
            )
        )
        found = []
        for each in answer:
            values = np.full(count, math.nan)
            for at_s, value in each["values"]:
                place = round((float(at_s) - first_s) / step_s)
                if 0 <= place < count:
                    values[place] = _number(value)
            found.append((dict(each["metric"]), values))
        return found

    def _asked(self, send: Callable[[], Any]) -> list[Any]:
        found = asked(self._client, send, setting=self._setting)
        self.queries += 1
        self._on_query(self.queries)
        return found


def _number(text: Any) -> float:
    value = float(text)
    return value if math.isfinite(value) else math.nan
