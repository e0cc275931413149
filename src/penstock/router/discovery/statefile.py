"""The local backend's statefile as discovery, and a fixed list of workers from the command line.

The last good view survives a missing, partial or corrupt file. Its writer replaces the file atomically, so a bad one is
somebody else's doing: it is reported once and what was known goes on being served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.api import WORKER_ROLES, Role
from penstock.core.errors import ConfigError
from penstock.core.local_state import ARBITER_KEY, EMPTY_STATES, EntryState
from penstock.core.logs import get_logger
from penstock.router.core.worker import WorkerSpec
from penstock.runtimes import fill
from penstock.runtimes.engine_flags import kv_events_endpoint, kv_replay_endpoint


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


log = get_logger(__name__)


class StatefileDiscovery:
    """Polls one file.

    Attributes:
        problem: Why the newest read was of no use, or None.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._view: tuple[WorkerSpec, ...] = ()
        self._routers: tuple[str, ...] = ()
        self.problem: str | None = None

    def poll(self) -> tuple[WorkerSpec, ...] | None:
        """Return the workers if the file has changed since the last call, else None; never raises."""
        try:
            info = self._path.stat()
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
            if stamp == self._stamp:
                return None
            content = self._path.read_bytes()
            view, self._routers = parse_statefile(content), router_urls(content)
        except FileNotFoundError:
            self._stamp = None
            self._complain("the file does not exist yet or any more")
            return None
        except (OSError, ValueError) as exc:
            self._complain(str(exc))
            return None
        self._stamp = stamp
        if self.problem is not None:
            log.info("statefile readable", path=str(self._path))
        self.problem = None
        if view == self._view:
            return None
        self._view = view
        return view

    def routers(self) -> tuple[str, ...]:
        """Return the base URLs of the graph's routers as last seen."""
        return self._routers

    async def start(self) -> None:
        """Nothing to begin: each poll looks by itself."""

    async def close(self) -> None:
        """Nothing to end."""

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning(
                "statefile not usable; the last good view is kept",
                path=str(self._path),
                problem=problem,
                workers=len(self._view),
            )
        self.problem = problem


def parse_statefile(content: bytes) -> tuple[WorkerSpec, ...]:
    """Return the workers of a statefile; entries that are no workers, or unreadable, are left out.

    Raises:
        ValueError: not a JSON object.
    """
    specs = (_spec(name, entry) for name, entry in _entries(content).items())
    return tuple(spec for spec in specs if spec is not None)


def router_urls(content: bytes) -> tuple[str, ...]:
    """Return the base URLs of a statefile's routers.

    Raises:
        ValueError: not a JSON object.
    """
    return tuple(url for url in map(_router_url, _entries(content).values()) if url)


def _entries(content: bytes) -> dict[str, Any]:
    data = orjson.loads(content)
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, found {type(data).__name__}")  # noqa: TRY004 - one type for all bad content
    return {name: entry for name, entry in data.items() if name != ARBITER_KEY}


def _router_url(entry: Any) -> str:
    if not isinstance(entry, dict) or entry.get("role") != Role.ROUTER:
        return ""
    url = entry.get("url")
    return url.rstrip("/") if isinstance(url, str) and url.startswith("http://") else ""


def _spec(name: str, entry: Any) -> WorkerSpec | None:
    if not isinstance(entry, dict) or entry.get("role") not in WORKER_ROLES:
        return None
    state, url = entry.get("state"), entry.get("url")
    if state in EMPTY_STATES or not isinstance(url, str) or not url.startswith("http://"):
        return None
    if state not in set(EntryState):
        log.warning("statefile entry with an unknown state is not served", worker=name, state=str(state))
        return None
    kv_events, kv_replay = _kv_endpoints(entry)
    return WorkerSpec(
        name=name,
        role=Role(entry["role"]),
        url=url.rstrip("/"),
        ready=state == EntryState.READY,
        draining=state == EntryState.DRAINING,
        supervised=state != EntryState.DRAINING,
        incarnation=f"{entry.get('pid')}/{entry.get('started')}/{entry.get('restarts')}",
        reason="" if state in {EntryState.READY, EntryState.DRAINING} else str(state),
        kv_events=kv_events,
        kv_replay=kv_replay,
    )


def _kv_endpoints(entry: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return where the worker's own command makes it publish KV events, and answer for earlier ones."""
    command, ports = entry.get("cmd"), entry.get("ports")
    if not isinstance(command, list) or not isinstance(ports, dict):
        return None, None
    found = kv_events_endpoint(command), kv_replay_endpoint(command)
    events, replay = (None if each is None else fill(each, ports) for each in found)
    return events, replay
