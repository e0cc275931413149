"""Reads request traces: Mooncake's JSONL and Azure's CSV become one list of `TraceRequest`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.core.validation import findings

BLOCK_TOKENS: Final = 512
"""Tokens that one hash id of a Mooncake trace stands for; stated by the trace's authors."""

BUILT_IN: Final = {"mooncake": "mooncake_conversation_slice.jsonl"}
"""Names of packaged traces; see data/README.md for their sources."""

_SHOWN_BAD_ROWS = 5
"""Chosen: enough to see a pattern, few enough to read."""


class TraceFormat(StrEnum):
    """Layouts that are distinguished by their first line, and what no file has."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    SYNTHETIC = "synthetic"


class OnBadRow(StrEnum):
    """What to do with a row that cannot be read."""

    REFUSE = "refuse"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        block_ids: One id per 512 prompt tokens, the last may be partial; None when the trace has none.
        line: 1-based line in the file; names the request for good, whatever is selected.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] | None
    line: int
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row left out: its 1-based line and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read, in the file's order."""

    name: str
    format: TraceFormat
    sha256: str
    requests: tuple[TraceRequest, ...]
    skipped: tuple[BadRow, ...]


class _RowError(ValueError):
    """A row breaks the format; the text says which field and why."""


def load_trace(source: str, *, on_bad_row: OnBadRow = OnBadRow.REFUSE) -> Trace:
    """Read a trace by built-in name or path."""
    data = _read_bytes(source)
    lines = _decode(source, data).splitlines()
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        raise ConfigError(f"--trace {source}: the file is empty; give a Mooncake JSONL or an Azure CSV")
    trace_format = _detect(source, first)
    parser = _MooncakeRows() if trace_format is TraceFormat.MOONCAKE else _AzureRows(first)
    requests, bad = _parse(lines, parser)
    if bad and on_bad_row is OnBadRow.REFUSE:
        raise ConfigError(_refusal(source, bad))
    if not requests:
        raise ConfigError(
            f"--trace {source}: none of its {len(bad)} rows can be used\n{_listing(source, bad)}"
        )
    return Trace(source, trace_format, hashlib.sha256(data).hexdigest(), tuple(requests), tuple(bad))


def _read_bytes(source: str) -> bytes:
    if source in BUILT_IN:
        return (resources.files("penstock.workload") / "data" / BUILT_IN[source]).read_bytes()
    try:
        return Path(source).read_bytes()
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
    if first.lstrip().startswith("{"):
        return TraceFormat.MOONCAKE
    if first.strip().upper().startswith("TIMESTAMP,"):
        return TraceFormat.AZURE
    raise ConfigError(
        f"--trace {source}: neither Mooncake JSONL (a line starts with {{) nor Azure CSV"
        f" (header TIMESTAMP,ContextTokens,GeneratedTokens); the first line is {first[:60]!r}"
    )


def _parse(lines: list[str], parser: _MooncakeRows | _AzureRows) -> tuple[list[TraceRequest], list[BadRow]]:
    requests: list[TraceRequest] = []
    bad: list[BadRow] = []
    newest_s = 0.0
    for number, text in _rows(lines, skip_header=parser.has_header):
        try:
            request = _in_order(parser.parse(text, number), newest_s)
        except ValidationError as exc:
            bad.append(BadRow(number, findings(exc, root="row", most=1, with_values=True)))
            continue
        except _RowError as exc:
            bad.append(BadRow(number, str(exc)))
            continue
        newest_s = request.arrival_s
        requests.append(request)
    return requests, bad


def _in_order(request: TraceRequest, newest_s: float) -> TraceRequest:
    if request.arrival_s < newest_s:
        raise _RowError(f"its time is {newest_s - request.arrival_s:.3f} s before an earlier row's")
    return request


def _rows(lines: list[str], *, skip_header: bool) -> Iterator[tuple[int, str]]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        if skip_header:
            skip_header = False
            continue
        yield number, text


class _MooncakeRow(BaseModel):
    model_config = ConfigDict(strict=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...]


class _MooncakeRows:
    """``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}`` a line."""

    has_header = False

    def parse(self, text: str, line: int) -> TraceRequest:
        row = _MooncakeRow.model_validate_json(text)
        needed = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != needed:
            raise _RowError(
                f"hash_ids: {len(row.hash_ids)} ids for {row.input_length} tokens, must be {needed} of {BLOCK_TOKENS} tokens"
            )
        return TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids, line)


class _AzureRow(BaseModel):
    at: datetime = Field(alias="TIMESTAMP")
    input_tokens: int = Field(alias="ContextTokens", ge=1)
    output_tokens: int = Field(alias="GeneratedTokens", ge=1)


class _AzureRows:
    """``TIMESTAMP,ContextTokens,GeneratedTokens`` a line; time counts from the first usable row."""

    has_header = True

    def __init__(self, header: str) -> None:
        known = {name.lower(): name for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")}
        self._columns = [known.get(name.strip().lower(), name) for name in header.split(",")]
        self._zero: datetime | None = None

    def parse(self, text: str, line: int) -> TraceRequest:
        cells = text.split(",")
        if len(cells) != len(self._columns):
            raise _RowError(f"{len(cells)} columns, the header has {len(self._columns)}")
        row = _AzureRow.model_validate(
            dict(zip(self._columns, (cell.strip() for cell in cells), strict=True))
        )
        at = row.at.replace(tzinfo=UTC) if row.at.tzinfo is None else row.at
        self._zero = self._zero or at
        arrival_s = (at - self._zero).total_seconds()
        return TraceRequest(arrival_s, row.input_tokens, row.output_tokens, None, line)


def _listing(source: str, bad: list[BadRow]) -> str:
    shown = [f"{source}:{row.line}: {row.reason}" for row in bad[:_SHOWN_BAD_ROWS]]
    if len(bad) > len(shown):
        shown.append(f"... and {len(bad) - len(shown)} more")
    return "\n".join(shown)


def _refusal(source: str, bad: list[BadRow]) -> str:
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
    return (
        f"--trace {source}: {rows} cannot be read; mend them, or pass --on-bad-row skip to leave them out"
        f"\n{_listing(source, bad)}"
    )
