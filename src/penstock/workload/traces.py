"""Reads request traces: each known format becomes one list of `TraceRequest`; others are refused with what to do."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.core.files import read_bytes
from penstock.core.validation import findings
from penstock.workload.access_log import (
    KNOWN_LOGS,
    NO_ESTIMATES,
    TEXT_LOG,
    AccessLogFacts,
    AccessLogRows,
    LogEstimates,
    log_format_of,
)
from penstock.workload.trace_rows import (
    BLOCK_TOKENS,
    CSV_COLUMNS,
    HASH_TOKENS,
    BlockIds,
    CsvRows,
    FailedRowError,
    JsonRows,
    RowError,
    RowReader,
    TraceFormat,
    TraceRequest,
    header_of,
)

__all__ = [
    "BLOCK_TOKENS",
    "BLOCK_TOKENS_HELP",
    "BLOCK_TOKENS_UNSET",
    "OnBadRow",
    "Trace",
    "TraceFormat",
    "TraceRequest",
    "load_access_log",
    "load_trace",
    "trace_of_rows",
]

BUILT_IN: Final = {"mooncake": "mooncake_conversation_slice.jsonl"}
"""Names of packaged traces; see data/README.md for their sources."""

KNOWN: Final = (
    "JSON lines with timestamp, input_length and output_length (Mooncake, AIPerf, Dynamo, Bailian), Azure's CSV"
    " (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT's (Timestamp,…,Request tokens,Response tokens), splitwise-sim's"
    " (arrival_timestamp,…,prompt_size,token_size), ServeGen's (request_id,timestamp,input_tokens,output_tokens), and access logs:"
    f" {KNOWN_LOGS}"
)
"""What can be read, for messages."""

BLOCK_TOKENS_HELP: Final = "Tokens per hash id in the trace."
BLOCK_TOKENS_UNSET: Final = "512; 16 for Bailian"

_CLIENT_TABLE: Final = re.compile(r"\d+,[\d.e+-]+,[\d.e+-]+,(Gamma|Weibull|),[\d.e+-]+,[\d.e+-]+$")
"""A row of ServeGen's chunk-N-trace.csv, which has no header; an idle window names no distribution."""

_SHOWN_BAD_ROWS = 5
"""Chosen: enough to see a pattern, few enough to read."""


class OnBadRow(StrEnum):
    """What to do with a row that cannot be read."""

    REFUSE = "refuse"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read, in order of arrival.

    Attributes:
        skipped: Why a row was left out, by 1-based line.
        hash_tokens: Tokens that one of the file's own hash ids stands for.
        title: What it is as text, for headings; empty: a file, which its name says.
        log: What an access log says besides its requests; None: it is not one.
    """

    name: str
    format: TraceFormat
    sha256: str
    requests: tuple[TraceRequest, ...] = field(hash=False)
    skipped: Mapping[int, str] = field(hash=False)
    hash_tokens: int = BLOCK_TOKENS
    title: str = ""
    log: AccessLogFacts | None = field(default=None, hash=False)

    @property
    def is_batched(self) -> bool:
        """Whether most requests share their time with another, as in Mooncake's own batches of 3 s."""
        counts = Counter(request.arrival_s for request in self.requests)
        alone = sum(count == 1 for count in counts.values())
        return self.format is TraceFormat.MOONCAKE and 2 * alone < len(self.requests)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What became of a file's rows."""

    requests: list[TraceRequest] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def file_version(source: str) -> tuple[str, int, int] | None:
    """Return what changes with a trace's file (its place, time of change in ns, bytes); None: it is not a file that can be read."""
    path = Path(source).resolve()
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_mtime_ns, found.st_size


def load_trace(
    source: str | Path,
    *,
    on_bad_row: OnBadRow = OnBadRow.REFUSE,
    block_tokens: int | None = None,
    estimates: LogEstimates = NO_ESTIMATES,
) -> Trace:
    """Read a trace.

    Args:
        source: A built-in name or a path.
        on_bad_row: What becomes of a row that cannot be read. One of a request that failed is always left out.
        block_tokens: Tokens that one hash id stands for, >= 1; None: the format's own, 512, or 16 for Bailian's.
        estimates: Tokens of requests that an access log does not count.

    Raises:
        ConfigError: there is no such file, no such format, or a row cannot be read.
    """
    source = str(source)
    data = _read_bytes(source)
    lines = enumerate(_decode(source, data).splitlines(), start=1)
    rows = [(line, text) for line, text in lines if text.strip()]
    if not rows:
        raise ConfigError(f"--trace {source}: the file is empty; give a trace: {KNOWN}")
    log_format = log_format_of(rows[0][1])
    trace_format = TraceFormat.ACCESS_LOG if log_format is not None else _detect(source, rows[0][1])
    hash_tokens = block_tokens or HASH_TOKENS.get(trace_format, BLOCK_TOKENS)
    reader: RowReader
    log: AccessLogRows | None = None
    if log_format is not None:
        reader = log = AccessLogRows(log_format, estimates)
    elif trace_format in CSV_COLUMNS:
        reader = CsvRows(rows.pop(0)[1], CSV_COLUMNS[trace_format])
    else:
        reader = JsonRows(1.0 if trace_format is TraceFormat.BAILIAN else 1000.0, BlockIds(hash_tokens))
    found = _parse(rows, reader)
    if log is not None:
        log.refuse_missing(f"--trace {source}")
    if found.bad and (not found.requests or on_bad_row is OnBadRow.REFUSE):
        raise ConfigError(_refusal(source, found.bad, has_others=bool(found.requests)))
    if not found.requests:
        what = "a header and no row" if not found.failed else "only requests that failed"
        raise ConfigError(f"--trace {source}: the file has {what}")
    skipped = dict(sorted({**found.bad, **found.failed}.items()))
    digest = hashlib.sha256(data).hexdigest()
    requests, facts = tuple(found.requests), None
    if log is not None:
        zero_s = requests[0].arrival_s
        if found.bad:
            log.left_out["in lines that cannot be read"] += len(found.bad)
        facts = log.facts(zero_s)
        requests = tuple(replace(each, arrival_s=each.arrival_s - zero_s) for each in requests)
    return Trace(source, trace_format, digest, requests, skipped, hash_tokens, log=facts)


def load_access_log(source: str | Path, estimates: LogEstimates) -> Trace:
    """Read a gateway's access log; see `load_trace`.

    Raises:
        ConfigError: the file is not such a log, or has no token counts and no estimate is given for them.
    """
    try:
        found = load_trace(source, on_bad_row=OnBadRow.SKIP, estimates=estimates)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("--trace ", "--access-log ", 1)) from exc
    if found.log is None:
        raise ConfigError(f"--access-log {source}: is a trace, not one of {KNOWN_LOGS}; give it as --trace")
    return found


def _plain_cell(value: Any) -> Any:
    """Return a table's cell; an array as a list, and NaN, which tables have in empty cells, as None."""
    if isinstance(value, float) and math.isnan(value):
        return None
    return value.tolist() if hasattr(value, "tolist") else value


class _TableRow(BaseModel):
    arrival_s: float = Field(ge=0, allow_inf_nan=False)
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    block_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_plain_cell)] = None
    tier: Annotated[Tier | None, BeforeValidator(_plain_cell)] = None


def trace_of_rows(rows: Iterable[Mapping[str, Any]], *, name: str = "table") -> Trace:
    """Return the trace that rows of a table are, in order of arrival.

    Args:
        rows: Each with ``arrival_s`` (seconds, >= 0), ``input_tokens`` and ``output_tokens`` (>= 1), and optionally ``block_ids``
            (one id for each started 512 prompt tokens; missing or None: not known) and ``tier`` (a tier's name; missing or None:
            the request asks for no tier). Other keys are not read.
        name: For results.

    Raises:
        ConfigError: there is no row, or one cannot be read; the message names the row, from 0, and the column.
    """
    requests = []
    for number, row in enumerate(rows):
        try:
            read = _TableRow.model_validate(dict(row))
        except ValidationError as exc:
            raise ConfigError(
                f"trace: row {number}: {findings(exc, root='row', most=1, with_values=True)}; a row needs arrival_s,"
                " input_tokens and output_tokens"
            ) from exc
        ids, needed = read.block_ids, -(-read.input_tokens // BLOCK_TOKENS)
        if ids is not None and len(ids) != needed:
            raise ConfigError(
                f"trace: row {number}: block_ids: {len(ids)} ids for {read.input_tokens} tokens, must be {needed}"
            )
        requests.append(
            TraceRequest(read.arrival_s, read.input_tokens, read.output_tokens, ids, number + 1, read.tier)
        )
    if not requests:
        raise ConfigError("trace: the table has no row")
    requests.sort(key=lambda request: request.arrival_s)
    digest = hashlib.sha256(repr(requests).encode()).hexdigest()
    return Trace(name, TraceFormat.TABLE, digest, tuple(requests), {})


def _read_bytes(source: str) -> bytes:
    if source in BUILT_IN:
        return (resources.files("penstock.workload") / "data" / BUILT_IN[source]).read_bytes()
    try:
        return read_bytes(Path(source))
    except FileNotFoundError as exc:
        names = ", ".join(sorted(BUILT_IN))
        raise ConfigError(
            f"--trace {source}: no such file, and not a built-in trace (there is: {names})"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"--trace {source}: cannot be read: {exc.strerror or exc}") from exc


def _decode(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise ConfigError(
            f"--trace {source}:{line}: byte {exc.start} is not UTF-8; is this a trace, and uncompressed?"
        ) from exc


def _detect(source: str, first: str) -> TraceFormat:
    text = first.strip()
    header = header_of(text)
    for trace_format, columns in CSV_COLUMNS.items():
        if columns.are_in(header):
            return trace_format
    if '"conversations"' in text or '"messages"' in text or '"text_input"' in text:
        raise ConfigError(
            f"--trace {source}: holds texts, as ShareGPT does, and a replay needs times and lengths. Count its tokens into lines"
            f' of {{"timestamp": ms, "input_length": tokens, "output_length": tokens}}; or give a synthetic process with its'
            " mean lengths, as --trace poisson:rate=2,input_tokens=300,output_tokens=200"
        )
    if TEXT_LOG.match(text):
        raise ConfigError(
            f"--trace {source}: is an access log as text, without durations; log JSON lines with msec, request_time, status and"
            " request_uri instead (nginx: log_format with escape=json), best with token counts"
        )
    for trace_format, columns in CSV_COLUMNS.items():
        lacking = columns.missing_in(header)
        if len(lacking) == 1:
            raise ConfigError(
                f"--trace {source}: lacks the column {lacking[0]} of {trace_format.value}'s CSV; its header is {first[:60]!r}"
            )
    if _CLIENT_TABLE.match(text):
        raise ConfigError(
            f"--trace {source}: is a table of one of ServeGen's clients (start, rate, CV and distribution of gaps), not of requests;"
            " let ServeGen generate requests and write them by its save_requests_to_csv, and give that file"
        )
    if text.startswith("{") and '"request_id"' in text and '"timestamp"' not in text:
        raise ConfigError(
            f"--trace {source}: is a batch job of ServeGen's offline traces, whose requests have no times; give a trace of arrivals,"
            " or a synthetic process with its lengths, as --trace poisson:rate=2,input_tokens=300,output_tokens=200"
        )
    if text.startswith("{"):
        return TraceFormat.BAILIAN if '"chat_id"' in text else TraceFormat.MOONCAKE
    raise ConfigError(f"--trace {source}: is none of {KNOWN}; the first line is {first[:60]!r}")


def _parse(rows: list[tuple[int, str]], reader: RowReader) -> _Rows:
    found = _Rows()
    newest_s = 0.0
    for line, text in rows:
        try:
            request = reader.parse(text, line)
        except ValidationError as exc:
            found.bad[line] = findings(exc, root="row", most=1, with_values=True)
            continue
        except RowError as exc:
            found.bad[line] = str(exc)
            continue
        except FailedRowError as exc:
            found.failed[line] = str(exc)
            continue
        if not reader.is_unordered and request.arrival_s < newest_s:
            found.bad[line] = f"its time is {newest_s - request.arrival_s:.3f} s before an earlier row's"
            continue
        if not reader.is_unordered:
            newest_s = request.arrival_s
        found.requests.append(request)
    found.requests.sort(key=lambda request: request.arrival_s)
    return found


def _refusal(source: str, bad: Mapping[int, str], *, has_others: bool) -> str:
    shown = [f"{source}:{line}: {reason}" for line, reason in islice(bad.items(), _SHOWN_BAD_ROWS)]
    if len(bad) > len(shown):
        shown.append(f"... and {len(bad) - len(shown)} more")
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
    what = f"{rows} cannot be read; mend them, or pass --on-bad-row skip to leave them out"
    if not has_others:
        what = f"none of its {len(bad)} rows can be used"
    return "\n".join([f"--trace {source}: {what}", *shown])
