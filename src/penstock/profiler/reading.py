"""Reads a profile from wherever it is: a file or folder of ours or of Dynamo's, an engine's name."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.engine.core.latency import LatencyModel
from penstock.performance import dynamo
from penstock.performance.profile import PROFILE_FILE, profile_from
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep, sweep_from, sweep_of
from penstock.profiler.points import spaced

ARRAYS_FILE: Final = "raw_data.npz"
_DYNAMO_FOLDERS = ("selected_prefill_interpolation", "selected_decode_interpolation")
_DYNAMO_JSON = ("prefill_raw_data.json", "decode_raw_data.json")
_OWN_FOLDERS = ("prefill_tp*_interpolation", "decode_tp*_interpolation")
_MAX_BYTES = 64 << 20
"""Chosen: a thousand times the largest profile."""
_LONGEST = 131_072
"""Tokens; the simulated worker's own limit, up to which an engine's latency profile is read off."""
_MOST_BATCH = 256
"""Requests in one batch: the simulated worker's default."""


def read_sweep(source: str, *, gpus: int | None = None) -> Sweep:
    """Return the points of a profile.

    Args:
        source: A folder or file of `penstock profile`; a folder of Dynamo's profiler (npz or JSON);
            or the name of a latency profile that comes with Penstock.
        gpus: GPUs of a Dynamo engine; None: derived from its throughput per GPU.

    Raises:
        ConfigError: there is no profile, or it cannot be read; the message says what was looked for.
    """
    if source in profiles.names():
        return engine_sweep(source)
    path = Path(source)
    try:
        if path.is_dir():
            return _folder(path, gpus)
        if path.is_file():
            return _json_file(path)
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as exc:
        raise ConfigError(f"{source}: no profile can be read: {_reason(exc)}") from exc
    raise ConfigError(
        f"{source}: neither a file or folder, nor a latency profile that comes with Penstock; give the --output-dir of"
        " `penstock profile`, a folder of Dynamo's profiler, or a name from `penstock engine profiles`"
    )


def engine_sweep(name: str) -> Sweep:
    """Return what a simulated engine does by its latency profile, without measuring it."""
    profile = profiles.load(name)
    latency, kv_tokens = profile.latency(), profile.kv_capacity_tokens
    longest = min(_LONGEST, kv_tokens)
    prefill = tuple(
        PrefillPoint(float(tokens), latency.prefill.ttft_s(tokens))
        for tokens in spaced(100, longest, 3000, 20)
    )
    decode = tuple(
        point
        for context in spaced(256, longest, 3000, 10)
        for point in _engine_row(latency, context, kv_tokens)
    )
    engine = EngineSweep(profile.tensor_parallel, float(kv_tokens), prefill, decode, name)
    return Sweep((engine,), profile.model)


def _engine_row(latency: LatencyModel, context: int, kv_tokens: int) -> list[DecodePoint]:
    most = max(1, min(_MOST_BATCH, kv_tokens // context))
    row = []
    for batch in spaced(1, most, 1, 24):
        itl_s = latency.decode.step_s(batch, batch * context)
        row.append(DecodePoint(float(context), float(batch), itl_s, batch / itl_s))
    return row


def _folder(path: Path, gpus: int | None) -> Sweep:
    if (path / PROFILE_FILE).is_file():
        return _json_file(path / PROFILE_FILE)
    for prefill, decode in (_DYNAMO_FOLDERS, _OWN_FOLDERS):
        folders = [next(iter(sorted(path.glob(each))), None) for each in (prefill, decode)]
        if folders[0] is not None and folders[1] is not None:
            return _dynamo_sweep(_arrays(folders[0]), _arrays(folders[1]), gpus)
    files = [path / each for each in _DYNAMO_JSON]
    if all(each.is_file() for each in files):
        return _dynamo_sweep(_json(files[0]), _json(files[1]), gpus)
    raise ValueError(
        f"the folder holds neither {PROFILE_FILE}, nor {_DYNAMO_FOLDERS[0]}/{ARRAYS_FILE} and"
        f" {_DYNAMO_FOLDERS[1]}/{ARRAYS_FILE}, nor {_DYNAMO_JSON[0]} and {_DYNAMO_JSON[1]}"
    )


def _json_file(path: Path) -> Sweep:
    plain = _json(path)
    if "sweep" in plain:
        return sweep_from(plain["sweep"])
    return sweep_of(profile_from(plain))


def _dynamo_sweep(prefill: Mapping[str, Any], decode: Mapping[str, Any], gpus: int | None) -> Sweep:
    prefill_gpus = gpus or dynamo.prefill_gpus(prefill)
    decode_gpus = gpus or dynamo.decode_gpus(decode)
    if prefill_gpus is None or decode_gpus is None:
        raise ValueError("the throughput per GPU does not tell the engine's GPUs; give --tp N")
    prefills = dynamo.prefill_points(prefill)
    decodes, kv_tokens = dynamo.decode_points(decode, decode_gpus), dynamo.kv_tokens_of(decode)
    if prefill_gpus == decode_gpus:
        return Sweep((EngineSweep(decode_gpus, kv_tokens, prefills, decodes, "Dynamo's profile"),))
    engines = (
        EngineSweep(prefill_gpus, kv_tokens, prefills, (), "Dynamo's prefill profile"),
        EngineSweep(decode_gpus, kv_tokens, (), decodes, "Dynamo's decode profile"),
    )
    return Sweep(tuple(sorted(engines, key=lambda engine: engine.gpus)))


def _arrays(folder: Path) -> dict[str, Any]:
    with np.load(folder / ARRAYS_FILE, allow_pickle=False) as arrays:
        return {key: np.atleast_1d(arrays[key]).tolist() for key in arrays.files}


def _json(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
    plain = json.loads(data)
    if not isinstance(plain, dict):
        raise TypeError(f"{path} holds no JSON object")
    return plain


def _reason(exc: Exception) -> str:
    return f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)
