"""Reads the Prometheus text format; every source and the router's scraper call `parse_samples`.

Only the wanted names are decoded, because a planner reads thousands of pages a second
and a vLLM page holds hundreds of series it never looks at.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from penstock_core.errors import ObservationError

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:\\.|[^"\\])*)"')
_LINE = re.compile(
    r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    rf"(?:\{{(?P<labels>[ \t]*(?:{_LABEL.pattern}[ \t]*,?[ \t]*)*)\}})?"
    r"[ \t]+(?P<value>\S+)(?:[ \t]+(?P<timestamp>-?\d+))?[ \t\r]*$"
)
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a page.

    Attributes:
        name: Metric name as written, ``_total`` and ``_bucket`` included.
        labels: Label values by name.
        value: As written; NaN and infinities are kept for the reader to judge.
    """

    name: str
    labels: dict[str, str]
    value: float


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def parse_samples(page: str, names: Collection[str]) -> list[Sample]:
    """Return the samples of ``names`` in page order.

    Args:
        page: Text exposition format 0.0.4 (OpenMetrics' ``# EOF`` and comments are skipped).
        names: Exact sample names wanted.

    Raises:
        ObservationError: a line of a wanted name cannot be read; the message quotes it.
    """
    wanted = frozenset(names)
    prefixes = tuple(wanted)
    found = []
    for line in page.split("\n"):
        if not line.startswith(prefixes):
            continue
        match = _LINE.match(line)
        if match is None:
            if re.split(r"[{ \t]", line, maxsplit=1)[0] in wanted:
                raise ObservationError(f"metrics page: cannot read line {line!r}")
            continue
        if match["name"] not in wanted:
            continue
        try:
            value = float(match["value"])
        except ValueError as exc:
            raise ObservationError(f"metrics page: {match['value']!r} is not a number in {line!r}") from exc
        labels = {key: _unescape(text) for key, text in _LABEL.findall(match["labels"] or "")}
        found.append(Sample(match["name"], labels, value))
    return found
