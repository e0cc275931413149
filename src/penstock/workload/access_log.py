"""Reads a gateway's access log as a trace: JSON lines of Penstock's router, Envoy (also Envoy AI Gateway) and nginx. Pure.

A log says when a request arrived or ended, how it was answered, and at best how many tokens it had. Token counts that it lacks
are estimated only as the caller says; otherwise the log is refused, and the message names what is missing.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.workload.trace_rows import FailedRowError, RowError, TraceRequest

_PROMPT_NAMES: Final = ("gen_ai.usage.input_tokens", "genai_tokens_input", "input_tokens", "prompt_tokens")
_ANSWER_NAMES: Final = (
    "gen_ai.usage.output_tokens",
    "genai_tokens_output",
    "output_tokens",
    "completion_tokens",
    "generation_tokens",
)
_CACHED_NAMES: Final = ("gen_ai.usage.cached_input_tokens", "cached_tokens", "cached_input_tokens")
_PATH_NAMES: Final = ("x-envoy-origin-path", "path", "request_uri", "uri", "request", "endpoint")


@dataclass(frozen=True, slots=True)
class LogFormat:
    """Field names of one kind of access log; of several names the first present one counts.

    Attributes:
        name: For messages.
        arrival: Time of arrival; empty: the line has only the time at which the request ended.
        end: Time at which the request ended.
        duration: From arrival to the end of the answer.
        duration_unit_s: Seconds that one unit of ``duration`` is.
        request_bytes: Of the request with its headers or of its body.
        worker: Who answered.
    """

    name: str
    arrival: tuple[str, ...]
    end: tuple[str, ...]
    duration: tuple[str, ...]
    duration_unit_s: float
    status: tuple[str, ...]
    request_bytes: tuple[str, ...]
    answer_bytes: tuple[str, ...]
    worker: tuple[str, ...]
    paths: tuple[str, ...] = _PATH_NAMES

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Return whether a line has a time and how long the request took or how it was answered."""
        return _first(row, self.arrival or self.end) is not None and (
            _first(row, self.duration) is not None and _first(row, self.status) is not None
        )


FORMATS: Final = (
    LogFormat(
        "Penstock's router",
        arrival=(),
        end=("ts",),
        duration=("e2e_s",),
        duration_unit_s=1.0,
        status=("status",),
        request_bytes=(),
        answer_bytes=(),
        worker=("worker",),
    ),
    LogFormat(
        "Envoy",
        arrival=("start_time",),
        end=(),
        duration=("duration", "duration_ms"),
        duration_unit_s=0.001,
        status=("response_code", "status"),
        request_bytes=("bytes_received",),
        answer_bytes=("bytes_sent",),
        worker=("upstream_host",),
    ),
    LogFormat(
        "nginx",
        arrival=(),
        end=("msec", "time_iso8601", "@timestamp", "time", "time_local", "timestamp"),
        duration=("request_time",),
        duration_unit_s=1.0,
        status=("status",),
        request_bytes=("request_length",),
        answer_bytes=("body_bytes_sent", "bytes_sent"),
        worker=("upstream_addr",),
    ),
)
"""Source: `AccessLog` of Penstock's router; Envoy Gateway's and Envoy AI Gateway's default JSON formats; the variables of nginx, under
their own names, in a ``log_format`` with ``escape=json``."""

KNOWN_LOGS: Final = (
    "JSON lines of Penstock's router (ts, e2e_s, status), Envoy (start_time, duration, response_code) or nginx (msec or time_iso8601,"
    " request_time, status)"
)
"""What can be read, for messages."""

TEXT_LOG: Final = re.compile(r'\S+ \S+ \S+ \[[^\]]+\] "')
"""A line of nginx's and Apache's combined text format."""

_MODEL_PATHS: Final = (
    "completions",
    "chat_completions",
    "responses",
    "messages",
    "generate",
    "generate_stream",
)
"""Last parts of paths for which a model generates tokens; in Penstock's own log, the endpoint."""
FIRST_FAILED: Final = 400
"""First HTTP status of a request that was not served."""


def log_format_of(text: str) -> LogFormat | None:
    """Return the format of a line; None: it is not of an access log."""
    row = _object(text)
    return None if row is None else next((each for each in FORMATS if each.is_of(row)), None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens of a request whose log line has no count: always the same number, or bytes by bytes a token.

    Attributes:
        tokens: Of each request, >= 1; None: by ``bytes_per_token``.
        bytes_per_token: > 0; None: by ``tokens``.
    """

    tokens: int | None = None
    bytes_per_token: float | None = None

    @classmethod
    def parse(cls, text: str) -> Estimate:
        """Read ``800`` or ``bytes/4``.

        Raises:
            ValueError: it is neither.
        """
        unit, slash, divisor = text.partition("/")
        if slash and unit == "bytes" and math.isfinite(float(divisor)) and float(divisor) > 0:
            return cls(bytes_per_token=float(divisor))
        if not slash and int(text) >= 1:
            return cls(tokens=int(text))
        raise ValueError(text)

    def of(self, length: float | None) -> int | None:
        """Return the tokens of a request or an answer of that many bytes; None: its bytes are needed and not known."""
        if self.bytes_per_token is None:
            return self.tokens
        return None if length is None else max(1, round(length / self.bytes_per_token))

    def __str__(self) -> str:
        """Return it as it is given."""
        return f"{self.tokens}" if self.bytes_per_token is None else f"bytes/{self.bytes_per_token:g}"


@dataclass(frozen=True, slots=True)
class LogEstimates:
    """What is assumed of requests whose token counts are not in the log; None: nothing, the log is refused."""

    input_tokens: Estimate | None = None
    output_tokens: Estimate | None = None


NO_ESTIMATES: Final = LogEstimates()


@dataclass(frozen=True, slots=True)
class Answered:
    """What a line says besides the request; None: unknown. Times in seconds from arrival."""

    e2e_s: float
    ttft_s: float | None
    cached_tokens: int | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class AccessLogFacts:
    """What a log says besides its requests.

    Attributes:
        format: Who wrote it.
        start_s: Real seconds since 1970 of the trace's zero.
        answered: By the request's line.
        left_out: Why lines are not load, and how many.
        estimated: Lines whose prompt or answer tokens are estimated, by which.
    """

    format: str
    start_s: float
    answered: Mapping[int, Answered]
    left_out: Mapping[str, int]
    estimated: Mapping[str, int]


@dataclass(slots=True)
class AccessLogRows:
    """Reads lines in any order; their times are seconds since 1970.

    Attributes:
        is_unordered: Always: a log has its lines by the ends of the requests.
        answered, left_out, estimated: See `AccessLogFacts`.
        missing: Requests without a token count and without an estimate, by what is missing.
    """

    form: LogFormat
    estimates: LogEstimates = NO_ESTIMATES
    is_unordered: bool = True
    answered: dict[int, Answered] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    estimated: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)

    def parse(self, text: str, line: int) -> TraceRequest:
        """Return the request of a line; see `RowReader`."""
        row = _object(text)
        if row is None:
            raise RowError(f"not a JSON object: {text[:60]!r}")
        if not self.form.is_of(row):
            raise RowError(f"has no time, duration or status of {self.form.name}: {text[:60]!r}")
        self._leave_out(row)
        duration_s = (_number(row, self.form.duration) or 0.0) * self.form.duration_unit_s
        prompt = self._tokens(
            row, "prompt tokens", _PROMPT_NAMES, self.form.request_bytes, self.estimates.input_tokens
        )
        answer = self._tokens(
            row, "generated tokens", _ANSWER_NAMES, self.form.answer_bytes, self.estimates.output_tokens
        )
        if prompt is None or answer is None:
            raise FailedRowError("has no token counts")
        arrival_s = (
            _time(row, self.form.arrival) if self.form.arrival else _time(row, self.form.end) - duration_s
        )
        cached = _number(row, _CACHED_NAMES)
        self.answered[line] = Answered(
            duration_s,
            _number(row, ("ttft_s",)),
            None if cached is None else int(cached),
            _worker(row, self.form.worker),
        )
        return TraceRequest(arrival_s, prompt, answer, None, line, _tier(row))

    def facts(self, start_s: float) -> AccessLogFacts:
        """Return what was read besides the requests."""
        return AccessLogFacts(
            self.form.name, start_s, self.answered, dict(self.left_out), dict(self.estimated)
        )

    def refuse_missing(self, source: str) -> None:
        """Refuse a log in which token counts are missing.

        Raises:
            ConfigError: there is such a request; the message names what it lacks and what to do.
        """
        if not self.missing:
            return
        served = len(self.answered) + max(self.missing.values())
        lacks = " and ".join(f"{count:,} without {what}" for what, count in self.missing.items())
        raise ConfigError(
            f"{source}: an access log of {self.form.name} has {lacks}, of {served:,} served requests; log them (as"
            f" {_PROMPT_NAMES[0]} and {_ANSWER_NAMES[0]}), or give penstock assess --access-log an estimate:"
            " --log-input-tokens and --log-output-tokens, each a number of tokens as 800, or bytes/4 where the log has sizes"
        )

    def _leave_out(self, row: Mapping[str, Any]) -> None:
        path = str(_first(row, self.form.paths) or "")
        if path and not _is_of_model(path):
            self.left_out["for other paths than a model's"] += 1
            raise FailedRowError(f"{path[:60]}: is not a path of a model")
        status = int(_number(row, self.form.status) or 0)
        if status == 0 or status >= FIRST_FAILED:
            kind = "turned away with 429 or 503" if status in {429, 503} else "failed or left by the client"
            self.left_out[kind] += 1
            raise FailedRowError(f"status {status}: not served")

    def _tokens(
        self,
        row: Mapping[str, Any],
        what: str,
        names: Sequence[str],
        sizes: Sequence[str],
        estimate: Estimate | None,
    ) -> int | None:
        counted = _number(row, names)
        if counted is not None and counted >= 1:
            return int(counted)
        made = None if estimate is None else estimate.of(_number(row, sizes))
        if made is None:
            self.missing[what] += 1
        else:
            self.estimated[f"{what}: {estimate}"] += 1
        return made


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value that is there; gateways write a hyphen or nothing for one that is missing."""
    return next((row[name] for name in names if row.get(name) not in {None, "", "-"}), None)


def _number(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    value = _first(row, names)
    if value is None or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) and found >= 0 else None


def _tier(row: Mapping[str, Any]) -> Tier | None:
    """Return the tier in which Penstock's router served the request; None if the line names none of Penstock's tiers."""
    value = row.get("tier")
    return next((tier for tier in Tier if tier == value), None)


def _worker(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return who answered; nginx lists every one that it tried, the last of them answered."""
    value = _first(row, names)
    return None if value is None else str(value).rpartition(",")[2].strip()


def _time(row: Mapping[str, Any], names: Sequence[str]) -> float:
    value = _first(row, names)
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    for read in (datetime.fromisoformat, lambda text: datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z")):
        try:
            return read(str(value)).timestamp()
        except ValueError:
            continue
    raise RowError(
        f"{'/'.join(names)}: {value!r} is not a time in seconds since 1970, ISO 8601 or nginx's form"
    )


def _is_of_model(path: str) -> bool:
    """Return whether a path, or the first line of a request, is one that makes a model generate."""
    parts = path.split()
    route = parts[1] if len(parts) > 1 else path
    return route.partition("?")[0].rstrip("/").rpartition("/")[2] in _MODEL_PATHS
