"""Reads request traces: Mooncake's JSONL and Azure's CSV become one list of `TraceRequest`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import resources
from itertools import islice
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
class Trace:
    """A trace as read, in the file's order; ``skipped`` says by 1-based line why a row was left out."""

    name: str
    format: TraceFormat
    sha256: str
    requests: tuple[TraceRequest, ...]
    skipped: Mapping[int, str]


class _RowError(ValueError):
    """A row breaks the format; the text says which field and why."""


def load_trace(source: str, *, on_bad_row: OnBadRow = OnBadRow.REFUSE) -> Trace:
    """Read a trace by built-in name or path."""
    data = _read_bytes(source)
    lines = enumerate(_decode(source, data).splitlines(), start=1)
    rows = [(line, text) for line, text in lines if text.strip()]
    if not rows:
        raise ConfigError(f"--trace {source}: the file is empty; give a Mooncake JSONL or an Azure CSV")
    trace_format = _detect(source, rows[0][1])
    is_azure = trace_format is TraceFormat.AZURE
    requests, bad = _parse(rows, _AzureRows(rows.pop(0)[1]).parse if is_azure else _parse_mooncake)
    if bad and (not requests or on_bad_row is OnBadRow.REFUSE):
        raise ConfigError(_refusal(source, bad, has_others=bool(requests)))
    if not requests:
        raise ConfigError(f"--trace {source}: the file has a header and no row")
    return Trace(source, trace_format, hashlib.sha256(data).hexdigest(), tuple(requests), bad)


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


def _parse(
    rows: list[tuple[int, str]], parse: Callable[[str, int], TraceRequest]
) -> tuple[list[TraceRequest], dict[int, str]]:
    requests: list[TraceRequest] = []
    bad: dict[int, str] = {}
    newest_s = 0.0
    for line, text in rows:
        try:
            request = parse(text, line)
        except ValidationError as exc:
            bad[line] = findings(exc, root="row", most=1, with_values=True)
            continue
        except _RowError as exc:
            bad[line] = str(exc)
            continue
        if request.arrival_s < newest_s:
            bad[line] = f"its time is {newest_s - request.arrival_s:.3f} s before an earlier row's"
            continue
        newest_s = request.arrival_s
        requests.append(request)
    return requests, bad


class _MooncakeRow(BaseModel):
    """``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, ...]}``."""

    model_config = ConfigDict(strict=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...]


def _parse_mooncake(text: str, line: int) -> TraceRequest:
    row = _MooncakeRow.model_validate_json(text)
    ids, needed = row.hash_ids, -(-row.input_length // BLOCK_TOKENS)
    if len(ids) != needed:
        raise _RowError(
            f"hash_ids: {len(ids)} ids for {row.input_length} tokens, must be {needed} of {BLOCK_TOKENS} tokens"
        )
    return TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, ids, line)


class _AzureRow(BaseModel):
    at: datetime = Field(alias="TIMESTAMP")
    input_tokens: int = Field(alias="ContextTokens", ge=1)
    output_tokens: int = Field(alias="GeneratedTokens", ge=1)


class _AzureRows:
    """``TIMESTAMP,ContextTokens,GeneratedTokens`` a line; time counts from the first usable row."""

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


def _refusal(source: str, bad: Mapping[int, str], *, has_others: bool) -> str:
    shown = [f"{source}:{line}: {reason}" for line, reason in islice(bad.items(), _SHOWN_BAD_ROWS)]
    if len(bad) > len(shown):
        shown.append(f"... and {len(bad) - len(shown)} more")
    rows = "1 row" if len(bad) == 1 else f"{len(bad)} rows"
    what = f"{rows} cannot be read; mend them, or pass --on-bad-row skip to leave them out"
    if not has_others:
        what = f"none of its {len(bad)} rows can be used"
    return "\n".join([f"--trace {source}: {what}", *shown])
