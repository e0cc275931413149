"""Finds and reads profile files; validated at this edge, then turned into the core's latency models."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from penstock.core.errors import ConfigError
from penstock.core.files import read_bytes
from penstock.core.safe_yaml import read_yaml
from penstock.core.validation import findings
from penstock.engine.core import latency

_MS = 1e-3

Fraction = Annotated[float, Field(ge=0)]
"""A relative error: 0.05 is 5%."""
Milliseconds = Annotated[float, Field(ge=0)]
Point = tuple[PositiveFloat, PositiveFloat]
"""(tokens or requests, milliseconds)."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryBudget(_Model):
    """What a KV capacity is derived from where it was not measured."""

    gpu_memory_bytes: PositiveInt
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    weight_bytes: PositiveInt
    reserve_bytes_per_gpu: Annotated[int, Field(ge=0)]


class KvCache(_Model):
    """Size of the KV cache; exactly one of ``measured_tokens`` and ``derived``."""

    bytes_per_token: PositiveInt
    measured_tokens: PositiveInt | None = None
    derived: MemoryBudget | None = None
    source: str

    @model_validator(mode="after")
    def _one_origin(self) -> KvCache:
        if (self.measured_tokens is None) == (self.derived is None):
            raise ValueError("give exactly one of measured_tokens and derived")
        return self


class _Sourced(_Model):
    source: str
    mean_error: Fraction | None = None
    max_error: Fraction | None = None


class QuadraticFit(_Model):
    """TTFT = overhead + added overhead + per_token · n + per_token2 · n², in ms."""

    overhead_ms: Milliseconds
    per_token_ms: PositiveFloat
    per_token2_ms: Milliseconds
    added_overhead_ms: Milliseconds = 0.0

    def model(self) -> latency.QuadraticPrefill:
        """Return the core's model, in seconds."""
        overhead_ms = self.overhead_ms + self.added_overhead_ms
        return latency.QuadraticPrefill(overhead_ms * _MS, self.per_token_ms * _MS, self.per_token2_ms * _MS)


class LinearFit(_Model):
    """Step = scale · (base + per_sequence · B + per_kv_token · K), in ms."""

    base_ms: PositiveFloat
    per_sequence_ms: Milliseconds
    per_kv_token_ms: Milliseconds
    scale: PositiveFloat = 1.0

    def model(self) -> latency.LinearDecode:
        """Return the core's model, in seconds."""
        factor = self.scale * _MS
        return latency.LinearDecode(
            self.base_ms * factor, self.per_sequence_ms * factor, self.per_kv_token_ms * factor
        )


class FittedPrefill(QuadraticFit, _Sourced):
    """A prefill formula; ``mean_error`` is its MAPE, None where the source states none."""

    kind: Literal["quadratic"]


class MeasuredPrefill(_Sourced):
    """Measured TTFTs; ``beyond`` extends them."""

    kind: Literal["table"]
    points: Annotated[tuple[Point, ...], Field(min_length=2)]
    beyond: QuadraticFit

    def model(self) -> latency.TablePrefill:
        """Return the core's model."""
        return latency.TablePrefill(*_monotone(self.points), self.beyond.model())


class FittedDecode(LinearFit, _Sourced):
    """A decode formula."""

    kind: Literal["linear"]


class Curve(_Model):
    """Decode steps of batches whose requests all hold ``context`` tokens."""

    context: PositiveFloat
    points: Annotated[tuple[Point, ...], Field(min_length=1)]


class MeasuredDecode(_Sourced):
    """Measured decode steps; ``beyond`` extends them."""

    kind: Literal["table"]
    curves: Annotated[tuple[Curve, ...], Field(min_length=1)]
    beyond: LinearFit

    def model(self) -> latency.TableDecode:
        """Return the core's model."""
        ordered = sorted(self.curves, key=lambda curve: curve.context)
        curves = tuple(latency.DecodeCurve(curve.context, *_monotone(curve.points)) for curve in ordered)
        return latency.TableDecode(curves, self.beyond.model())


class Profile(_Model):
    """One worker's hardware and model."""

    name: str
    gpu: str
    model: str
    precision: str
    tensor_parallel: PositiveInt
    kv: KvCache
    prefill: Annotated[FittedPrefill | MeasuredPrefill, Field(discriminator="kind")]
    decode: Annotated[FittedDecode | MeasuredDecode, Field(discriminator="kind")]

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV cache holds, measured or derived (``kv.source`` says which)."""
        memory = self.kv.derived
        if memory is None:
            return self.kv.measured_tokens or 0
        usable = memory.gpu_memory_bytes * memory.gpu_memory_utilization - memory.reserve_bytes_per_gpu
        return int((self.tensor_parallel * usable - memory.weight_bytes) / self.kv.bytes_per_token)

    def latency(self) -> latency.LatencyModel:
        """Return the core's latency model."""
        return latency.LatencyModel(self.prefill.model(), self.decode.model())


def _monotone(points: tuple[Point, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sort by x and lift each time to the largest before it: more work never takes less time."""
    xs, times = [], []
    highest_ms = 0.0
    for x, time_ms in sorted(points):
        highest_ms = max(highest_ms, time_ms)
        xs.append(x)
        times.append(highest_ms * _MS)
    return tuple(xs), tuple(times)


_SUFFIX = ".yaml"


def names() -> list[str]:
    """Return the names of the profiles that come with Penstock, sorted."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load(name: str) -> Profile:
    """Return a profile.

    Args:
        name: One of `names`, or the path of a file ending in ``.yaml``.

    Raises:
        ConfigError: there is no such profile, or its file is wrong.
    """
    if name.endswith(_SUFFIX):
        try:
            return parse(read_bytes(Path(name)).decode("utf-8"), origin=name)
        except OSError as exc:
            raise ConfigError(f"--profile {name}: cannot read it: {exc.strerror}") from exc
    if name not in (known := names()):
        raise ConfigError(
            f"--profile {name!r} is unknown; choose one of {', '.join(known)} or give the path of a .yaml file"
        )
    return parse(resources.files(__package__).joinpath(name + _SUFFIX).read_text("utf-8"), origin=name)


@lru_cache(maxsize=64)
def parse(text: str, *, origin: str) -> Profile:
    """Return the profile that ``text`` describes; the same text is parsed once, as every simulated worker and run asks for it.

    Raises:
        ConfigError: not YAML, or fields are missing, unknown or out of range; all are named.
    """
    try:
        profile = Profile.model_validate(read_yaml(text))
    except yaml.YAMLError as exc:
        raise ConfigError(f"profile {origin}: not YAML: {exc}") from exc
    except ValidationError as exc:
        raise ConfigError(f"profile {origin}: {findings(exc, root='file')}") from exc
    if profile.kv_capacity_tokens < 1:
        raise ConfigError(f"profile {origin}: kv.derived: the weights leave no memory for the KV cache")
    return profile
