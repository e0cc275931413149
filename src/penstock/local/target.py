"""The planner's way to the local backend: reads pools from the statefile, writes desired replicas into it.

It starts and stops nothing itself; the supervisor in the arbiter process makes the file true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, TypeVar

from penstock.api import WORKER_ROLES, Role
from penstock.core import logs
from penstock.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError
from penstock.core.local_state import EntryState
from penstock.local.pool import PoolStore
from penstock.local.probes import NoAnswer, Probes, frontend_of
from penstock.local.statefile import (
    ProcessEntry,
    ScaleOutcome,
    StateFile,
    SwitchOutcome,
    scale,
    switch,
    template,
)
from penstock.local.store import StateStore
from penstock_planner.decide.bounds.pool import bid_sizes
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import PoolCounts
from penstock_planner.observers import PlannerView
from penstock_planner.targets.base import Endpoint, TargetState

_log = logs.get_logger(__name__)

_ON_THE_WAY: Final = frozenset({EntryState.REQUESTED, EntryState.STARTING})


def target_state(state: StateFile) -> TargetState:
    """Return the pools, endpoints and whether an adjustment is in progress, from the file."""
    workers = {name: entry for name, entry in state.entries.items() if entry.is_worker}
    pools, failures = {}, {}
    for role in WORKER_ROLES:
        base = template(state, role)
        if base is not None:
            entries = [entry for entry in workers.values() if entry.role == role and not entry.is_switching]
            switching = sum(entry.is_switching and entry.takes == role for entry in workers.values())
            pools[role] = _pool(base, entries, switching)
            for entry in entries:
                if entry.state is EntryState.FAILED:
                    failures[role] = entry.reason or ""
    return TargetState(
        pools=pools,
        is_adjusting=any(_is_adjusting(entry) for entry in workers.values()),
        endpoints=tuple(
            Endpoint(name, Role(entry.role), entry.url)
            for name, entry in workers.items()
            if entry.state is EntryState.READY and entry.url is not None
        ),
        failures=failures,
    )


def _ids_of_others(state: StateFile) -> AbstractContextManager[frozenset[int]]:
    """Return the GPU ids that other graphs of its pool hold, and continue holding while the context lasts."""
    if not state.arbiter.pool:
        return nullcontext(frozenset())
    return PoolStore.of(state.arbiter.pool).ids_of_others(state.arbiter.namespace)


def _pool(base: ProcessEntry, entries: list[ProcessEntry], switching: int) -> PoolCounts:
    states = [entry.state for entry in entries]
    return PoolCounts(
        ready=states.count(EntryState.READY),
        starting=sum(state in _ON_THE_WAY for state in states) + switching,
        draining=states.count(EntryState.DRAINING),
        gpus=base.gpus_per_replica,
        switching=switching,
    )


def _is_adjusting(entry: ProcessEntry) -> bool:
    """A worker that was ready once and restarts after a crash is not an adjustment."""
    return entry.state is EntryState.DRAINING or (entry.state in _ON_THE_WAY and not entry.served)


OutcomeT = TypeVar("OutcomeT", ScaleOutcome, SwitchOutcome)


def _check(state: StateFile, *roles: Role) -> None:
    """Refuse what is asked of a graph that stops, or of roles that it does not have."""
    if state.arbiter.stopping:
        raise ClusterError(f"{state.arbiter.namespace}: the graph is being stopped; nothing is scaled")
    for role in roles:
        if template(state, role) is None:
            raise ClusterError(f"{state.arbiter.namespace}: has no {role} service to scale")


class LocalTarget:
    """Implements `penstock_planner.targets.base.Target` on one namespace's statefile."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._probes = Probes()
        self._bid: tuple[int, ...] | None = None

    async def close(self) -> None:
        """Close the connections to the router."""
        await self._probes.close()

    async def observe(self) -> TargetState:
        """Return the pools as the statefile has them; of a graph in a GPU pool with what it may hold now."""
        state = self._read()
        if not state.arbiter.pool:
            return target_state(state)
        try:
            claim = PoolStore.of(state.arbiter.pool).claim(state.arbiter.namespace, self._bid)
        except (ConfigError, ConflictError, NotFoundError) as exc:
            raise ClusterError(str(exc)) from exc
        return replace(
            target_state(self._read()), grant=claim.gpus, grant_note=claim.note, guaranteed=claim.guaranteed
        )

    def tick(self, view: PlannerView) -> None:
        """Do nothing: a bid changes with a decision."""

    def decided(self, decision: Decision, view: PlannerView) -> None:
        """Keep what a decision bids for, to bring it to the pool at the next look."""
        del view
        self._bid = bid_sizes(decision) or self._bid

    async def scale(self, role: Role, replicas: int, *, decision_id: str) -> None:
        """Write the desired ``replicas`` of ``role`` into the statefile.

        Added replicas get exclusive GPUs inside the budget, which existing workers count against until
        their process has ended. Of replicas to go, one that does not serve yet goes first, then the one with
        the fewest tokens in flight.
        """
        if replicas < 0:
            raise ClusterError(f"{role}: {replicas} desired replicas; must be 0 or more")
        before = self._read()
        loads = await self._loads(before)

        def change(state: StateFile) -> tuple[StateFile, ScaleOutcome]:
            _check(state, role)
            outcome = scale(state, role, replicas, loads, others)
            return outcome.state, outcome

        try:
            with _ids_of_others(before) as others:
                outcome = self._update(change)
        except (ConfigError, ConflictError, NotFoundError) as exc:
            raise ClusterError(str(exc)) from exc
        if outcome.added or outcome.removed:
            _log.info(
                "pool scaled",
                role=role.value,
                replicas=replicas,
                added=list(outcome.added),
                removed=list(outcome.removed),
                decision_id=decision_id,
            )
        if outcome.refusal is not None:
            raise ClusterError(f"{role} -> {replicas}: {outcome.refusal}")

    async def switch(
        self, giver: Role, taker: Role, *, replicas: Mapping[Role, int], decision_id: str
    ) -> None:
        """Write into the statefile which ready workers of ``giver`` drain to serve as ``taker``, those with the fewest tokens."""
        loads, wanted = (
            await self._loads(self._read()),
            {role.value: count for role, count in replicas.items()},
        )

        def change(state: StateFile) -> tuple[StateFile, SwitchOutcome]:
            _check(state, giver, taker)
            outcome = switch(state, giver, taker, wanted, loads)
            return outcome.state, outcome

        outcome = self._update(change)
        if outcome.refusal is not None:
            raise ClusterError(outcome.refusal)
        if outcome.switching:
            names = list(outcome.switching)
            _log.info(
                "workers switch", giver=giver.value, taker=taker.value, names=names, decision_id=decision_id
            )

    def _update(self, change: Callable[[StateFile], tuple[StateFile, OutcomeT]]) -> OutcomeT:
        try:
            return self._store.update(change)
        except ConfigError as exc:
            raise ClusterError(str(exc)) from exc

    def _read(self) -> StateFile:
        try:
            state = self._store.read()
        except ConfigError as exc:
            raise ClusterError(str(exc)) from exc
        if state is None:
            raise ClusterError(f"{self._store.path}: not there; start the graph with `penstock up FILE`")
        return state

    async def _loads(self, state: StateFile) -> Mapping[str, float]:
        """Return the router's count of tokens in flight by worker; empty when it does not answer."""
        view = await frontend_of(state, self._probes).view(state.entries)
        if isinstance(view, NoAnswer):
            return {}
        # A frontend that counts requests alone does so of every worker, so they are compared with each other.
        return {
            name: worker.inflight_requests if worker.inflight_tokens is None else worker.inflight_tokens
            for name, worker in view.workers.items()
        }
