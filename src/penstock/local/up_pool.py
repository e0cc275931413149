"""Starting several graphs that draw from one GPU pool: all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.api import GraphDeployment, PoolEntry, PoolObject, pool_entries
from penstock.api.manifests import load_graph, load_pool
from penstock.core.errors import ConfigError
from penstock.local.build import PoolPlace, UpOptions
from penstock.local.down import kill, recover
from penstock.local.pool import PoolFile, PoolMember, PoolStore
from penstock.local.starts import starting
from penstock.local.statefile import StateFile
from penstock.local.store import StateStore
from penstock.local.up import Progress, StartedGraph, prepare, start


async def up_pool(
    files: Sequence[Path], pool_file: Path, options: UpOptions, progress: Progress
) -> list[StartedGraph]:
    """Start graphs one after the other, each with its own router's port from ``options.port`` on.

    Raises:
        ConfigError: an option is for one graph alone, or the graphs start with more GPUs than the pool has.
        InvalidSpecError: a manifest is wrong, or the pool does not fit its graphs.
    """
    if options.namespace is not None or options.gpus is not None:
        raise ConfigError(
            "--namespace, --gpus: for one graph; with --pool each has its own name, and the pool the GPUs"
        )
    if "log-dir" in options.planner:
        raise ConfigError(
            "--Planner.log-dir: for one graph; give --log-dir, below which each graph has a folder"
        )
    pool, graphs = load_pool(pool_file), [load_graph(file, draws=True) for file in files]
    entries = pool_entries(pool, graphs)
    places, members = _places(pool, files, graphs, entries, options)
    with starting(members):
        store = PoolStore.of(pool.name)
        hold_s, order = pool.spec.hold_seconds, pool.spec.reclaim.order
        store.found(PoolFile(pool.name, pool.written_gpus, hold_s, members, order=order))
        return await _start_all(files, places, store, progress)


async def _start_all(
    files: Sequence[Path], places: Sequence[UpOptions], store: PoolStore, progress: Progress
) -> list[StartedGraph]:
    started: list[StartedGraph] = []
    try:
        for file, place in zip(files, places, strict=True):
            started.append(await start(file, place, progress))
    except BaseException:
        for each in started:
            await asyncio.shield(asyncio.to_thread(_end, StateStore(each.statefile), each.state))
        store.remove()
        raise
    return started


def _places(
    pool: PoolObject,
    files: Sequence[Path],
    graphs: Sequence[GraphDeployment],
    entries: Mapping[str, PoolEntry],
    options: UpOptions,
) -> tuple[list[UpOptions], dict[str, PoolMember]]:
    """Return each graph's options and its first claim, on ids that no other starts on."""
    places: list[UpOptions] = []
    members: dict[str, PoolMember] = {}
    taken: frozenset[int] = frozenset()
    for number, (file, graph) in enumerate(zip(files, graphs, strict=True)):
        if graph.name in members:
            raise ConfigError(f"FILE: two graphs are called {graph.name}; rename one")
        place = PoolPlace(pool.name, pool.written_gpus, taken, pool.spec.reclaim.grace_seconds)
        log_dir = None if options.log_dir is None else options.log_dir / graph.name
        places.append(replace(options, port=options.port + number, log_dir=log_dir, pool=place))
        state = prepare(file, places[-1])[1]
        ids = state.gpus_in_use()
        taken |= ids
        entry = entries[graph.name]
        sizes = tuple(len(each.gpus) for each in state.entries.values() if each.gpus)
        members[graph.name] = PoolMember(
            entry.guaranteed_gpus,
            entry.max_gpus_of(pool.written_gpus, graph),
            entry.priority.rank,
            sizes,
            tuple(sorted(ids)),
        )
    return places, members


def _end(store: StateStore, state: StateFile) -> None:
    kill(store, state)
    recover(store)
