"""What mode ``adaptive`` remembers between decisions; plain numbers, so that the ledger can hold it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.api import Role
from penstock.planner.decide.adaptive import hindsight
from penstock.planner.decide.adaptive.hindsight import Growth, Hindsight, ShadowFleets
from penstock.planner.decide.adaptive.recurrence import Recurrence
from penstock.planner.decide.decision import Memory

MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class Trend:
    """Brown's double exponential smoothing: two averages, the second of the first.

    Attributes:
        first: Exponential average of the values.
        second: Exponential average of ``first``.
        noise: Average of the squared deviations from ``first``, each times the seconds that it lasted.
        seen_s: Seconds followed so far.
    """

    first: float = 0.0
    second: float = 0.0
    noise: float = 0.0
    seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """Prefill work at the frontend.

    Attributes:
        rate: Of requests/s arriving.
        level: Requests/s over the last seconds, without a slope.
        sized: Requests, decayed over minutes.
        sized_tokens: Their uncached tokens, decayed alike.
        done_tokens: Tokens whose prefill ended, decayed over busy time.
        busy_s: Worker-seconds in which a prompt was being computed, decayed alike.
        overdue: First tokens that came while a request had waited longer than the SLO, decayed over hours.
        overdue_in_time: Those of them that were in time, decayed alike: none where the first to arrive is always next.
    """

    rate: Trend = Trend()
    level: float = 0.0
    sized: float = 0.0
    sized_tokens: float = 0.0
    done_tokens: float = 0.0
    busy_s: float = 0.0
    overdue: float = 0.0
    overdue_in_time: float = 0.0


@dataclass(frozen=True, slots=True)
class KvLoad:
    """KV cache in use, in workers' worth.

    Attributes:
        load: Of KV usage summed over workers, waiting requests' share included.
        light_s: Worker-seconds of KV over some minutes, as if every worker had decoded as fast as an idle one.
        done_tokens: Uncached tokens whose prefill ended, decayed alike.
    """

    load: Trend = Trend()
    light_s: float = 0.0
    done_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Supply and restraint of one role.

    Attributes:
        ready: At the newest pull; None before the first.
        begun_s: When each replica that starts now was first seen, oldest first.
        startup_s: Learnt time from asked for to ready; None before the first.
        grown_s: When replicas were last added; None before that.
        shrunk_s: When replicas were last removed; None before that.
    """

    ready: int | None = None
    begun_s: tuple[float, ...] = ()
    startup_s: float | None = None
    grown_s: float | None = None
    shrunk_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdaptiveMemory:
    """Everything.

    Attributes:
        pulled_s: Time of the newest pull that was followed; None before the first.
        work: Of the prefill (or aggregated) workers.
        kv: Of the decode (or aggregated) workers.
        roles: By role.
        hindsight: Which floor would have been best, by role.
        quiet_since_s: Since when nothing has been at the frontend; None: something was at the newest pull, it is not known, or the
            graph does not scale to zero.
        unserved_s: When a role was last seen without a ready replica; None: not so far.
    """

    pulled_s: float | None = None
    work: Work = Work()
    kv: KvLoad = KvLoad()
    roles: Mapping[Role, RoleMemory] = field(default_factory=dict)
    hindsight: Mapping[Role, Hindsight] = field(default_factory=dict)
    quiet_since_s: float | None = None
    unserved_s: float | None = None

    def of(self, role: Role) -> RoleMemory:
        """Return the role's memory, a blank one if there is none."""
        return self.roles.get(role, RoleMemory())


def resumed(memory: AdaptiveMemory, by_s: float, now_s: float) -> AdaptiveMemory:
    """Return the memory after a restart, on a clock that shows ``by_s`` more; no time is after ``now_s``.

    Starts in progress count from now, because their end was not observed.
    """

    def moved(at_s: float | None) -> float | None:
        return None if at_s is None else min(at_s + by_s, now_s)

    roles = {
        role: dataclasses.replace(
            each,
            begun_s=(now_s,) * len(each.begun_s),
            grown_s=moved(each.grown_s),
            shrunk_s=moved(each.shrunk_s),
        )
        for role, each in memory.roles.items()
    }
    return dataclasses.replace(
        memory,
        pulled_s=moved(memory.pulled_s),
        roles=roles,
        quiet_since_s=moved(memory.quiet_since_s),
        unserved_s=moved(memory.unserved_s),
    )


def carried(memory: AdaptiveMemory) -> AdaptiveMemory:
    """Return what another graph of the same model starts from: durations and speeds, not this fleet nor its traffic."""
    return AdaptiveMemory(
        work=dataclasses.replace(memory.work, rate=Trend(), level=0.0),
        kv=dataclasses.replace(memory.kv, load=Trend()),
        roles={role: RoleMemory(startup_s=each.startup_s) for role, each in memory.roles.items()},
        hindsight={role: hindsight.carried(each) for role, each in memory.hindsight.items()},
    )


def read(plain: Memory) -> AdaptiveMemory:
    """Return what `write` wrote; of another mode's memory, and of none, a blank one.

    Raises:
        KeyError, TypeError, ValueError: the data is not such a memory.
    """
    data: Any = plain.get("adaptive")
    if data is None:
        return AdaptiveMemory()
    work, kv = data["work"], data["kv"]
    return AdaptiveMemory(
        pulled_s=data["pulled_s"],
        work=_made(Work, work, rate=Trend(**work["rate"])),
        kv=_made(KvLoad, kv, load=Trend(**kv["load"])),
        roles={Role(role): _made(RoleMemory, plain) for role, plain in data["roles"].items()},
        # Floors of a version with other fleets are learnt again.
        hindsight={
            Role(role): _hindsight(plain)
            for role, plain in data.get("hindsight", {}).items()
            if "recurrence" in plain
        },
        quiet_since_s=data.get("quiet_since_s"),
        unserved_s=data.get("unserved_s"),
    )


def _hindsight(plain: Mapping[str, Any]) -> Hindsight:
    fleets = {growth: _made(ShadowFleets, plain["fleets"][growth]) for growth in Growth}
    recurrence = _made(Recurrence, plain["recurrence"])
    return _made(Hindsight, plain, growth=Growth(plain["growth"]), fleets=fleets, recurrence=recurrence)


def _made(kind: Callable[..., MadeT], plain: Mapping[str, Any], **built: Any) -> MadeT:
    """Return a memory from its plain form: lists as tuples, keys of other versions left out or blank."""
    known = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in plain.items()
        if key in known
    }
    return kind(**{**values, **built})


def write(memory: AdaptiveMemory) -> Memory:
    """Return plain data for `PlannerState.memory`."""
    plain = dataclasses.asdict(dataclasses.replace(memory, hindsight={}))
    plain["roles"] = {role.value: fields for role, fields in plain["roles"].items()}
    plain["hindsight"] = {role.value: _shallow(each) for role, each in memory.hindsight.items()}
    for each in plain["hindsight"].values():
        each |= {
            "growth": each["growth"].value,
            "recurrence": _shallow(each["recurrence"]),
            "fleets": {growth.value: _shallow(fleets) for growth, fleets in each["fleets"].items()},
        }
    return {"adaptive": plain}


def _shallow(made: Any) -> dict[str, Any]:
    """Return a dataclass's fields as they are: `asdict` would copy every number of hundreds."""
    return {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
