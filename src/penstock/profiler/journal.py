"""Keeps every finished point on disk, with the conditions that it was measured under, so that a profile can continue later.

One JSON object a line: an engine with its conditions, or a point. A line that a killed process left unfinished is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from penstock.api import Role
from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint

JOURNAL: Final = "measurements.jsonl"


class Conditions(msgspec.Struct, frozen=True, tag_field="kind", tag="conditions"):
    """What the points of an engine size depend on."""

    gpus: int
    name: str
    conditions: dict[str, str]


class Cache(msgspec.Struct, frozen=True, tag_field="kind", tag="engine"):
    """KV cache of the engine that a phase was measured on, tokens."""

    gpus: int
    phase: Role
    kv_tokens: float


class Prefill(msgspec.Struct, frozen=True, tag_field="kind", tag="prefill"):
    """TTFT for a requested prompt length, and the length that came out."""

    gpus: int
    asked: int
    prompt_tokens: float
    ttft_s: float


class Decode(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="decode"):
    """A batch; without figures where the engine does not run it at once."""

    gpus: int
    context: int
    concurrency: int
    itl_s: float | None = None
    tokens_per_s: float | None = None


Record = Conditions | Cache | Prefill | Decode


@dataclass(slots=True)
class EnginePoints:
    """What is known of one engine size.

    Attributes:
        prefill: By requested prompt length.
        decode: By context and requests in flight; None: does not run at once.
    """

    name: str = ""
    conditions: dict[str, str] | None = None
    kv_tokens: dict[Role, float] = field(default_factory=dict)
    prefill: dict[int, PrefillPoint] = field(default_factory=dict)
    decode: dict[tuple[int, int], DecodePoint | None] = field(default_factory=dict)

    def row(self, context: int) -> list[DecodePoint]:
        """Return the points of one context, by requests in flight."""
        return [each for each in self.sorted_decode() if each.context == context]

    def sorted_decode(self) -> list[DecodePoint]:
        """Return every batch that runs, by context and requests in flight."""
        return [point for _, point in sorted(self.decode.items(), key=lambda each: each[0]) if point]

    def sweep(self, gpus: int) -> EngineSweep:
        """Return all points of an engine that was measured."""
        prefill = {point.prompt_tokens: point for point in self.prefill.values()}
        ordered = tuple(prefill[tokens] for tokens in sorted(prefill))
        return EngineSweep(gpus, self.kv_tokens[Role.DECODE], ordered, tuple(self.sorted_decode()), self.name)


class Journal:
    """The points of one output directory, by engine size."""

    def __init__(self, directory: Path) -> None:
        """Read what is there, and drop a line that was not finished.

        Raises:
            ConfigError: the directory cannot be written to, or its journal cannot be read.
        """
        self.path = directory / JOURNAL
        self.engines: dict[int, EnginePoints] = {}
        decoder = msgspec.json.Decoder(Record)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
            complete, _, torn = data.rpartition(b"\n")
            for number, line in enumerate(complete.splitlines(), start=1):
                try:
                    self._take(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise ConfigError(
                        f"{self.path}:{number}: not a line of a profile ({exc}); give another --output-dir, or delete"
                        " that file"
                    ) from exc
            with self.path.open("ab") as stream:
                stream.truncate(len(data) - len(torn))
        except OSError as exc:
            raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc

    def begin(self, gpus: int, name: str, conditions: Mapping[str, str]) -> None:
        """Say what is measured; points of the same engine under the same conditions are kept.

        Raises:
            ConfigError: the engine was measured before under other conditions.
        """
        found = self.engines.get(gpus)
        known, wanted = found.conditions if found is not None else None, dict(conditions)
        if known is None:
            self.keep(Conditions(gpus, name, wanted))
        elif known != wanted:
            key = next(key for key in {**known, **wanted} if known.get(key) != wanted.get(key))
            raise ConfigError(
                f"--output-dir: {self.path} holds points of TP{gpus} measured under other conditions: {key} was"
                f" {known.get(key)!r}, now {wanted.get(key)!r}; give another --output-dir, or delete that file"
            )
        self.engines[gpus].name = name

    def keep(self, record: Record) -> None:
        """Record what was measured, synced.

        Raises:
            PenstockError: the disk is full or gone.
        """
        try:
            with self.path.open("ab") as stream:
                stream.write(msgspec.json.encode(record) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as exc:
            raise PenstockError(unwritable(str(self.path), exc)) from exc
        self._take(record)

    def _take(self, record: Record) -> None:
        engine = self.engines.setdefault(record.gpus, EnginePoints())
        if isinstance(record, Conditions):
            engine.conditions = record.conditions
        elif isinstance(record, Cache):
            engine.kv_tokens[record.phase] = record.kv_tokens
        elif isinstance(record, Prefill):
            engine.prefill[record.asked] = PrefillPoint(record.prompt_tokens, record.ttft_s)
        else:
            point = None
            if record.itl_s is not None and record.tokens_per_s is not None:
                place = float(record.context), float(record.concurrency)
                point = DecodePoint(*place, record.itl_s, record.tokens_per_s)
            engine.decode[record.context, record.concurrency] = point
