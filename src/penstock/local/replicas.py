"""Pure edits of the statefile that add and withdraw replicas with GPUs of their own; applied under its lock."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from penstock.core.errors import ClusterError
from penstock.core.local_state import EntryState
from penstock.local.statefile import NO_PROCESS, ProcessEntry, StateFile, base_name, free_name, retire


class GpuShortageError(ClusterError):
    """No ids could be given; the message says how many are in use, the bound and the remedy."""


def allocate(needed: int, in_use: Collection[int], *, gpus: int, budget: int) -> tuple[int, ...]:
    """Choose ``needed`` free ids, neighbours if there are such, else the lowest; raises GpuShortageError.

    Neighbours come first because GPUs with adjacent ids usually share the fastest link.
    Among runs of neighbours the shortest that fits is cut, so that long runs stay contiguous.
    """
    if needed <= 0:
        return ()
    ceiling = min(budget, gpus)
    used = len(set(in_use))
    if used + needed > ceiling:
        bound = f"maxGpuBudget {budget}" if budget <= gpus else f"the host's {gpus} GPUs (--gpus)"
        raise GpuShortageError(
            f"needs {needed} GPU{'s' if needed > 1 else ''}, but {used} of {bound} are held by existing workers, "
            "draining ones included; wait for a drain to end, or raise the bound"
        )
    free = sorted(set(range(gpus)) - set(in_use))
    if len(free) < needed:
        raise GpuShortageError(
            f"needs {needed} GPUs, but only {len(free)} of the host's {gpus} are free (--gpus)"
        )
    fitting = [run for run in _runs(free) if len(run) >= needed]
    chosen = min(fitting, key=lambda run: (len(run), run[0])) if fitting else free
    return tuple(chosen[:needed])


def _runs(ids: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for gpu in ids:
        if runs and runs[-1][-1] == gpu - 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return runs


_VICTIM_RANK = {EntryState.REQUESTED: 0, EntryState.STARTING: 1, EntryState.READY: 2}
WITHDRAWN = "withdrawn before it was ready"


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """What one scaling step made of the file."""

    state: StateFile
    added: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    refusal: str | None = None


def template(state: StateFile, role: str) -> ProcessEntry | None:
    """Return the base entry of the service with ``role``: its command starts every replica."""
    namespace = state.arbiter.namespace
    for name, entry in state.entries.items():
        if entry.role == role and name == base_name(namespace, entry.service):
            return entry
    return None


def replicas_of(state: StateFile, role: str) -> dict[str, ProcessEntry]:
    """Return the entries that count as replicas of ``role``, by name."""
    return {name: entry for name, entry in state.entries.items() if entry.role == role and entry.is_replica}


def request_replica(state: StateFile, base: ProcessEntry) -> tuple[StateFile, str]:
    """Add one ``requested`` entry with its own GPUs; raises GpuShortageError."""
    name = free_name(state, base.service)
    gpus = allocate(
        base.gpus_per_replica, state.gpus_in_use(), gpus=state.arbiter.gpus, budget=state.arbiter.budget
    )
    order = state.next_order()
    entry = replace(base, state=EntryState.REQUESTED, gpus=gpus, restarts=0, order=order, **NO_PROCESS)
    return state.with_entry(name, entry), name


def choose_victim(candidates: Mapping[str, ProcessEntry], inflight_tokens: Mapping[str, float]) -> str:
    """Return the replica whose removal costs least.

    One that does not serve yet goes first (requested before starting), then the one with the fewest
    tokens in flight; ties and unknown loads fall to the newest, whose cache is coldest.
    """

    def cost(name: str) -> tuple[int, float, int]:
        entry = candidates[name]
        return _VICTIM_RANK[entry.state], inflight_tokens.get(name, math.inf), -entry.order

    return min(candidates, key=cost)


def withdraw(state: StateFile, name: str) -> StateFile:
    """Take a replica out of its pool.

    Without a process it leaves the file at once and its GPUs are free; with one it keeps them,
    as ``draining``, until the supervisor has observed the process end.
    """
    entry = state.entries[name]
    if entry.state is EntryState.REQUESTED and entry.pid is None:
        return retire(state, name)
    reason = WITHDRAWN if entry.state is EntryState.STARTING else None
    return state.change(name, state=EntryState.DRAINING, reason=reason)


def scale(state: StateFile, role: str, replicas: int, inflight_tokens: Mapping[str, float]) -> ScaleOutcome:
    """Bring the pool of ``role`` to ``replicas``, draining and failed ones not counted; twice changes nothing more."""
    base = template(state, role)
    added: list[str] = []
    withdrawn: list[str] = []
    while base is not None and len(replicas_of(state, role)) < replicas:
        try:
            state, name = request_replica(state, base)
        except GpuShortageError as exc:
            return ScaleOutcome(state, tuple(added), refusal=f"{base.service}: {exc}")
        added.append(name)
    while len(current := replicas_of(state, role)) > replicas:
        victim = choose_victim(current, inflight_tokens)
        state = withdraw(state, victim)
        withdrawn.append(victim)
    return ScaleOutcome(state, tuple(added), tuple(withdrawn))
