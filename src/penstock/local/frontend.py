"""What the local backend asks of the process that takes requests: Penstock's router, or a runtime's own frontend.

A runtime with its own registers a class that follows `Frontend` as an entry point of group ``penstock.frontends``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

from penstock.core.plugins import plugin
from penstock.local.probes import NoAnswer, Probes, RouterQueue, RouterView, Traffic, WorkerView
from penstock.local.statefile import ProcessEntry, StateFile

GROUP: Final = "penstock.frontends"


class Frontend(Protocol):
    """Where requests come in.

    Attributes:
        settle_s: Real seconds after a drain has begun in which a request that was assigned before may still reach
            the worker.
    """

    settle_s: float

    async def readiness(self, entries: Mapping[str, ProcessEntry]) -> tuple[bool, str]:
        """Return whether a request would be served now, and why not."""
        ...

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:
        """See to it that the worker is sent nothing new; True when that is certain."""
        ...

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:
        """Return what the frontend says of workers.

        Args:
            entries: At least those that the caller wants to know of.
        """
        ...


class RouterFrontend:
    """Penstock's router, which knows its workers."""

    settle_s = 0.0

    def __init__(self, probes: Probes, url: str) -> None:
        self._probes = probes
        self._url = url

    async def readiness(self, entries: Mapping[str, ProcessEntry]) -> tuple[bool, str]:  # noqa: ARG002 - the router counts them
        """Return what its ``/ready`` says."""
        answer = await self._probes.ask("GET", f"{self._url}/ready")
        if isinstance(answer, NoAnswer):
            return False, "the router does not answer yet"
        return answer.status == 200, answer.body.decode("utf-8", errors="replace")

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:  # noqa: ARG002 - it knows the name
        """Ask it to send nothing new; one that does not know the worker (404) sends it nothing either."""
        answer = await self._probes.ask("POST", f"{self._url}/workers/{name}/drain")
        return answer if isinstance(answer, NoAnswer) else answer.status in {200, 404}

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:  # noqa: ARG002 - it reads the file itself
        """Return what its ``/workers`` says, of all."""
        answer = await self._probes.ask("GET", f"{self._url}/workers")
        if isinstance(answer, NoAnswer):
            return answer
        try:
            return _router_view(json.loads(answer.body))
        except (ValueError, KeyError, TypeError, AttributeError):
            return NoAnswer.SILENT


def frontend_of(state: StateFile, probes: Probes) -> Frontend:
    """Return the frontend of a graph."""
    made_by = plugin(GROUP, state.arbiter.runtime)
    if made_by is None:
        return RouterFrontend(probes, state.arbiter.router_url)
    return cast(Frontend, made_by(probes, state.arbiter))


def _router_view(data: dict[str, Any]) -> RouterView:
    queue = data.get("prefill_queue") or {}
    workers = {
        each["name"]: WorkerView(
            state=each["state"],
            inflight_requests=int(each["inflight_requests"]),
            inflight_tokens=float(each["inflight_tokens"]),
            kv_usage_fraction=each.get("kv_usage_fraction"),
            reason=each.get("reason"),
        )
        for each in data["workers"]
    }
    return RouterView(
        workers=workers,
        queue=RouterQueue(
            requests=int(queue.get("requests") or 0),
            tokens=int(queue.get("tokens") or 0),
            oldest_s=float(queue.get("oldest_s") or 0.0),
        ),
        lag_p99_s=data.get("lag_p99_s"),
        traffic=None if data.get("traffic") is None else Traffic(**data["traffic"]),
    )
