"""Files of a load run: ``results.jsonl``, a line per request, and ``summary.json``.

Written by the command line during and after a replay, read by the report. The schema is in docs/load.md.
"""

from __future__ import annotations

import os
import types
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import orjson
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from penstock.core.errors import FULL, ConfigError, PenstockError, unwritable
from penstock.core.files import read_bytes
from penstock.core.printable import printable
from penstock.core.validation import findings
from penstock.workload.record import RequestResult


def _model(name: str, shape: Mapping[str, Any], **optional: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {
        key: (_model(key, kind) if isinstance(kind, Mapping) else kind, ...) for key, kind in shape.items()
    }
    fields |= {key: (kind | None, None) for key, kind in optional.items()}
    return create_model(name, __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)


_OUTCOMES: Final = {"ok": int, "failed": int, "rejected": int}
_FIGURES: Final = {"count": int, **dict.fromkeys(("mean", "p50", "p90", "p99", "max"), float | None)}
_TIMES: Final = {"ttft_s": _FIGURES, "tpot_s": _FIGURES, "e2e_s": _FIGURES}
_SHAPE: Final[Mapping[str, Any]] = {
    "is_partial": bool,
    "started": {"unix_s": float, "model_s": float},
    "requests": {**_OUTCOMES, "planned": int, "unfinished": int, "not_sent": int},
    "errors": dict[str, int],
    "latency": {"percentile_method": str, "itl_s": _FIGURES, **_TIMES},
    "tokens": {"prompt": int, "output": int, "prefix_cache_hit_rate": float | None},
    "throughput": {
        "duration_s": float,
        **dict.fromkeys(("requests_per_s", "output_tokens_per_s"), float | None),
    },
    "usage_mismatches": {
        **dict.fromkeys(("prompt_tokens", "checked_prompt", "output_tokens", "checked_output"), int),
        "without_usage": int,
        "examples": list[str],
    },
    "lag": {
        "servers": types.GenericAlias(list, (_model("server", {"name": str, "p99_s": float | None}),)),
        **dict.fromkeys(("send_p99_s", "loop_p99_s"), float | None),
        **dict.fromkeys(("bound_s", "itl_bound_s", "resolution_s"), float),
        **dict.fromkeys(("bound_rule", "itl_bound_rule"), str),
        **dict.fromkeys(("late", "late_for_itl"), list[str]),
        **dict.fromkeys(("is_distorted", "is_itl_distorted", "is_itl_unresolved"), bool),
    },
    "settings": {
        "model": str | None,
        "speed": float,
        **dict.fromkeys(("concurrency", "max_input_tokens"), int | None),
    },
    "trace": _model(
        "trace",
        {
            "name": str,
            "skipped_rows": list[str],
            **dict.fromkeys(("truncated_prompts", "dropped_prompts"), int),
        },
        title=str,
    ),
}
"""The parts of ``summary.json`` that its readers rely on. Keys alongside these are kept and shown as they are."""


_SUMMARY: Final = _model(
    "summary",
    _SHAPE,
    tiers=types.GenericAlias(dict, (str, _model("tier", {"requests": _OUTCOMES, **_TIMES}))),
    broken_streams=_model("broken_streams", {"continued": int, "lost": int}),
    overload=_model("overload", {"factor": float, "capacity": {"rps": float, "concurrency": int}}),
)


def check_summary(summary: dict[str, Any], place: str) -> None:
    """Refuse a summary whose parts are not of the types that `penstock load` writes."""
    try:
        _SUMMARY.model_validate(summary)
    except ValidationError as exc:
        raise ConfigError(
            f"{place}: {findings(exc, root='summary', most=1)}; it was not written by `penstock load`"
        ) from exc


RESULTS_FILE: Final = "results.jsonl"
SUMMARY_FILE: Final = "summary.json"
SCHEMA: Final = "penstock-load/1"
_RESULT: Final = TypeAdapter(RequestResult)

_DECIMALS = 6
"""Microseconds: finer than any clock here is read."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """A run read back."""

    summary: dict[str, Any]
    results: tuple[RequestResult, ...]


class ResultWriter:
    """Keeps each result and, with a folder, appends it as it comes, so that a killed run leaves its measurements."""

    def __init__(self, directory: Path | None, *, with_gaps: bool = True) -> None:
        self.results: list[RequestResult] = []
        self._directory = directory
        self._with_gaps = with_gaps
        self._file: BinaryIO | None = None
        if directory is None:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / SUMMARY_FILE).unlink(missing_ok=True)
            self._file = (directory / RESULTS_FILE).open("wb")
        except OSError as exc:
            raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc

    def write(self, result: RequestResult) -> None:
        """Keep a result, and append its line."""
        self.results.append(result)
        if self._file is not None:
            with self._naming_the_folder():
                self._file.write(orjson.dumps(to_line(result, with_gaps=self._with_gaps)) + b"\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json in one step, after the results are on disk."""
        if self._file is None or self._directory is None:
            return
        target = self._directory / SUMMARY_FILE
        partial = target.with_suffix(".tmp")
        with self._naming_the_folder():
            self._file.flush()
            partial.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
            os.replace(partial, target)  # noqa: PTH105 - the atomic rename is the point

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the file; a failing flush is raised only when nothing else failed before."""
        if self._file is not None:
            with suppress(OSError) if kind else self._naming_the_folder():
                self._file.close()

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            leave_out = ", or leave out the inter-token gaps with --no-itl" if exc.errno in FULL else ""
            raise PenstockError(unwritable(f"--output-dir {self._directory}", exc) + leave_out) from exc


def to_line(result: RequestResult, *, with_gaps: bool) -> dict[str, Any]:
    """Return the JSON object of one result."""
    line: dict[str, Any] = {field.name: _plain(getattr(result, field.name)) for field in fields(result)}
    if result.tier is None:
        del line["tier"]
    if not with_gaps:
        del line["itl_s"]
    return line


def _plain(value: object) -> object:
    if isinstance(value, array):
        return [round(each, _DECIMALS) for each in value]
    return round(value, _DECIMALS) if isinstance(value, float) else value


def from_line(line: dict[str, Any]) -> RequestResult:
    """Return the result that `to_line` wrote."""
    try:
        return _RESULT.validate_python(line)
    except ValidationError as exc:
        raise ValueError(findings(exc, root="line", most=1)) from exc


def read_run(directory: Path) -> LoadRun:
    """Read a run's two files."""
    summary_bytes = _read(directory / SUMMARY_FILE)
    try:
        summary = orjson.loads(summary_bytes)
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"{directory / SUMMARY_FILE}: not JSON: {exc}") from exc
    schema = summary.get("schema") if isinstance(summary, dict) else None
    if schema != SCHEMA:
        raise ConfigError(f"{directory / SUMMARY_FILE}: schema {schema!r} is not {SCHEMA!r}")
    check_summary(summary, str(directory / SUMMARY_FILE))
    path = directory / RESULTS_FILE
    results = []
    for number, text in enumerate(_read(path).splitlines(), start=1):
        try:
            results.append(from_line(orjson.loads(text)))
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{path}:{number}: not a result of `penstock load`: {exc}") from exc
    results.sort(key=lambda result: (result.arrival_s, result.line))
    return LoadRun(printable(summary), tuple(results))


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as exc:
        raise ConfigError(
            f"{path}: cannot be read ({exc.strerror}); --run wants the --output-dir of a finished `penstock load`"
        ) from exc
