"""Writes what a profile found: the profile, the arrays in Dynamo's format, and the graph to apply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from penstock.core.errors import PenstockError, unwritable
from penstock.performance.dynamo import decode_arrays, prefill_arrays
from penstock.performance.profile import PROFILE_FILE
from penstock.performance.recommend import Recommendation
from penstock.performance.sweep import Sweep
from penstock.profiler.reading import ARRAYS_FILE

SCHEMA: Final = 1
GRAPH_FILE: Final = "graph.yaml"


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

    Args:
        directory: Made if it is not there.
        sweep: Every point.
        recommendation: Names the sizes whose arrays are written.
        warnings: Kept in the profile.
        graph: Manifest to write; None: none.

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
            np.savez(folder / ARRAYS_FILE, **values)
            written.append(folder / ARRAYS_FILE)
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
