"""A GPU pool on this machine: one file below the state folder that the planners of its graphs share under a lock.

Each planner reports its bid whenever it observes its graph; the one that holds the lock observes the pool, shares it out for all
of them by what their statefiles hold, and writes its own grant into its own statefile. No process of its own has to live for that.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from penstock.api import ReclaimBy
from penstock.api.base import DNS_LABEL_PATTERN
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError, ConflictError, NotFoundError
from penstock.core.local_state import EntryState, state_dir
from penstock.gpu_pool.allocator import Grant, GraphBid, PoolTerms, Share, allocate
from penstock.gpu_pool.bid import WANTS_S, WANTS_VALID_S
from penstock.gpu_pool.reclaim import with_cut_drain
from penstock.gpu_pool.waiting import DrainTimes, GraphHolding, PoolRow, pool_rows, shortage_message
from penstock.local.starts import is_under_way
from penstock.local.statefile import ArbiterInfo, StateFile
from penstock.local.store import StateStore, read_own, replace_file
from penstock_planner.decide.decision import count_of

SUFFIX: Final = ".pool"


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One graph of a pool.

    Attributes:
        guaranteed, most, priority: As of `GraphBid` (``max_gpus`` is its ``max_gpus``).
        bid: GPUs of each replica that its planner wants, in order of need.
        starts_on: GPU ids that it holds until its statefile is there.
        is_arriving: Its statefile has not been seen yet.
        said_s: When its planner last claimed, in steps of `WANTS_S`; None: not yet.
    """

    guaranteed: int
    max_gpus: int
    priority: int
    bid: tuple[int, ...]
    starts_on: tuple[int, ...] = ()
    is_arriving: bool = True
    said_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The complete file; graphs by their namespace."""

    name: str
    gpus: int
    hold_s: float
    members: Mapping[str, PoolMember]
    shares: Mapping[str, Share] = field(default_factory=dict)
    grants: Mapping[str, Grant] = field(default_factory=dict)
    drains: Mapping[str, DrainTimes] = field(default_factory=dict)
    order: tuple[ReclaimBy, ...] = tuple(ReclaimBy)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a pool lets a graph hold and guarantees it, GPUs, and as text which pool and who holds what the graph lacks."""

    gpus: int
    guaranteed: int
    note: str


@dataclass(frozen=True, slots=True)
class LocalPoolObservation:
    """All that the pool is shared out by.

    Attributes:
        before: Its file, with what the last allocation left.
        members: The graphs that exist or will, with their bids.
        states: Their statefiles; None: not there yet, or it cannot be read.
        now_s: Seconds of the graphs' clock.
    """

    before: PoolFile
    members: Mapping[str, PoolMember]
    states: Mapping[str, StateFile | None]
    now_s: float


_FILE: Final[TypeAdapter[PoolFile]] = TypeAdapter(PoolFile)


class PoolStore:
    """One pool's file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = StateStore(path)

    @classmethod
    def of(cls, name: str) -> PoolStore:
        """Return the store of a pool in the configured folder."""
        if re.fullmatch(DNS_LABEL_PATTERN, name) is None:
            raise ConfigError(
                f"NAME: {name!r} is not a name of a GpuPool; give lower-case letters, digits and inner hyphens"
            )
        return cls(state_dir() / f"{name}{SUFFIX}")

    @classmethod
    def all(cls) -> list[PoolStore]:
        """Return the pools of this machine."""
        return [cls(path) for path in sorted(state_dir().glob(f"*{SUFFIX}"))]

    def read(self) -> PoolFile:
        """Return the file.

        Raises:
            NotFoundError: there is none.
            ConfigError: it cannot be read.
        """
        self._lock.check_folder()
        try:
            return _FILE.validate_python(json.loads(read_own(self.path).decode("utf-8")))
        except FileNotFoundError:
            raise NotFoundError(
                f"{self.path}: no such pool; start one with `penstock up FILE… --pool FILE`"
            ) from None
        except (OSError, ValueError, ValidationError) as exc:
            raise ConfigError(
                f"{self.path}: cannot be read ({exc}); stop its graphs and start them again"
            ) from exc

    def found(self, pool: PoolFile) -> None:
        """Write a new pool over one whose graphs have all ended.

        Raises:
            ConfigError: a graph of the pool still runs.
        """
        with self._lock.locked():
            with contextlib.suppress(NotFoundError):
                left = [name for name in self.read().members if StateStore.of(name).path.exists()]
                if left:
                    raise ConfigError(
                        f"--pool: {pool.name} has graphs that run: {', '.join(left)}; stop them with `penstock down`, or give the "
                        "pool another name"
                    )
            self._write(pool)

    def remove(self) -> None:
        """Delete the file."""
        with self._lock.locked():
            self.path.unlink(missing_ok=True)
            self._lock.lock_path.unlink(missing_ok=True)

    def remove_if_over(self) -> None:
        """Delete the file once none of its graphs is there, nor comes; one that cannot be read stays."""
        with contextlib.suppress(ConfigError, ConflictError, NotFoundError), self._lock.locked():
            if not self._seen(self.read())[0]:
                self.path.unlink(missing_ok=True)
                self._lock.lock_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def ids_of_others(self, namespace: str) -> Iterator[frozenset[int]]:
        """Yield the GPU ids that the pool's other graphs hold, which take none while this is held."""
        with self._lock.locked():
            members, states = self._seen(self.read())
            yield frozenset(
                gpu
                for name, member in members.items()
                if name != namespace
                for gpu in _known_ids(name, member, states[name])
            )

    def claim(self, namespace: str, bid: tuple[int, ...] | None) -> Claim:
        """Bring a bid, share the pool out, and return what the graph may hold, which its statefile says from now on.

        Args:
            namespace: Of the graph.
            bid: GPUs of each replica wanted, in order of need; None: as before.
        """
        with self._lock.locked():
            observed = self._observe(namespace, bid)
            shared = _share_out(observed)
            if shared != observed.before:
                self._write(shared)
            grant = shared.grants[namespace]
            StateStore.of(namespace).update(lambda state: (_under(state, grant), None))
            return _status(shared, observed, namespace)

    def _observe(self, namespace: str, bid: tuple[int, ...] | None) -> LocalPoolObservation:
        """Return the pool as it is now, with a graph's latest bid."""
        before = self.read()
        members, states = self._seen(before)
        if namespace not in members:
            raise NotFoundError(f"{self.path}: has no graph {namespace}; start it with `penstock up`")
        own = states[namespace]
        now_s = SimulatedClock(1.0 if own is None else own.arbiter.speed).now_s()
        latest = members[namespace].bid if bid is None else bid
        members[namespace] = replace(members[namespace], bid=latest, said_s=now_s // WANTS_S * WANTS_S)
        return LocalPoolObservation(before, members, states, now_s)

    def rows(self) -> list[PoolRow]:
        """Return what each graph holds, may hold, wants, and whom it waits for."""
        pool = self.read()
        members, states = self._seen(pool)
        return pool_rows(_holdings(replace(pool, members=members), states))

    def cuts(self) -> list[str]:
        """Return of each graph whose drains were cut how many, and what was said of the last."""
        states = self._seen(self.read())[1]
        found = {name: cut_in_words(state.arbiter) for name, state in states.items() if state is not None}
        return [f"{name}: {words}" for name, words in found.items() if words]

    def note(self, namespace: str, speed: float) -> str:
        """Return as text what the pool says to a graph; empty where there is no such pool any more."""
        with contextlib.suppress(ConfigError, NotFoundError):
            pool = self.read()
            members, states = self._seen(pool)
            if namespace in members:
                now_s = SimulatedClock(speed).now_s()
                return _note(replace(pool, members=members), states, namespace, now_s)
        return ""

    def _seen(self, pool: PoolFile) -> tuple[dict[str, PoolMember], dict[str, StateFile | None]]:
        """Return the graphs that exist or will, and their statefiles, None where one is not there yet or cannot be read."""
        members: dict[str, PoolMember] = {}
        states: dict[str, StateFile | None] = {}
        for name, member in pool.members.items():
            store = StateStore.of(name)
            if not store.path.exists():
                # One whose `up` was killed comes no more; what it would have started on is free.
                if member.is_arriving and is_under_way(name):
                    members[name], states[name] = member, None
                continue
            members[name], states[name] = replace(member, is_arriving=False), store.read_quietly()
        return members, states

    def _write(self, pool: PoolFile) -> None:
        data: Any = _FILE.dump_python(pool, mode="json")
        replace_file(self.path, json.dumps(data, indent=2) + "\n")


def _share_out(observed: LocalPoolObservation) -> PoolFile:
    """Return the pool's file with what every graph may hold from now on."""
    pool, members, states, now_s = observed.before, observed.members, observed.states, observed.now_s
    bids = {
        name: _bid(member, states[name], pool.shares.get(name), now_s)
        for name, member in members.items()
        if member.is_arriving or states[name] is not None
    }
    shares = {name: share for name, share in pool.shares.items() if name in members}
    grants, after = allocate(PoolTerms(pool.gpus, pool.hold_s, pool.order), bids, shares, now_s)
    kept = {name: grant for name, grant in pool.grants.items() if name in members}
    drains = _drains(pool.drains, states, now_s)
    return replace(pool, members=members, shares=after, grants={**kept, **grants}, drains=drains)


def _status(shared: PoolFile, observed: LocalPoolObservation, namespace: str) -> Claim:
    """Return what a graph may hold and who holds what it lacks."""
    own = observed.states[namespace]
    note = _note(shared, observed.states, namespace, observed.now_s)
    if own is not None:
        note = with_cut_drain(note, own.arbiter.last_cut, observed.now_s - own.arbiter.last_cut_s)
    return Claim(shared.grants[namespace].gpus, observed.members[namespace].guaranteed, note)


def cut_in_words(arbiter: ArbiterInfo) -> str:
    """Return how many drains of a graph were cut, and what was said of the last; empty: none was."""
    if not arbiter.cut_drains:
        return ""
    return f"{count_of(arbiter.cut_drains, 'drain')} cut; the last: {arbiter.last_cut}"


def _ids(member: PoolMember, state: StateFile | None) -> frozenset[int]:
    return frozenset(member.starts_on) if state is None else state.gpus_in_use()


def _known_ids(name: str, member: PoolMember, state: StateFile | None) -> frozenset[int]:
    if state is None and not member.is_arriving:
        raise ConfigError(
            f"{StateStore.of(name).path}: cannot be read, so the GPUs of {name} are not known; repair it first"
        )
    return _ids(member, state)


def _bid(member: PoolMember, state: StateFile | None, share: Share | None, now_s: float) -> GraphBid:
    serial = (0 if share is None else share.serial) if state is None else state.arbiter.grant_serial
    held = len(_ids(member, state))
    is_bid_expired = member.said_s is not None and now_s - member.said_s > WANTS_VALID_S
    wants = _standing(state) if state is not None and is_bid_expired else member.bid
    return GraphBid(member.guaranteed, member.priority, member.max_gpus, wants, held, serial)


def _standing(state: StateFile) -> tuple[int, ...]:
    """Return the GPUs of each worker that stays, which is what a graph wants whose planner has stopped to say so."""
    return tuple(
        len(each.gpus)
        for each in state.entries.values()
        if each.gpus and (each.takes or each.state is not EntryState.DRAINING)
    )


def _drains(
    before: Mapping[str, DrainTimes], states: Mapping[str, StateFile | None], now_s: float
) -> dict[str, DrainTimes]:
    """Return the drain times of each graph; of one whose statefile says nothing now, those before."""
    found = {}
    for name, state in states.items():
        known = before.get(name) or DrainTimes()
        entries = {} if state is None else state.entries
        leaving = (
            key for key, each in entries.items() if each.state is EntryState.DRAINING and not each.takes
        )
        started_s = {key: known.started_s.get(key, now_s) for key in leaving}
        found[name] = known if state is None else known.updated(started_s, now_s)
    return found


def _holdings(pool: PoolFile, states: Mapping[str, StateFile | None]) -> dict[str, GraphHolding]:
    nothing = Grant(0, 0, 0, 0)
    return {
        name: GraphHolding(
            member.guaranteed,
            len(_ids(member, states[name])),
            pool.grants.get(name, nothing),
            pool.drains[name].expected_end_s if name in pool.drains else None,
        )
        for name, member in pool.members.items()
    }


def _note(pool: PoolFile, states: Mapping[str, StateFile | None], namespace: str, now_s: float) -> str:
    def when(at_s: float) -> str:
        return f"in {max(0.0, at_s - now_s):.0f} s"

    lacks = shortage_message(namespace, _holdings(pool, states), when)
    return f"GpuPool {pool.name}" + (f": {lacks}" if lacks else "")


def _under(state: StateFile, grant: Grant) -> StateFile:
    arbiter = replace(state.arbiter, budget=grant.gpus, grant_serial=grant.serial)
    return replace(state, arbiter=arbiter)
