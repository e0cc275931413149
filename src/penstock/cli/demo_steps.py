"""Steps that the demo on this machine and the one on a cluster share: their folder, their load run, their report."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.cli.say import say_json
from penstock.cli.terminal import Terminal
from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.report.findings import RunReport, has_plots
from penstock.report.page import write_report
from penstock.report.plain import as_json as plain_report
from penstock.report.text import report_text
from penstock.workload.results import read_run

COUNTERFACTUAL_FLEETS: Final = 16
"""Fixed fleets that the demo simulates at most. Chosen: its traffic takes about a second a fleet and needs 15 of them, and
the entire demo takes at most three minutes."""
_END_REAL_S = 15.0
"""Real seconds that a stopped load run gets for its summary. Chosen: it takes one, on a busy machine some."""
_NO_PICTURES = (
    "the report has no pictures because matplotlib is not installed; run pip install 'penstock[demo]'"
)
_PARTS = ("run", "log", "report")


def has_results(run_dir: Path) -> bool:
    """Return whether a load run that was stopped has written its summary, of at least one request."""
    try:
        return bool(read_run(run_dir).results)
    except ConfigError:
        return False


def clear(output_dir: Path) -> None:
    """Remove what an earlier demo wrote, and nothing else; make the folder of the load run."""
    for part in _PARTS:
        shutil.rmtree(output_dir / part, ignore_errors=True)
    try:
        (output_dir / "run").mkdir(parents=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {output_dir}", exc)) from exc


async def start_load(
    run_dir: Path, url: str, trace: str, *, speed: float, rate_rps: float | None
) -> asyncio.subprocess.Process:
    """Start the load generator as a separate process, so that drawing never delays a request."""
    argv = [sys.executable, "-m", "penstock.cli", "load", "--trace", trace, "--json"]
    argv += ["--url", url, "--speed", f"{speed:g}", "--output-dir", str(run_dir)]
    argv += [] if rate_rps is None else ["--rate", f"{rate_rps:g}"]
    with (run_dir / "load.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
            # A terminal's Ctrl-C goes to its entire group; this one is stopped once, and writes its summary.
            start_new_session=True,
        )


async def end_load(replay: asyncio.subprocess.Process) -> None:
    """Let a running load cut off its requests and write its summary; kill it if it does not."""
    if replay.returncode is None:
        replay.terminate()
        try:
            async with asyncio.timeout(_END_REAL_S):
                await replay.wait()
        except TimeoutError:
            replay.kill()
            await replay.wait()


def refuse_failed(replay: asyncio.subprocess.Process, run_dir: Path) -> None:
    """Raise what a load run that failed has said last."""
    if replay.returncode:
        words = (run_dir / "load.log").read_text().strip().splitlines()
        raise PenstockError(f"the load run failed: {words[-1] if words else replay.returncode}")


def conclude(found: RunReport, folder: Path, console: Terminal, *, as_json: bool) -> None:
    """Write the report into ``folder`` and print it."""
    if not has_plots():
        found = replace(found, remarks=(*found.remarks, _NO_PICTURES))
    files = write_report(found, folder, with_pictures=has_plots())
    if as_json:
        say_json(plain_report(found, files))
    else:
        console.print(report_text(found))
    console.print(f"\nreport       {files[-1]}", soft_wrap=True)
