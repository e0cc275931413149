"""Parses the Prometheus text format.

Only the requested names are parsed, because a planner reads thousands of pages per second and a vLLM page has
hundreds of other series. Names and labels are the same on every page of a worker, so they are parsed once and cached.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from penstock.core.errors import ObservationError
from penstock.core.metric_names import FORMER_NAMES

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:\\.|[^"\\])*)"')
_SERIES = re.compile(
    rf"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(?P<labels>[ \t]*(?:{_LABEL.pattern}[ \t]*,?[ \t]*)*)\}})?"
)
_REST = re.compile(r"[ \t]+(?P<value>[^\s}#]+)(?:[ \t]+-?\d+(?:\.\d*)?)?(?:[ \t]+#[ \t]*\{.*)?[ \t\r]*$")
"""Matches the rest of a line after a series: value, optional timestamp, optional OpenMetrics exemplar."""
_Series = tuple[str, Mapping[str, str]]
_ESCAPE = re.compile(r"\\(.)")

REMEMBERED_SERIES = 65536
"""Maximum number of cached series. Chosen: the series of 200 graphs with 16 workers; about 300 bytes each."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a metrics page with its value.

    Attributes:
        name: Sample name, for counters with the suffix ``_total``.
        labels: Labels by name.
        value: Value of the sample.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(page: str, names: Collection[str]) -> list[Sample]:
    """Return the samples with one of ``names``, in the order of the page.

    Samples that have a name from vLLM 0.9 or before are returned with the current name (`metric_names.FORMER_NAMES`).

    Args:
        page: Metrics page in text exposition format 0.0.4; OpenMetrics' ``# EOF`` and comments are skipped.
        names: Exact sample names to read.

    Raises:
        ObservationError: A line with such a name is malformed; the message quotes it.
    """
    wanted = frozenset(names)
    read = wanted | {former for former, now in FORMER_NAMES.items() if now in wanted}
    prefixes = tuple(read)
    found = []
    for line in page.split("\n"):
        if not line.startswith(prefixes):
            continue
        series, _, number = line.rpartition(" ")
        known = _series(series)
        if known is None:  # the line has a timestamp, an exemplar, or unusual white space
            known, number = _unusual(line, read)
        if known is not None and known[0] in read:
            found.append(Sample(*known, _value(number, line)))
    return _renamed(found, wanted)


def _renamed(found: list[Sample], wanted: Collection[str]) -> list[Sample]:
    """Rename samples with former names; on a page that has both names, the former one is a duplicate and is dropped."""
    present = {sample.name for sample in found}
    if present.isdisjoint(FORMER_NAMES):
        return found
    named = []
    for sample in found:
        now = FORMER_NAMES.get(sample.name)
        if now is None or sample.name in wanted:
            named.append(sample)
        elif now not in present:
            named.append(replace(sample, name=now))
    return named


def _unusual(line: str, read: Collection[str]) -> tuple[_Series | None, str]:
    series = _SERIES.match(line)
    match = None if series is None else _REST.match(line, series.end())
    known = _series(line[: match.start()]) if match is not None else None
    if known is None and re.split(r"[{ \t]", line, maxsplit=1)[0] in read:
        raise ObservationError(f"metrics page: cannot read line {line!r}")
    return known, match["value"] if match is not None else ""


@lru_cache(REMEMBERED_SERIES)
def _series(text: str) -> _Series | None:
    match = _SERIES.fullmatch(text)
    if match is None:
        return None
    labels = {
        key: _ESCAPE.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], value)
        for key, value in _LABEL.findall(match["labels"] or "")
    }
    return match["name"], MappingProxyType(labels)


def _value(text: str, line: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ObservationError(f"metrics page: {text!r} is not a number in {line!r}") from exc
