"""The statefile's model: what it says, how its entries are named, how it reads and writes as JSON.

The arbiter, the planner's target and the command line share it; `store` puts it on disk. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from penstock_core.errors import ConfigError

ARBITER_KEY: Final = "arbiter"
"""The one top-level key that is not a process entry."""

PORT: Final = "port"
"""Placeholder of the port that a process serves HTTP on."""

PLANNER_ROLE: Final = "planner"
ROUTER_ROLE: Final = "router"
WORKER_ROLES: Final = frozenset({"prefill", "decode", "aggregated"})


class EntryState(StrEnum):
    """Where one process stands; the arbiter's supervisor moves it on."""

    REQUESTED = "requested"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


REPLICA_STATES: Final = frozenset({EntryState.REQUESTED, EntryState.STARTING, EntryState.READY})
"""States that count towards a pool's replicas; a draining worker is on its way out."""

EMPTY_STATES: Final = frozenset({EntryState.FAILED, EntryState.STOPPED})
"""States without a process and without GPUs; their names are free for the next replica."""


@dataclass(frozen=True, slots=True)
class ArbiterInfo:
    """The background process that owns the file.

    Attributes:
        pid: Process id; 0 until the arbiter has written itself.
        create_time: When that process started, seconds since the epoch; tells a reused pid from the arbiter.
        endpoint: circus' controller (zmq).
        pubsub_endpoint: circus' event publisher (zmq).
        namespace: Name of this graph on this machine.
        graph: Path of the manifest.
        model: Name under which the model is served.
        speed: Modelled seconds per real second.
        log_dir: Folder of the processes' logs.
        gpus: GPUs of the host that the allocator may hand out (ids 0 to gpus - 1).
        budget: Most GPUs that workers may hold at once, <= gpus.
        router_url: Where clients send requests.
        planner_log_dir: The planner's TensorBoard folder and ledger; None without a planner.
        stopping: True from the moment the graph is being stopped; nothing may be added any more.
    """

    pid: int
    create_time: float
    endpoint: str
    pubsub_endpoint: str
    namespace: str
    graph: str
    model: str
    speed: float
    log_dir: str
    gpus: int
    budget: int
    router_url: str
    planner_log_dir: str | None = None
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One process: the desired state, and what the supervisor has seen of it.

    Attributes:
        service: The graph's service that it is a replica of; ``planner`` for the planner.
        role: router, prefill, decode, aggregated or planner.
        cmd: Arguments with placeholders such as ``{port}``.
        env: Variables on top of the arbiter's own, with placeholders.
        state: See `EntryState`.
        url: Address, or None for a process that does not listen.
        placeholders: Names of the ports that ``cmd`` and ``env`` want filled in.
        ports: Chosen TCP ports by placeholder; empty until the first start.
        health_path: Answers 200 once it serves, or None for a process that does not listen.
        pid: Running process, or None.
        create_time: When that process started, seconds since the epoch.
        gpus: Exclusive GPU ids.
        gpus_per_replica: How many GPU ids a replica of this service needs.
        grace_s: terminationGracePeriodSeconds, modelled seconds.
        startup_s: Time it may take to answer its first health check, modelled seconds.
        served: It has been ready once since it was asked for.
        restarts: How often it was restarted after a crash.
        reason: Why it is not serving, or None.
        order: Rises with every replica asked for; the newest has the largest.
    """

    service: str
    role: str
    cmd: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    state: EntryState = EntryState.REQUESTED
    url: str | None = None
    placeholders: tuple[str, ...] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    health_path: str | None = None
    pid: int | None = None
    create_time: float | None = None
    gpus: tuple[int, ...] = ()
    gpus_per_replica: int = 0
    grace_s: float = 30.0
    startup_s: float = 600.0
    served: bool = False
    restarts: int = 0
    reason: str | None = None
    order: int = 0

    @property
    def port(self) -> int | None:
        """The port that `url` names, or None until one is chosen."""
        return self.ports.get(PORT)

    @property
    def is_worker(self) -> bool:
        """True for a process that serves a model, and so is scaled and drained."""
        return self.role in WORKER_ROLES

    @property
    def is_replica(self) -> bool:
        """True while it counts towards its pool."""
        return self.state in REPLICA_STATES


@dataclass(frozen=True, slots=True)
class StateFile:
    """The whole file: its owner and all entries by name, in the order they were made."""

    arbiter: ArbiterInfo
    entries: Mapping[str, Entry]

    def with_entry(self, name: str, entry: Entry) -> StateFile:
        """Return a copy in which ``name`` is ``entry``."""
        return replace(self, entries={**self.entries, name: entry})

    def without(self, name: str) -> StateFile:
        """Return a copy without ``name``; the same file when it was not there."""
        if name not in self.entries:
            return self
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key != name})

    def change(self, name: str, **fields: Any) -> StateFile:
        """Return a copy with some fields of one entry replaced; unchanged when the entry is gone."""
        entry = self.entries.get(name)
        return self if entry is None else self.with_entry(name, replace(entry, **fields))

    def gpus_in_use(self) -> frozenset[int]:
        """Return every GPU id that an entry holds, draining ones included."""
        return frozenset(gpu for entry in self.entries.values() for gpu in entry.gpus)

    def next_order(self) -> int:
        """Return the order of the next replica asked for."""
        return 1 + max((entry.order for entry in self.entries.values()), default=0)


def base_name(namespace: str, service: str) -> str:
    """Return the name of a service's first replica, which stays in the file for its command."""
    return f"{namespace}_{service}"


def is_base(state: StateFile, name: str) -> bool:
    """Return whether ``name`` is the un-suffixed entry of its service."""
    entry = state.entries.get(name)
    return entry is not None and name == base_name(state.arbiter.namespace, entry.service)


def free_name(state: StateFile, service: str) -> str:
    """Return the name for one more replica of ``service``.

    A name without a process (stopped, failed) is used again before a new one is made, the base name first,
    then the lowest suffix: ``ns_svc``, ``ns_svc_1``, ``ns_svc_2``.
    """
    base = base_name(state.arbiter.namespace, service)
    name, suffix = base, 0
    while name in state.entries and state.entries[name].state not in EMPTY_STATES:
        suffix += 1
        name = f"{base}_{suffix}"
    return name


def retire(state: StateFile, name: str) -> StateFile:
    """Return the file after the process of ``name`` has ended for good.

    The base entry stays as ``stopped``, because its command starts the next replica; others go.
    """
    if not is_base(state, name):
        return state.without(name)
    return state.change(
        name,
        state=EntryState.STOPPED,
        gpus=(),
        pid=None,
        create_time=None,
        url=None,
        ports={},
        served=False,
        reason=None,
    )


def entry_to_json(entry: Entry) -> dict[str, Any]:
    """Return one entry as the file spells it; a stopped one carries no resources, as documented."""
    data: dict[str, Any] = {
        "service": entry.service,
        "role": entry.role,
        "cmd": list(entry.cmd),
        "env": dict(entry.env),
        "url": entry.url,
        "port": entry.port,
        "ports": dict(entry.ports),
        "placeholders": list(entry.placeholders),
        "health_path": entry.health_path,
        "pid": entry.pid,
        "create_time": entry.create_time,
        "state": entry.state.value,
        "resources": {"gpus": list(entry.gpus)},
        "served": entry.served,
        "restarts": entry.restarts,
        "reason": entry.reason,
        "gpus_per_replica": entry.gpus_per_replica,
        "grace_s": entry.grace_s,
        "startup_s": entry.startup_s,
        "order": entry.order,
    }
    if entry.state is EntryState.STOPPED:
        del data["resources"]
    return data


def to_json(state: StateFile) -> dict[str, Any]:
    """Return the whole file as JSON data, the arbiter first."""
    arbiter = state.arbiter
    data: dict[str, Any] = {
        ARBITER_KEY: {name: getattr(arbiter, name) for name in ArbiterInfo.__dataclass_fields__}
    }
    data.update((name, entry_to_json(entry)) for name, entry in state.entries.items())
    return data


def from_json(data: object, *, source: str) -> StateFile:
    """Read the file; unknown keys are ignored and missing ones get their defaults.

    Args:
        data: Parsed JSON.
        source: File name, for messages.

    Raises:
        ConfigError: the file is not a statefile; the message says what is wrong and how to go on.
    """
    if not isinstance(data, dict) or not isinstance(data.get(ARBITER_KEY), dict):
        raise ConfigError(
            f"{source}: not a statefile: key {ARBITER_KEY!r} is missing; delete the file and run `penstock up`"
        )
    arbiter = _arbiter(data[ARBITER_KEY], source)
    entries = {}
    for name, fields in data.items():
        if name == ARBITER_KEY:
            continue
        entries[name] = _entry(fields, f"{source}: {name}")
    return StateFile(arbiter, entries)


def _arbiter(fields: Mapping[str, Any], source: str) -> ArbiterInfo:
    defaults: dict[str, Any] = {
        "pid": 0,
        "create_time": 0.0,
        "endpoint": "",
        "pubsub_endpoint": "",
        "namespace": source.rsplit("/", 1)[-1].removesuffix(".json"),
        "graph": "",
        "model": "",
        "speed": 1.0,
        "log_dir": "",
        "gpus": 0,
        "router_url": "",
    }
    known = {key: value for key, value in fields.items() if key in ArbiterInfo.__dataclass_fields__}
    merged = {**defaults, **known}
    merged.setdefault("budget", merged["gpus"])
    speed = merged["speed"]
    if not isinstance(speed, int | float) or not (math.isfinite(speed) and speed > 0):
        raise ConfigError(f"{source}: arbiter.speed: {speed!r} must be a finite number above 0")
    return ArbiterInfo(**merged)


def _entry(fields: object, place: str) -> Entry:
    remedy = "run `penstock down --now`, or delete the file when nothing runs"
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: must be an object, not {type(fields).__name__}; {remedy}")
    try:
        state = EntryState(fields.get("state", EntryState.REQUESTED))
    except ValueError:
        known = ", ".join(EntryState)
        raise ConfigError(f"{place}.state: {fields['state']!r} is none of {known}; {remedy}") from None
    for key in ("service", "role"):
        if not isinstance(fields.get(key), str):
            raise ConfigError(f"{place}.{key}: missing; {remedy}")
    resources = fields.get("resources")
    gpus = resources.get("gpus", ()) if isinstance(resources, dict) else ()
    kept = {key: fields[key] for key in _PLAIN_FIELDS if key in fields}
    return Entry(
        service=fields["service"],
        role=fields["role"],
        cmd=tuple(_texts(fields.get("cmd", ()))),
        env=dict(fields.get("env") or {}),
        ports=_ports(fields),
        placeholders=tuple(_texts(fields.get("placeholders", ()))),
        state=state,
        gpus=tuple(gpus),
        **kept,
    )


def _ports(fields: Mapping[str, Any]) -> dict[str, int]:
    ports = fields.get("ports")
    if isinstance(ports, dict):
        return dict(ports)
    return {PORT: fields["port"]} if isinstance(fields.get("port"), int) else {}


def _texts(values: Iterable[object]) -> Iterable[str]:
    return (str(value) for value in values)


_PLAIN_FIELDS: Final = (
    "url",
    "health_path",
    "pid",
    "create_time",
    "gpus_per_replica",
    "grace_s",
    "startup_s",
    "served",
    "restarts",
    "reason",
    "order",
)
