"""One cell of a sweep: its inputs, its run, possibly on another machine, and the journal from which a killed sweep continues.

A cell is one simulation run. A journal holds one JSON object per line: a cell's key and its figures.
"""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
import xxhash

from penstock.core.errors import ConfigError, PenstockError, unwritable
from penstock.core.plugins import registered
from penstock.engine.profiles import load
from penstock.simulator.output import to_json
from penstock.simulator.scenario import ProfiledModel
from penstock.simulator.workload import WorkloadSpec, cached_trace
from penstock.workload.synthetic import parse_synthetic
from penstock.workload.traces import Trace
from penstock_planner.decide.codec import to_plain

Figures: TypeAlias = dict[str, Any]

JOURNAL: Final = "cells.jsonl"
_PLUGINS: Final = ("penstock.routing_policies", "penstock.planner_policies", "penstock.planner_baselines")

_PACKAGES: Final = frozenset({"penstock", "penstock_planner"})


@cache
def code_digest() -> str:
    """Return a digest of all code that computes figures in this process.

    It covers the files of Penstock and of the installed plugins, and the versions of numpy and Python.
    """
    packages = set(_PACKAGES)
    for group in _PLUGINS:
        packages |= {point.module.partition(".")[0] for point in registered(group).values()}
    digest = xxhash.xxh3_128()
    digest.update(f"{platform.python_version()} {version('numpy')}".encode())
    for package in sorted(packages):
        found = find_spec(package)
        folders = [] if found is None else found.submodule_search_locations or []
        files = [
            file
            # A namespace package lists the same folder more than once if the folder is on the path more than once.
            for folder in dict.fromkeys(folders)
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file() and file.suffix != ".pyc"
        ]
        if found is not None and not files and found.origin is not None:
            files = [Path(found.origin)]
        for file in files:
            digest.update(f"{package} {file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def _own_digest(file: Path) -> str:
    """Return a digest of all Python files in the folder of ``file``, which belongs to no installed package, such as a benchmark's."""
    digest = xxhash.xxh3_128()
    for each in sorted(file.parent.rglob("*.py")):
        digest.update(f"{each.name}\0".encode() + each.read_bytes())
    return digest.hexdigest()


def with_trace(workload: WorkloadSpec) -> WorkloadSpec:
    """Return the description of a run's requests with the trace loaded into it, so that a machine without the trace file can run it.

    Returns ``workload`` unchanged if it has a trace already or is synthetic.

    Raises:
        ConfigError: the trace cannot be read.
    """
    if isinstance(workload.source, Trace) or parse_synthetic(workload.source) is not None:
        return workload
    return replace(workload, source=cached_trace(workload.source, workload.block_tokens))


def _with_named_trace(workload: WorkloadSpec) -> WorkloadSpec:
    """Return the workload with its trace replaced by a digest of the trace's content, for use in a cell's key."""
    source = with_trace(workload).source
    if isinstance(source, Trace):
        return replace(workload, source=_named(source))
    synthetic = parse_synthetic(source)
    if synthetic is not None and synthetic.requests:
        return replace(workload, source=f"{source} {_named(cached_trace(synthetic.requests, None))}")
    return workload


def _named(trace: Trace) -> str:
    return f"{trace.sha256} {trace.name} {trace.hash_tokens}"


def _mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to every instance of ``kind`` in it, including those nested in dataclasses and tuples."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_mapped(each, kind, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {each.name: getattr(value, each.name) for each in fields(value)}
        new = {name: _mapped(each, kind, change) for name, each in old.items()}
        return replace(value, **{name: each for name, each in new.items() if each is not old[name]})
    return value


class CellLost(Enum):
    """Result of a cell (one run of a sweep) that has no figures, because its process or machine died before the run ended.

    The caller then repeats the run.
    """

    LOST = "lost"


CellOutcome: TypeAlias = Figures | PenstockError | CellLost


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep, which can be sent to another process or machine.

    Attributes:
        work: Function that computes the run's figures (its results as plain data, by name) from ``spec``. It must be defined at the top
            level of a module, so that it can be pickled.
        spec: Dataclass that holds all inputs of the figures, except for the contents of files and the code, such as a `RunSpec`.
    """

    work: Callable[[Any], Figures]
    spec: Any

    def run(self) -> Figures | PenstockError:
        """Simulate, and return the run's figures (results as plain data, by name), or the error that prevented the run."""
        try:
            return self.work(self.spec)
        except PenstockError as exc:
            return exc

    def portable(self) -> Cell:
        """Return a copy of the cell (one simulation run) that contains its traces, so that the machine that runs it reads no trace file.

        Raises:
            ConfigError: the trace cannot be read.
        """
        return replace(self, spec=_mapped(self.spec, WorkloadSpec, with_trace))

    @property
    def key(self) -> str:
        """Digest of everything that the run's results depend on: its inputs, the content of its traces and latency profiles, and the code."""
        named = _mapped(self.spec, WorkloadSpec, _with_named_trace)
        profiles: list[Any] = []

        def take(model: ProfiledModel) -> ProfiledModel:
            profiles.append(to_plain(load(model.profile)))
            return model

        _mapped(self.spec, ProfiledModel, take)
        of_work = [self.work.__module__, self.work.__qualname__]
        if of_work[0].partition(".")[0] not in _PACKAGES:
            of_work.append(_own_digest(Path(inspect.getfile(self.work))))
        plain = {"work": of_work, "run": to_plain(named), "profiles": profiles}
        return xxhash.xxh3_128_hexdigest(code_digest().encode() + to_json(plain))


class CellJournal:
    """Journal of the finished cells (runs) of one output folder, from which a killed sweep continues.

    Attributes:
        path: File of the journal.
        figures: Figures (results by name) of the finished cells, by the cell's key, a digest of its inputs and of the code.
    """

    def __init__(self, directory: Path) -> None:
        """Read the journal of the folder ``directory``, which is created if it does not exist.

        An incomplete last line, left by a killed run, is removed from the file.

        Raises:
            ConfigError: the folder cannot be written to, or a line is not a cell.
        """
        self.path = directory / JOURNAL
        self.figures: dict[str, Figures] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._read()
        except OSError as exc:
            raise ConfigError(unwritable(f"--output-dir {directory}", exc)) from exc

    def _read(self) -> None:
        data = self.path.read_bytes()
        complete, _, torn = data.rpartition(b"\n")
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                read = orjson.loads(line)
                self.figures[read["cell"]] = read["figures"]
            except (ValueError, KeyError, TypeError) as exc:
                raise ConfigError(
                    f"{self.path}:{number}: not a run's figures ({exc}); give another --output-dir, or delete that file"
                ) from exc
        if torn:
            os.truncate(self.path, len(data) - len(torn))

    def keep(self, key: str, figures: Figures) -> Figures:
        """Append the result of a cell (one simulation run) to the journal, and return the figures as read back from JSON.

        The file is flushed to the disk, so that a killed sweep need not repeat the run.

        Args:
            key: Key of the cell: the digest of its inputs and of the code that `Cell.key` returns.
            figures: Results of the run, by name.

        Raises:
            PenstockError: the disk is full or not available.
        """
        line = orjson.dumps({"cell": key, "figures": figures})
        try:
            with self.path.open("ab") as stream:
                stream.write(line + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as exc:
            raise PenstockError(unwritable(str(self.path), exc)) from exc
        read: Figures = orjson.loads(line)["figures"]
        self.figures[key] = read
        return read
