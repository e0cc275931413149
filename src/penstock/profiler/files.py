"""What a profile is kept in: the profile, Dynamo's arrays, the graph to apply; reads and writes them.

A profile is also read from a folder of Dynamo's profiler, or derived from a latency profile that comes with Penstock.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from penstock.api import GraphDeployment, PlannerMode, Role
from penstock.core.durations import duration_text
from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.core.validation import findings
from penstock.engine import profiles
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.performance.dynamo import decode_arrays, engine_of, prefill_arrays
from penstock.performance.profile import PROFILE_FILE
from penstock.performance.recommend import Recommendation, decode_choices, prefill_choice
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint, Sweep
from penstock.profiler.plan import family, measured_services
from penstock.profiler.points import spaced
from penstock.profiler.simulated import transfer_of

SCHEMA: Final = 1
GRAPH_FILE: Final = "graph.yaml"
_ARRAYS_FILE = "raw_data.npz"
_DYNAMO_FOLDERS = ("selected_prefill_interpolation", "selected_decode_interpolation")
_DYNAMO_JSON = ("prefill_raw_data.json", "decode_raw_data.json")
_OWN_FOLDERS = ("prefill_tp*_interpolation", "decode_tp*_interpolation")
_MAX_BYTES = 64 << 20
"""Chosen: a thousand times the largest profile."""
_LONGEST = 131_072
"""Tokens; the simulated worker's own limit, up to which points are derived from a latency profile."""
_MOST_BATCH = 256
"""Requests in one batch: the simulated worker's default."""
_SWEEP: Final = TypeAdapter(Sweep)


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
            return _own(path)
    except ValidationError as exc:
        raise ConfigError(f"{source}: no profile can be read: {findings(exc, root='sweep', most=1)}") from exc
    except (OSError, TypeError, ValueError, zipfile.BadZipFile) as exc:
        raise ConfigError(f"{source}: no profile can be read: {exc}") from exc
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
    decode = []
    for context in spaced(256, longest, 3000, 10):
        for batch in spaced(1, max(1, min(_MOST_BATCH, kv_tokens // context)), 1, 24):
            itl_s = latency.decode.step_s(batch, batch * context)
            decode.append(DecodePoint(float(context), float(batch), itl_s, batch / itl_s))
    transfer = transfer_of(resolve(ServeFlags(profile.model, profile=name)))
    engine = EngineSweep(profile.tensor_parallel, float(kv_tokens), prefill, tuple(decode), name, transfer)
    return Sweep((engine,), profile.model)


def _folder(path: Path, gpus: int | None) -> Sweep:
    if (path / PROFILE_FILE).is_file():
        return _own(path / PROFILE_FILE)
    for prefill, decode in (_DYNAMO_FOLDERS, _OWN_FOLDERS):
        folders = [next(iter(sorted(path.glob(each))), None) for each in (prefill, decode)]
        if folders[0] is not None and folders[1] is not None:
            return Sweep((engine_of(_arrays(folders[0]), _arrays(folders[1]), gpus),))
    files = [path / each for each in _DYNAMO_JSON]
    if all(each.is_file() for each in files):
        return Sweep((engine_of(_json(files[0]), _json(files[1]), gpus),))
    raise ValueError(
        f"the folder holds neither {PROFILE_FILE}, nor {_DYNAMO_FOLDERS[0]}/{_ARRAYS_FILE} and"
        f" {_DYNAMO_FOLDERS[1]}/{_ARRAYS_FILE}, nor {_DYNAMO_JSON[0]} and {_DYNAMO_JSON[1]}"
    )


def _own(path: Path) -> Sweep:
    plain = _json(path)
    if "sweep" not in plain:
        raise ValueError("sweep is missing; give a file that `penstock profile` wrote")
    return _SWEEP.validate_python(plain["sweep"])


def _arrays(folder: Path) -> dict[str, Any]:
    with np.load(folder / _ARRAYS_FILE, allow_pickle=False) as arrays:
        return {key: np.atleast_1d(arrays[key]).tolist() for key in arrays.files}


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
    plain = json.loads(path.read_bytes())
    if not isinstance(plain, dict):
        raise TypeError(f"{path} holds no JSON object")
    return plain


def plain_result(sweep: Sweep, recommendation: Recommendation, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the profile file: tables of the recommended sizes, every point, and the recommendation."""
    profile = sweep.profile(prefill_gpus=recommendation.prefill.gpus, decode_gpus=recommendation.decode.gpus)
    return {
        "schema": SCHEMA,
        **asdict(profile),
        "recommendation": asdict(recommendation),
        "warnings": list(warnings),
        "sweep": asdict(sweep),
    }


def write_result(
    directory: Path,
    sweep: Sweep,
    recommendation: Recommendation,
    *,
    warnings: Sequence[str],
    graph: Mapping[str, Any] | None,
) -> list[Path]:
    """Write profile, arrays and graph, and return their paths.

    The folder is made if it is not there; the arrays are of the recommended sizes.

    Raises:
        PenstockError: the disk is full or gone.
    """
    prefill, decode = recommendation.prefill.gpus, recommendation.decode.gpus
    arrays = {
        f"prefill_tp{prefill}_interpolation": prefill_arrays(sweep.engine(prefill)),
        f"decode_tp{decode}_interpolation": decode_arrays(sweep.engine(decode)),
    }
    written = [directory / PROFILE_FILE]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain_result(sweep, recommendation, warnings), indent=1)
        _replace(written[0], text + "\n")
        for name, columns in arrays.items():
            folder = directory / name
            folder.mkdir(exist_ok=True)
            values: dict[str, Any] = {key: np.array(value) for key, value in columns.items()}
            np.savez(folder / _ARRAYS_FILE, **values)
            written.append(folder / _ARRAYS_FILE)
        if graph is not None:
            written.append(directory / GRAPH_FILE)
            _replace(written[-1], yaml.safe_dump(dict(graph), sort_keys=False))
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return written


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def graph_back(graph: GraphDeployment, recommendation: Recommendation, profile: str) -> dict[str, Any]:
    """Return the manifest of the recommended graph.

    The recommendation misses nothing; ``profile`` is what ``planner.sla.profile`` names: the path of the profile's file.

    Raises:
        ConfigError: one replica per role exceeds the graph's GPU budget.
    """
    sizes = {Role.PREFILL: recommendation.prefill.gpus, Role.DECODE: recommendation.decode.gpus}
    services = measured_services(graph)
    _check_budget(graph, {services[phase][0]: size for phase, size in sizes.items()})
    manifest = graph.to_manifest()
    manifest.pop("status", None)
    spec = manifest["spec"]
    for phase, size in sizes.items():
        name, service = services[phase]
        written = spec["services"][name]
        written["gpusPerReplica"] = size
        if graph.spec.traits.is_simulated:
            written["profile"] = family(service.profile or graph.spec.engine.profile)[size]
    targets = recommendation.targets
    held = {"ttft": duration_text(targets.ttft_s), "itl": duration_text(targets.itl_s)}
    spec["slo"] = {**spec.get("slo", {}), **held}
    spec["planner"] = {**spec.get("planner", {}), **_planner(graph, recommendation, profile)}
    return manifest


def _planner(graph: GraphDeployment, recommendation: Recommendation, profile: str) -> dict[str, Any]:
    written: dict[str, Any] = {
        "mode": PlannerMode.SLA.value,
        "decodeKvScaleUpThreshold": recommendation.kv.upper,
        "decodeKvScaleDownThreshold": recommendation.kv.lower,
        "sla": {**graph.spec.planner.sla.to_manifest(), "profile": profile},
    }
    if graph.spec.is_disaggregated:
        written["prefillQueueScaleUpThreshold"] = recommendation.queue.upper
        written["prefillQueueScaleDownThreshold"] = recommendation.queue.lower
    return written


def _check_budget(graph: GraphDeployment, sizes: dict[str, int]) -> None:
    budget, needed = graph.spec.planner.max_gpu_budget, sum(sizes.values())
    if budget is not None and needed > budget:
        shown = " and ".join(f"{size} for {name}" for name, size in sizes.items())
        raise ConfigError(
            f"spec.planner.maxGpuBudget: {budget}, but one replica each takes {needed} GPUs ({shown}); raise it, or"
            " profile smaller engines with --tp"
        )


def choice_tables(sweep: Sweep, recommendation: Recommendation) -> tuple[Table, Table]:
    """Return what each engine size prefills, and what it decodes by requests in flight, at the target's lengths."""
    targets = recommendation.targets
    prefill = _table(f"Prefill, {targets.isl:,} prompt tokens", "TP", "TTFT ms", "tokens/s/GPU", "in target")
    decode = _table(
        f"Decode, {targets.context:,.0f} tokens of context",
        *("TP", "in flight", "KV", "ITL ms", "tokens/s/GPU", "in target"),
    )
    for engine in sweep.engines:
        choice = prefill_choice(engine, targets, after_s=recommendation.prefill.after_s)
        ttft, rate = f"{choice.ttft_s * 1000:.1f}", f"{choice.tokens_per_s_per_gpu:,.0f}"
        prefill.add_row(str(choice.gpus), ttft, rate, "yes" if choice.meets else "no")
        for each in decode_choices(engine, targets):
            decode.add_row(
                str(each.gpus),
                f"{each.concurrency:,.0f}",
                f"{each.kv_usage:.0%}",
                f"{each.itl_s * 1000:.1f}",
                f"{each.tokens_per_s_per_gpu:,.0f}",
                "yes" if each.meets else "no",
            )
    return prefill, decode


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
