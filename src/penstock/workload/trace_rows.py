"""Reads one row of a trace, by format: `RowReader` and what it makes of JSON lines and of CSV columns. Pure.

Within the product a prompt is a list of ids of 512 tokens each; ids of any other size become such ids, so that prompts share
what they shared by whole 512 tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.api import Tier

BLOCK_TOKENS: Final = 512
"""Tokens that one hash id of a Mooncake trace stands for; stated by the trace's authors."""

_SESSION_IDS: Final = 1 << 61
"""Ids of conversations begin here, far above a trace's own and below those of requests that share nothing."""
_SESSION_BLOCKS: Final = 1 << 20


class TraceFormat(StrEnum):
    """Layouts that are distinguished by their first line, and what no file has."""

    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    SPLITWISE = "splitwise"
    SERVEGEN = "servegen"
    ACCESS_LOG = "access log"
    TABLE = "table"
    SYNTHETIC = "synthetic"


HASH_TOKENS: Final[Mapping[TraceFormat, int]] = {TraceFormat.MOONCAKE: BLOCK_TOKENS, TraceFormat.BAILIAN: 16}
"""Tokens that one hash id stands for, where no flag says otherwise.

Source: the traces' own descriptions, Mooncake's FAST25-release and alibaba-edu/qwen-bailian-usagetraces-anon.
"""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: Seconds from the trace's zero, >= 0.
        block_ids: One id per 512 prompt tokens, the last may be partial; None when the trace has none.
        line: 1-based line in the file; names the request for good, whatever is selected.
        tier: Priority tier that the request asks for; None if it asks for none.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] | None
    line: int
    tier: Tier | None = None


class RowError(ValueError):
    """A row breaks the format; the text says which field and why."""


class FailedRowError(ValueError):
    """A row of a request that was never answered, which is not work to replay."""


class RowReader(Protocol):
    """Reads the rows of one file in their order.

    Attributes:
        is_unordered: The last row's time may be before an earlier row's: it follows from its session's, or rows are by end.
    """

    is_unordered: bool

    def parse(self, text: str, line: int) -> TraceRequest:
        """Return the request of a row.

        Raises:
            RowError: it breaks the format.
            FailedRowError: its request failed.
            ValidationError: a line of JSON breaks it.
        """
        ...


@dataclass(slots=True)
class BlockIds:
    """Turns ids of ``tokens`` tokens each into ids of 512; ids of one file share it, so that equal blocks stay equal."""

    tokens: int
    _index: dict[tuple[int, ...], int] = field(default_factory=dict)

    def of(self, ids: Sequence[int], input_tokens: int) -> tuple[int, ...]:
        """Return one id per begun 512 tokens: the same where all ids that a block is in are the same.

        Raises:
            RowError: there are more or fewer ids than the prompt has blocks.
        """
        needed = -(-input_tokens // self.tokens)
        if len(ids) != needed:
            raise RowError(
                f"hash_ids: {len(ids)} ids for {input_tokens} tokens, must be {needed} of {self.tokens} tokens;"
                " if one id stands for another number of tokens, give --block-tokens"
            )
        if self.tokens == BLOCK_TOKENS:
            return tuple(ids)
        return tuple(self._block(ids, start) for start in range(0, input_tokens, BLOCK_TOKENS))

    def _block(self, ids: Sequence[int], start: int) -> int:
        offset = start % self.tokens
        covered = ids[start // self.tokens : -(-(start + BLOCK_TOKENS) // self.tokens)]
        return self._index.setdefault((offset, *covered), len(self._index))


class _JsonRow(BaseModel):
    model_config = ConfigDict(strict=True)

    timestamp: float | None = Field(None, ge=0, allow_inf_nan=False)
    delay: float = Field(0, ge=0, allow_inf_nan=False)
    session_id: str | int | None = None
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    tier: Tier | None = None


@dataclass(slots=True)
class _Session:
    """A conversation so far."""

    first_id: int
    arrival_s: float
    tokens: int = 0


@dataclass(slots=True)
class JsonRows:
    """``{"timestamp": t, "input_length": n, "output_length": n, "hash_ids": [id, ...]}`` a line.

    A row of a ``session_id`` without ids is a turn: its length comes on top of the turns before it and their answers, whose
    text it shares. Without a time it arrives ``delay`` after the turn before it did, the earliest that it can.

    A row may name the priority tier that its request asks for: ``"tier": "background"``.

    Source: Mooncake's FAST25-release; AIPerf's and Dynamo's mooncake_trace. ``tier`` is Penstock's addition.
    """

    units_per_s: float
    blocks: BlockIds
    is_unordered: bool = False
    _sessions: dict[str | int, _Session] = field(default_factory=dict)

    def parse(self, text: str, line: int) -> TraceRequest:
        """Return the request of a row; see `RowReader`."""
        row = _JsonRow.model_validate_json(text)
        self.is_unordered = row.timestamp is None
        session = None if row.session_id is None else self._sessions.get(row.session_id)
        if row.timestamp is not None:
            arrival_s = row.timestamp / self.units_per_s
        elif session is not None:
            arrival_s = session.arrival_s + row.delay / self.units_per_s
        else:
            raise RowError(
                "timestamp: missing, and no earlier turn of its session has one; a replay needs times of arrival"
            )
        tokens, ids = row.input_length, None
        if row.hash_ids is not None:
            ids = self.blocks.of(row.hash_ids, tokens)
        if row.session_id is not None:
            if session is None:
                session = _Session(_SESSION_IDS + len(self._sessions) * _SESSION_BLOCKS, arrival_s)
                self._sessions[row.session_id] = session
            if ids is None:
                tokens += session.tokens
                ids = tuple(range(session.first_id, session.first_id + -(-tokens // BLOCK_TOKENS)))
            session.arrival_s, session.tokens = arrival_s, tokens + row.output_length
        return TraceRequest(arrival_s, tokens, row.output_length, ids, line, row.tier)


_Value = TypeVar("_Value")
_DATE = TypeAdapter(datetime)
_SECONDS = TypeAdapter(Annotated[float, Field(ge=0, allow_inf_nan=False)])
_SOME = TypeAdapter(Annotated[int, Field(ge=1)])
_ANY = TypeAdapter(Annotated[int, Field(ge=0)])


def _value(kind: TypeAdapter[_Value], name: str, text: str) -> _Value:
    try:
        return kind.validate_python(text.strip())
    except ValidationError as exc:
        raise RowError(f"{name}: {text!r}: {exc.errors(include_url=False)[0]['msg']}") from exc


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a CSV keeps what a replay needs.

    Attributes:
        has_dates: Times are dates, and count from the first row; else seconds from the trace's zero.
        has_failures: An answer of no token is a request that failed.
    """

    at: str
    input_tokens: str
    output_tokens: str
    has_dates: bool = False
    has_failures: bool = False

    def are_in(self, header: Sequence[str]) -> bool:
        """Return whether a header has them, in any case and order."""
        return not self.missing_in(header)

    def missing_in(self, header: Sequence[str]) -> list[str]:
        """Return the columns that a header lacks."""
        names = (self.at, self.input_tokens, self.output_tokens)
        return [name for name in names if name.lower() not in header]


CSV_COLUMNS: Final[Mapping[TraceFormat, Columns]] = {
    TraceFormat.AZURE: Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", has_dates=True),
    TraceFormat.BURSTGPT: Columns("Timestamp", "Request tokens", "Response tokens", has_failures=True),
    TraceFormat.SPLITWISE: Columns("arrival_timestamp", "prompt_size", "token_size"),
    TraceFormat.SERVEGEN: Columns("timestamp", "input_tokens", "output_tokens"),
}
"""Source: AzurePublicDataset's traces of 2023 and 2024; HPMLL/BurstGPT, both of its headers; splitwise-sim's traces; what
alibaba/ServeGen's `save_requests_to_csv` writes."""


def header_of(text: str) -> list[str]:
    """Return the names of a header, in lower case."""
    return [name.strip().lower() for name in text.split(",")]


class CsvRows:
    """Rows of a CSV with known columns; others are not read."""

    def __init__(self, header: str, columns: Columns) -> None:
        self._header = header_of(header)
        self._columns = columns
        self._zero: datetime | None = None
        self.is_unordered = False

    def parse(self, text: str, line: int) -> TraceRequest:
        """Return the request of a row; see `RowReader`."""
        cells = next(csv.reader([text]), [])
        if len(cells) != len(self._header):
            raise RowError(f"{len(cells)} columns, the header has {len(self._header)}")
        columns, cell = self._columns, dict(zip(self._header, cells, strict=True))
        arrival_s = self._arrival_s(cell[columns.at.lower()])
        prompt = _value(_SOME, columns.input_tokens, cell[columns.input_tokens.lower()])
        answer_kind = _ANY if columns.has_failures else _SOME
        answer = _value(answer_kind, columns.output_tokens, cell[columns.output_tokens.lower()])
        if answer == 0:
            raise FailedRowError(f"{columns.output_tokens}: 0: a request that failed")
        return TraceRequest(arrival_s, prompt, answer, None, line)

    def _arrival_s(self, text: str) -> float:
        if not self._columns.has_dates:
            return _value(_SECONDS, self._columns.at, text)
        at = _value(_DATE, self._columns.at, text)
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        self._zero = self._zero or at
        return (at - self._zero).total_seconds()
