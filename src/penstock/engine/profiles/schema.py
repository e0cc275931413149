"""Finds, reads and validates profile files, and converts them to the latency models of the engine's core."""

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
"""Relative error as a fraction: 0.05 means 5%."""
Milliseconds = Annotated[float, Field(ge=0)]
"""Duration in milliseconds, at least 0."""
Point = tuple[PositiveFloat, PositiveFloat]
"""Pair of tokens (or requests) and milliseconds."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MemoryBudget(_Model):
    """Memory sizes from which the KV capacity is computed if it was not measured.

    Attributes:
        gpu_memory_bytes: Memory of one GPU.
        gpu_memory_utilization: Fraction of the GPU memory that the engine uses.
        weight_bytes: Size of the model's weights, over all GPUs.
        reserve_bytes_per_gpu: Memory per GPU for other purposes, such as activations.
    """

    gpu_memory_bytes: PositiveInt
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    weight_bytes: PositiveInt
    reserve_bytes_per_gpu: Annotated[int, Field(ge=0)]


class KvCache(_Model):
    """Size of the KV cache; exactly one of ``measured_tokens`` and ``derived`` is set.

    Attributes:
        bytes_per_token: Bytes of KV per token.
        measured_tokens: Measured capacity in tokens.
        derived: Memory sizes from which the capacity is computed.
        source: Source of the numbers.
    """

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
    """Prefill formula: TTFT = overhead + added overhead + per_token · n + per_token2 · n², in ms, for a prompt of n tokens."""

    overhead_ms: Milliseconds
    per_token_ms: PositiveFloat
    per_token2_ms: Milliseconds
    added_overhead_ms: Milliseconds = 0.0

    def model(self) -> latency.QuadraticPrefill:
        """Return the prefill model of the engine's core, in seconds."""
        overhead_ms = self.overhead_ms + self.added_overhead_ms
        return latency.QuadraticPrefill(overhead_ms * _MS, self.per_token_ms * _MS, self.per_token2_ms * _MS)


class LinearFit(_Model):
    """Decode formula: step = scale · (base + per_sequence · B + per_kv_token · K), in ms.

    B is the number of requests in the batch, K the number of tokens that they attend to in total.
    """

    base_ms: PositiveFloat
    per_sequence_ms: Milliseconds
    per_kv_token_ms: Milliseconds
    scale: PositiveFloat = 1.0

    def model(self) -> latency.LinearDecode:
        """Return the decode model of the engine's core, in seconds."""
        factor = self.scale * _MS
        return latency.LinearDecode(
            self.base_ms * factor, self.per_sequence_ms * factor, self.per_kv_token_ms * factor
        )


class FittedPrefill(QuadraticFit, _Sourced):
    """A prefill formula with its source; ``mean_error`` is its mean absolute percentage error, None if the source gives none."""

    kind: Literal["quadratic"]


class MeasuredPrefill(_Sourced):
    """Measured TTFTs, as pairs of prompt length and milliseconds; ``beyond`` is the formula that extends them above the longest prompt."""

    kind: Literal["table"]
    points: Annotated[tuple[Point, ...], Field(min_length=2)]
    beyond: QuadraticFit

    def model(self) -> latency.TablePrefill:
        """Return the prefill model of the engine's core, in seconds."""
        return latency.TablePrefill(*_monotone(self.points), self.beyond.model())


class FittedDecode(LinearFit, _Sourced):
    """A decode formula with its source."""

    kind: Literal["linear"]


class Curve(_Model):
    """Measured decode steps of batches whose requests all have ``context`` tokens, as pairs of batch size and milliseconds."""

    context: PositiveFloat
    points: Annotated[tuple[Point, ...], Field(min_length=1)]


class MeasuredDecode(_Sourced):
    """Measured decode steps by context length; ``beyond`` is the formula that extends them outside the measured range."""

    kind: Literal["table"]
    curves: Annotated[tuple[Curve, ...], Field(min_length=1)]
    beyond: LinearFit

    def model(self) -> latency.TableDecode:
        """Return the decode model of the engine's core, in seconds."""
        ordered = sorted(self.curves, key=lambda curve: curve.context)
        curves = tuple(latency.DecodeCurve(curve.context, *_monotone(curve.points)) for curve in ordered)
        return latency.TableDecode(curves, self.beyond.model())


class Profile(_Model):
    """Latency profile of one worker: its hardware, its model, and measured or fitted times.

    Attributes:
        name: Name of the profile.
        gpu: GPU type.
        model: Model that the worker serves.
        precision: Number format of the weights.
        tensor_parallel: Number of GPUs.
        kv: Size of the KV cache.
        prefill: Formula or table of TTFTs.
        decode: Formula or table of decode steps.
    """

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
        """Capacity of the KV cache in tokens, measured or computed (see ``kv.source``)."""
        memory = self.kv.derived
        if memory is None:
            return self.kv.measured_tokens or 0
        usable = memory.gpu_memory_bytes * memory.gpu_memory_utilization - memory.reserve_bytes_per_gpu
        return int((self.tensor_parallel * usable - memory.weight_bytes) / self.kv.bytes_per_token)

    def latency(self) -> latency.LatencyModel:
        """Return the latency model for the engine's core."""
        return latency.LatencyModel(self.prefill.model(), self.decode.model())


def _monotone(points: tuple[Point, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sort by x and raise each time to the maximum of the times before it: more work never takes less time."""
    xs, times = [], []
    highest_ms = 0.0
    for x, time_ms in sorted(points):
        highest_ms = max(highest_ms, time_ms)
        xs.append(x)
        times.append(highest_ms * _MS)
    return tuple(xs), tuple(times)


_SUFFIX = ".yaml"


def names() -> list[str]:
    """Return the sorted names of the profiles that are included in Penstock."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load(name: str) -> Profile:
    """Return a profile.

    Args:
        name: One of `names`, or the path of a file with suffix ``.yaml``.

    Raises:
        ConfigError: There is no such profile, or its file is invalid.
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
    """Parse a profile; results are cached by text, because every simulated worker and run needs them.

    Args:
        text: YAML text of the profile.
        origin: Name of the profile, for messages.

    Raises:
        ConfigError: The text is not YAML, or fields are missing, unknown or out of range; all are named.
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
