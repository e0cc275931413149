"""Discovery of workers by a fixed list or by the local backend's statefile; `kubernetes` is the third kind.

The last good view is used while the statefile is missing, incomplete or corrupt. Its writer replaces the file atomically, so
a corrupt file was written by another process: it is reported once, and the router continues with the last good view.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.api import WORKER_ROLES, Role
from penstock.core.errors import ConfigError
from penstock.core.local_state import ARBITER_KEY, EMPTY_STATES, EntryState
from penstock.core.logs import get_logger
from penstock.router.core.worker import WorkerSpec
from penstock.runtimes import fill
from penstock.runtimes.engine_flags import kv_events_endpoint, kv_replay_endpoint
from penstock.runtimes.protocol import SIDE_CHANNEL_PORT

log = get_logger(__name__)

_WORKER_URL: Final = re.compile(r"https?://[^/]")


class Discovery:
    """Lists the workers of a fixed fleet; subclasses follow workers that are added and removed.

    Attributes:
        routers: Base URLs of the graph's routers as last seen, this router's own included; None for a fixed fleet.
    """

    def __init__(self, workers: tuple[WorkerSpec, ...] = (), routers: tuple[str, ...] | None = None) -> None:
        self.routers = routers
        self._problem: str | None = None
        self._view: tuple[WorkerSpec, ...] = ()
        self._found = workers

    @property
    def problem(self) -> str | None:
        """Why the list of workers may be out of date; None if it is current."""
        return self._problem

    async def start(self) -> None:
        """Start to follow the workers; returns when they are first known, or after a limited wait."""

    async def close(self) -> None:
        """Stop what `start` started."""

    def poll(self) -> tuple[WorkerSpec, ...] | None:
        """Return the workers if they have changed since the last call, else None; never raises and never blocks."""
        self._refresh()
        if self._found == self._view:
            return None
        self._view = self._found
        return self._view

    async def graph(self) -> dict[str, Any]:
        """Return the graph's object on Kubernetes; an empty dict for other kinds of discovery."""
        return {}

    def _refresh(self) -> None:
        """Update the view, if it can be read."""


class StatefileDiscovery(Discovery):
    """Discovery by the local backend's statefile, in which that backend lists the processes of a graph.

    The file is read again when it has changed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(routers=())
        self._path = path
        self._stamp: tuple[int, int, int] | None = None

    def _refresh(self) -> None:
        try:
            info = self._path.stat()
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
            if stamp == self._stamp:
                return
            self._found, self.routers = parse_statefile(self._path.read_bytes())
        except FileNotFoundError:
            self._stamp = None
            self._complain("the file does not exist yet or any more")
        except (OSError, ValueError) as exc:
            self._complain(str(exc))
        else:
            self._stamp = stamp
            if self._problem is not None:
                log.info("statefile readable", path=str(self._path))
            self._problem = None

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning(
                "statefile not usable; the last good view is kept",
                path=str(self._path),
                problem=problem,
                workers=len(self._view),
            )
        self._problem = problem


def parse_static_workers(values: Sequence[str]) -> tuple[WorkerSpec, ...]:
    """Return the workers of a fixed fleet, as the ``role=url`` arguments ``values`` list them.

    Their names are the role and a number: ``prefill-0``, ``prefill-1`` and so on.

    Raises:
        ConfigError: a value is not ``role=http://host:port`` or ``role=https://host:port``.
    """
    found: list[WorkerSpec] = []
    for value in values:
        role_text, _, url = value.partition("=")
        if role_text not in WORKER_ROLES or _WORKER_URL.match(url) is None:
            roles = ", ".join(WORKER_ROLES)
            raise ConfigError(
                f"--worker: {value!r}: write role=http://host:port, or https, with a role of {roles}"
            )
        role = Role(role_text)
        number = sum(each.role is role for each in found)
        found.append(WorkerSpec(name=f"{role}-{number}", role=role, url=url.rstrip("/")))
    return tuple(found)


def parse_statefile(content: bytes) -> tuple[tuple[WorkerSpec, ...], tuple[str, ...]]:
    """Return the workers in a statefile, and the base URLs of the graph's routers; other entries are ignored.

    ``content`` is the content of the file, in which the local backend lists the processes of a graph as JSON.

    Raises:
        ValueError: the content is not a JSON object.
    """
    data = orjson.loads(content)
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, found {type(data).__name__}")  # noqa: TRY004 - one type for all bad content
    workers, routers = [], []
    for name, entry in data.items():
        url = entry.get("url") if isinstance(entry, dict) and name != ARBITER_KEY else None
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            continue
        if entry.get("role") == Role.ROUTER:
            routers.append(url.rstrip("/"))
        elif entry.get("role") in WORKER_ROLES and entry.get("state") not in EMPTY_STATES:
            workers += _worker(name, entry)
    return tuple(workers), tuple(routers)


def _worker(name: str, entry: dict[str, Any]) -> list[WorkerSpec]:
    state = entry.get("state")
    if state not in set(EntryState):
        log.warning("statefile entry with an unknown state is not served", worker=name, state=str(state))
        return []
    kv_events, kv_replay = _kv_endpoints(entry)
    spec = WorkerSpec(
        name=name,
        role=Role(entry["role"]),
        url=entry["url"].rstrip("/"),
        ready=state == EntryState.READY,
        draining=state == EntryState.DRAINING,
        supervised=state != EntryState.DRAINING,
        incarnation=f"{entry.get('pid')}/{entry.get('started')}/{entry.get('restarts')}",
        reason="" if state in {EntryState.READY, EntryState.DRAINING} else _why(entry, str(state)),
        kv_events=kv_events,
        kv_replay=kv_replay,
        side_channel_port=_side_channel_port(entry),
    )
    return [spec]


def _why(entry: dict[str, Any], state: str) -> str:
    """Return why an entry's worker is not ready: the cause that its supervisor found, else its state."""
    reason = entry.get("reason")
    return reason if isinstance(reason, str) and reason else state


def _side_channel_port(entry: dict[str, Any]) -> int | None:
    ports = entry.get("ports")
    found = ports.get(SIDE_CHANNEL_PORT) if isinstance(ports, dict) else None
    return found if isinstance(found, int) else None


def _kv_endpoints(entry: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the endpoints at which the worker publishes KV events and replays earlier ones, by its command line; None if it has none."""
    command, ports = entry.get("cmd"), entry.get("ports")
    if not isinstance(command, list) or not isinstance(ports, dict):
        return None, None
    found = kv_events_endpoint(command), kv_replay_endpoint(command)
    events, replay = (None if each is None else fill(each, ports) for each in found)
    return events, replay
