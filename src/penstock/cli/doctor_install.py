"""`penstock doctor --install`: is this machine ready for Penstock, and for which of its parts; `install_facts` reads, the rest judges.

`doctor_local` shares what both check.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

import psutil

from penstock.core.findings import full_disks
from penstock.core.local_state import state_dir
from penstock.local.ports import FIRST_PORT, LAST_PORT, is_free
from penstock_operator.doctor.findings import Finding, ok, problem, unknown, warning

EXTRAS: Final = {
    "dask": "penstock simulate --on dask",
    "gateway": "penstock router pick",
    "kubernetes": "a cluster: operator, planner, penstock graph and doctor",
    "kv-events": "a router that follows the KV events of its workers",
    "plots": "penstock demo and report",
    "prometheus": "the planner's source prometheus",
    "tensorboard": "viewing the planner's dashboard",
    "tokenizer": "a router that identifies prompts by their tokens",
    "tracing": "spans of requests",
}
"""Extras of the distribution, and what needs each."""

PROGRAMS: Final = {
    "docker": "images",
    "helm": "the chart",
    "kind": "a cluster on this machine",
    "kubectl": "inspecting a cluster",
    "nvidia-smi": "GPUs",
}
"""Programs that parts of Penstock's documentation call; nothing in a demo does."""

PORTS: Final = {8000: "router of penstock up", 6006: "TensorBoard"}
"""Defaults, and who listens there."""

FILES: Final = 4096
"""Chosen: open files that a router with 2,000 streams needs, two sockets each."""

PROCESSES: Final = 1024
"""Chosen: processes and threads of a graph of thirty workers, some thirty each."""

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - its size is read, nothing is written

SHM_MIB: Final = 1024
"""Chosen: vLLM over several GPUs passes tensors through /dev/shm; a container's default of 64 MiB is too little."""

LOW_BYTES: Final = 256 * 1024 * 1024
"""Chosen: what eight processes' logs take at most."""

_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]([A-Za-z0-9._-]+)['\"]")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallFacts:
    """What was read of a machine.

    Attributes:
        missing: Packages that are not installed, by extra.
        open_files, processes: Most that a process, and this user, may have; -1: any number.
        folder: Of the local state; its disk is judged at the nearest folder that exists.
        taken_ports: Of `PORTS`, those on which something listens.
        shm_mib: Size of /dev/shm; None: there is none.
    """

    cores: int
    memory_gib: float
    missing: Mapping[str, Sequence[str]]
    programs: frozenset[str]
    open_files: int
    processes: int
    folder: Path
    is_writable: bool
    taken_ports: frozenset[int]
    has_worker_ports: bool
    shm_mib: float | None


def install_facts() -> InstallFacts:
    """Read this machine; nothing is written or started."""
    folder, shm = state_dir(), Path(SHARED_MEMORY)
    return InstallFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        missing=missing_packages(),
        programs=frozenset(filter(shutil.which, PROGRAMS)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        folder=folder,
        is_writable=os.access(nearest(folder), os.W_OK | os.X_OK),
        taken_ports=frozenset(port for port in PORTS if not is_free(port)),
        has_worker_ports=any(map(is_free, range(FIRST_PORT, LAST_PORT + 1))),
        shm_mib=shutil.disk_usage(shm).total / 2**20 if shm.is_dir() else None,
    )


def nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def missing_packages() -> dict[str, list[str]]:
    """Return by extra of this distribution the packages that are not installed, none for a complete extra."""
    found: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for requirement in requires("penstock") or ():
        match = _REQUIREMENT.match(requirement)
        if match is not None and match[2] in found and not _is_installed(match[1]):
            found[match[2]].append(match[1])
    return found


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def install_findings(facts: InstallFacts) -> Iterator[Finding]:
    """Judge a machine on which nothing has to run yet."""
    yield from program_findings(facts.missing)
    yield ok("machine", f"{facts.cores} cores, {facts.memory_gib:.1f} GiB of memory, {platform.system()}")
    complete = [extra for extra, absent in facts.missing.items() if not absent]
    yield ok("extras", f"installed: {', '.join(complete) or 'none'}")
    there = [name for name in PROGRAMS if name in facts.programs]
    others = [f"{name} ({use})" for name, use in PROGRAMS.items() if name not in facts.programs]
    words = f"found: {', '.join(there) or 'none'}"
    yield ok("other programs", f"{words}; not found: {', '.join(others)}" if others else words)
    yield from state_findings(facts.folder, is_writable=facts.is_writable)
    yield from disk_findings(nearest(facts.folder))
    yield from limit_findings(facts.open_files, facts.processes)
    yield from _port_findings(facts)
    yield from _shm_findings(facts.shm_mib)


def program_findings(missing: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Say which version this is, and which extras lack which packages."""
    yield ok("programs", f"Penstock {version('penstock')} on Python {platform.python_version()}")
    for extra, absent in missing.items():
        if absent:
            verb = "is" if len(absent) == 1 else "are"
            message = f"{', '.join(absent)} {verb} not installed; needed for {EXTRAS[extra]}"
            yield unknown("programs", message, f"pip install 'penstock[{extra}]'")


def state_findings(folder: Path, *, is_writable: bool) -> Iterator[Finding]:
    """Judge the folder of the local state."""
    if is_writable:
        yield ok("state", f"{folder} is writable")
    else:
        remedy = "give yourself write permission, or set PENSTOCK_LOCAL_STATE_DIR to another folder"
        yield problem("state", f"{folder} is not writable", remedy)


def disk_findings(folder: Path) -> Iterator[Finding]:
    """Say whether the state folder's disk is full, or soon will be."""
    full, free = full_disks([folder]), shutil.disk_usage(folder).free
    for each in full:
        yield problem("state", each, "free disk space; until then no graph can be started or changed")
    if not full and free < LOW_BYTES:
        message = (
            f"{free / 2**20:,.0f} MiB are free on the disk of {folder}; state, logs and ledger need them"
        )
        yield warning("state", message, "free disk space")


def limit_findings(open_files: int, processes: int = -1) -> Iterator[Finding]:
    """Judge this user's limits; -1: any number."""
    if 0 <= open_files < FILES:
        message = f"a process may open {open_files} files; a busy router needs {FILES}"
        yield warning(
            "open files", message, f"ulimit -Hn {FILES}, or raise nofile in /etc/security/limits.conf"
        )
    if 0 <= processes < PROCESSES:
        message = f"this user may have {processes} processes and threads; a graph of thirty workers needs {PROCESSES}"
        yield warning(
            "processes", message, f"ulimit -Hu {PROCESSES}, or raise nproc in /etc/security/limits.conf"
        )


def _port_findings(facts: InstallFacts) -> Iterator[Finding]:
    for port in sorted(facts.taken_ports):
        message = f"port {port} is in use; it is the default of: {PORTS[port]}"
        yield warning(
            "ports",
            message,
            f"choose another with --port; to see which process uses it: ss -ltnp 'sport = :{port}'",
        )
    if not facts.has_worker_ports:
        message = (
            f"no port between {FIRST_PORT} and {LAST_PORT} on 127.0.0.1 is available; each worker needs one"
        )
        yield problem(
            "ports", message, "stop the processes that use them, or allow this user to listen on them"
        )
    elif not facts.taken_ports:
        yield ok("ports", f"{', '.join(map(str, PORTS))} and the workers' ports are free")


def _shm_findings(shm_mib: float | None) -> Iterator[Finding]:
    needs = f"vLLM on several GPUs needs {SHM_MIB} MiB of it; simulated workers do not need any"
    remedy = "docker run --shm-size=8g, or mount a tmpfs there"
    if shm_mib is None:
        yield warning(SHARED_MEMORY, f"it does not exist; {needs}", remedy)
    elif shm_mib < SHM_MIB:
        yield warning(SHARED_MEMORY, f"it has {shm_mib:,.0f} MiB; {needs}", remedy)
    else:
        yield ok(SHARED_MEMORY, f"{shm_mib:,.0f} MiB")
