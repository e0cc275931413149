"""Keeps every finished point on disk, with the conditions that it was measured under, so that a profile can go on later.

One JSON object a line: an engine with its conditions, or a point. A line that a killed process left unfinished is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint
from penstock.profiler.points import Phase

JOURNAL: Final = "measurements.jsonl"


class Journal:
    """The points of one output directory, by engine size; `close` it."""

    def __init__(self, directory: Path) -> None:
        """Read what is there, and open the file for more.

        Raises:
            ConfigError: the directory cannot be written to, or its journal cannot be read.
        """
        self.path = directory / JOURNAL
        self._conditions: dict[int, dict[str, str]] = {}
        self._kv_tokens: dict[tuple[int, Phase], float] = {}
        self._names: dict[int, str] = {}
        self._prefill: dict[tuple[int, int], PrefillPoint] = {}
        self._decode: dict[tuple[int, int, int], DecodePoint | None] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            complete, _, torn = text.rpartition("\n")
            for number, line in enumerate(complete.splitlines(), start=1):
                self._parse(line, number)
            self._stream = self.path.open("a", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"--output-dir {directory}: {exc}; give another folder") from exc
        if torn:
            self._stream.truncate(len(text.encode()) - len(torn.encode()))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def begin(self, gpus: int, name: str, conditions: Mapping[str, str]) -> None:
        """Say what is measured; points of the same engine under the same conditions are kept.

        Raises:
            ConfigError: the engine was measured before under other conditions.
        """
        known = self._conditions.get(gpus)
        wanted = dict(conditions)
        if known is not None and known != wanted:
            key = next(key for key in {**known, **wanted} if known.get(key) != wanted.get(key))
            raise ConfigError(
                f"--output-dir: {self.path} holds points of TP{gpus} measured under other conditions: {key} was"
                f" {known.get(key)!r}, now {wanted.get(key)!r}; give another --output-dir, or delete that file"
            )
        if known is None:
            self._keep({"kind": "conditions", "gpus": gpus, "name": name, "conditions": wanted})
        self._names[gpus] = name

    def kv_tokens(self, gpus: int, phase: Phase) -> float | None:
        """Return the KV cache of an engine that was started before."""
        return self._kv_tokens.get((gpus, phase))

    def set_kv_tokens(self, gpus: int, phase: Phase, kv_tokens: float) -> None:
        """Record the KV cache of the engine that a phase is measured on."""
        if self._kv_tokens.get((gpus, phase)) != kv_tokens:
            self._keep({"kind": "engine", "gpus": gpus, "phase": phase.value, "kv_tokens": kv_tokens})

    def prefill(self, gpus: int, asked: int) -> PrefillPoint | None:
        """Return a finished point."""
        return self._prefill.get((gpus, asked))

    def set_prefill(self, gpus: int, asked: int, point: PrefillPoint) -> None:
        """Record a point, for the requested prompt length."""
        self._keep({"kind": "prefill", "gpus": gpus, "asked": asked, **asdict(point)})

    def has_decode(self, gpus: int, context: int, count: int) -> bool:
        """Return whether a batch was tried."""
        return (gpus, context, count) in self._decode

    def set_decode(self, gpus: int, context: int, count: int, point: DecodePoint | None) -> None:
        """Record a batch, or that it does not run at once."""
        plain = {} if point is None else {"itl_s": point.itl_s, "tokens_per_s": point.tokens_per_s}
        self._keep({"kind": "decode", "gpus": gpus, "context": context, "concurrency": count, **plain})

    def row(self, gpus: int, context: int) -> list[DecodePoint]:
        """Return the points of one context, by requests in flight."""
        found = [
            point
            for (size, each, _), point in self._decode.items()
            if (size, each) == (gpus, context) and point is not None
        ]
        return sorted(found, key=lambda point: point.concurrency)

    def engine_sweep(self, gpus: int) -> EngineSweep:
        """Return all points of an engine that was measured."""
        prefill = {point.prompt_tokens: point for (size, _), point in self._prefill.items() if size == gpus}
        decode = [point for (size, _, _), point in self._decode.items() if size == gpus and point is not None]
        return EngineSweep(
            gpus,
            self._kv_tokens[gpus, Phase.DECODE],
            tuple(prefill[tokens] for tokens in sorted(prefill)),
            tuple(sorted(decode, key=lambda point: (point.context, point.concurrency))),
            self._names[gpus],
        )

    def _keep(self, record: Mapping[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(record) + "\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as exc:
            raise PenstockError(unwritable(str(self.path), exc)) from exc
        self._take(record)

    def _parse(self, line: str, number: int) -> None:
        try:
            self._take(json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(
                f"{self.path}:{number}: not a line of a profile ({exc}); give another --output-dir, or delete that file"
            ) from exc

    def _take(self, record: Mapping[str, Any]) -> None:
        gpus = int(record["gpus"])
        if record["kind"] == "conditions":
            self._conditions[gpus] = {str(key): str(value) for key, value in record["conditions"].items()}
        elif record["kind"] == "engine":
            self._kv_tokens[gpus, Phase(record["phase"])] = float(record["kv_tokens"])
        elif record["kind"] == "prefill":
            point = PrefillPoint(float(record["prompt_tokens"]), float(record["ttft_s"]))
            self._prefill[gpus, int(record["asked"])] = point
        else:
            place = (float(record["context"]), float(record["concurrency"]))
            values = (float(record["itl_s"]), float(record["tokens_per_s"])) if "itl_s" in record else None
            key = (gpus, int(record["context"]), int(record["concurrency"]))
            self._decode[key] = None if values is None else DecodePoint(*place, *values)
