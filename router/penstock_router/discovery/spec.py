"""One worker as discovery reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_core.errors import ConfigError
from penstock_graph.models import WORKER_ROLES, Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker that exists or is about to.

    Attributes:
        name: Unique name; the local backend's entry name.
        role: prefill, decode or aggregated.
        url: Base URL without a trailing slash.
        ready: Discovery says that it serves.
        draining: Discovery says that it is leaving: nothing new goes there.
        supervised: Somebody restarts it when it dies, so requests may wait for it.
        incarnation: Changes with every start of the process; what was learnt about the last one is void.
        reason: Why it is not ready, or empty.
        kv_events_port: Where it publishes KV events; None: on the graph's port, if at all.
    """

    name: str
    role: Role
    url: str
    ready: bool = True
    draining: bool = False
    supervised: bool = False
    incarnation: str = ""
    reason: str = ""
    kv_events_port: int | None = None


def parse_static_workers(values: Sequence[str]) -> tuple[WorkerSpec, ...]:
    """Read a fixed fleet from ``role=url`` arguments; names become ``role-0``, ``role-1``...

    Raises:
        ConfigError: a value is not ``role=http://host:port``.
    """
    found: list[WorkerSpec] = []
    for value in values:
        role_text, _, url = value.partition("=")
        if role_text not in WORKER_ROLES or not url.startswith("http://") or len(url) <= len("http://"):
            roles = ", ".join(WORKER_ROLES)
            raise ConfigError(f"--worker: {value!r}: write role=http://host:port with a role of {roles}")
        role = Role(role_text)
        number = sum(each.role is role for each in found)
        found.append(WorkerSpec(name=f"{role}-{number}", role=role, url=url.rstrip("/")))
    return tuple(found)
