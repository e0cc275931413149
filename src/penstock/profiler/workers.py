"""Starts the worker that is measured, waits until it serves, and always stops it; one at a time.

Each worker leads a process group. Its identity is on disk while it runs, so that the next `penstock profile` of the same
folder ends what a killed one left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.logs import get_logger
from penstock.local.build import GPU_VARIABLE, visible_devices
from penstock.local.liveness import end, identify
from penstock.local.ports import choose_port
from penstock.local.probes import Probes
from penstock.local.process_log import last_lines
from penstock.local.statefile import ProcessId
from penstock.local.store import drop_cache
from penstock.runtimes import CACHE_FOLDER, PORT, ProcessSpec, filled_argv, filled_env

_TIMEOUT_S = 20.0
"""Real seconds. Chosen: a driver that wakes every GPU of a large node takes ten."""


def detect_gpus() -> int | None:
    """Return the number of GPUs; None: the program is missing, or does not report it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run(  # noqa: S603 - found on PATH, without a shell
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None


_PERIOD_S = 0.1
_GRACE_S = 10.0
"""Real seconds from SIGTERM to SIGKILL. Chosen: a worker without requests ends within one."""
RECORD: Final = "worker.json"
LOG: Final = "worker.log"
CACHE: Final = "compiled"
"""Folder of what the worker compiles, while it runs."""

log = get_logger(__name__)


@asynccontextmanager
async def running(
    spec: ProcessSpec, gpus: int, directory: Path, environ: Mapping[str, str]
) -> AsyncIterator[str]:
    """Start a worker, yield its address once it is healthy, and stop it with its entire group at the end.

    It gets the first ``gpus`` GPUs; its log and its identity go to the directory.

    Raises:
        ConfigError: its program is not there.
        PenstockError: it ends, or does not become healthy in time; the message has the end of its log.
    """
    await end_leftover(directory)
    ports: dict[str, int] = {}
    for placeholder in spec.ports:
        ports[placeholder] = choose_port(ports.values())
    log_path = directory / LOG
    with log_path.open("ab") as stream:
        values: dict[str, str | int] = {**ports, CACHE_FOLDER: str(directory / CACHE)}
        process = await _spawn(spec, values, gpus, environ, stream.fileno())
    found = identify(process.pid)
    try:
        if found is not None:
            record = {"pid": found.pid, "started": found.started}
            (directory / RECORD).write_text(json.dumps(record), encoding="utf-8")
        url = f"http://127.0.0.1:{ports[PORT]}"
        await _healthy(process, f"{url}{spec.health_path}", spec.startup_s, log_path)
        yield url
    finally:
        await asyncio.shield(_stop(process, found, directory))


async def end_leftover(directory: Path) -> None:
    """End the worker that an earlier run of the same folder left, if it still runs."""
    record = directory / RECORD
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        plain = json.loads(record.read_text(encoding="utf-8"))
        left = ProcessId(int(plain["pid"]), str(plain["started"]))
        if survivors := await asyncio.to_thread(end, [left], grace_s=_GRACE_S):
            log.warning("a worker of an earlier run does not end", pids=[each.pid for each in survivors])
    await asyncio.to_thread(drop_cache, directory / CACHE)
    record.unlink(missing_ok=True)


async def _spawn(
    spec: ProcessSpec, values: Mapping[str, str | int], gpus: int, environ: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    argv = filled_argv(spec, values)
    devices = visible_devices(tuple(range(gpus)), environ.get(GPU_VARIABLE))
    environment = {**environ, **filled_env(spec, values), GPU_VARIABLE: devices}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, "PATH": path},
            start_new_session=True,
        )
    except OSError as exc:
        raise ConfigError(f"cannot start {argv[0]!r}: {exc.strerror}; check that it is installed") from exc


async def _healthy(process: asyncio.subprocess.Process, url: str, startup_s: float, log_path: Path) -> None:
    probes = Probes()
    try:
        async with asyncio.timeout(startup_s):
            while await probes.health(url) is not None:
                if process.returncode is not None:
                    raise PenstockError(
                        f"the worker ended with status {process.returncode} before it served; {log_path} ends:"
                        f" {last_lines(log_path)}"
                    )
                await asyncio.sleep(_PERIOD_S)
    except TimeoutError:
        raise PenstockError(
            f"the worker is not healthy after {startup_s:g} s (startupTimeoutSeconds); {log_path} ends:"
            f" {last_lines(log_path)}"
        ) from None
    finally:
        await probes.close()


async def _stop(process: asyncio.subprocess.Process, found: ProcessId | None, directory: Path) -> None:
    if found is not None:
        await asyncio.to_thread(end, [found], grace_s=_GRACE_S)
    await process.wait()
    await asyncio.to_thread(drop_cache, directory / CACHE)
    (directory / RECORD).unlink(missing_ok=True)
