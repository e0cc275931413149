"""Writes a pool's run: its figures as JSON, its allocations as JSON lines, and a chart of the GPUs held over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.core.errors import PenstockError, unwritable
from penstock.simulator.output import to_json
from penstock.simulator.pool import PoolRun

RESULT_FILE: Final = "pool.json"
SAMPLES_FILE: Final = "pool_samples.jsonl"
PICTURE_FILE: Final = "pool.png"


def write_pool(result: Mapping[str, Any], run: PoolRun, directory: Path) -> list[Path]:
    """Write the figures of a pool's run (JSON), its allocations of GPUs (JSON lines) and a chart, and return the paths of the files.

    Args:
        result: Result of `pool_plan.pool_result`.
        run: The simulated run.
        directory: Existing folder to write to.

    Raises:
        PenstockError: a file cannot be written.
    """
    from penstock.simulator.pool_chart import draw_pool  # noqa: PLC0415 - matplotlib is an extra

    paths = [directory / name for name in (RESULT_FILE, SAMPLES_FILE)]
    try:
        paths[0].write_bytes(to_json(result))
        with paths[1].open("wb") as stream:
            for sample in run.samples:
                stream.write(orjson.dumps(sample, option=orjson.OPT_APPEND_NEWLINE))
        pictures = draw_pool(result, run, directory / PICTURE_FILE)
    except OSError as exc:
        raise PenstockError(unwritable(f"--output-dir {directory}", exc)) from exc
    return [*paths, *pictures]
