"""What the local backend asks of the process that takes requests: Penstock's router, or a runtime's own frontend.

A runtime with its own registers a class that follows `Frontend` as an entry point of group ``penstock.frontends``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, cast

from penstock.core.plugins import plugin
from penstock.local.probes import NoAnswer, Probes, RouterView
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
        """Return whether a request would be served now, and why not.

        Args:
            entries: All of the graph.
        """
        ...

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:
        """See to it that the worker is sent nothing new; True when that is certain."""
        ...

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:
        """Return what the door says of workers.

        Args:
            entries: At least those that the caller wants to know of.
        """
        ...


class RouterDoor:
    """Penstock's router, which knows its workers."""

    settle_s = 0.0

    def __init__(self, probes: Probes, url: str) -> None:
        self._probes = probes
        self._url = url

    async def readiness(self, entries: Mapping[str, ProcessEntry]) -> tuple[bool, str]:  # noqa: ARG002 - the router counts them
        """Return what its ``/ready`` says."""
        return await self._probes.readiness(self._url)

    async def drain(self, name: str, entry: ProcessEntry) -> bool | NoAnswer:  # noqa: ARG002 - it knows the name
        """Ask it to send nothing new; its answer is the confirmation."""
        return await self._probes.drain(self._url, name)

    async def view(self, entries: Mapping[str, ProcessEntry]) -> RouterView | NoAnswer:  # noqa: ARG002 - it reads the file itself
        """Return what its ``/workers`` says, of all."""
        return await self._probes.router(self._url)


def door_of(state: StateFile, probes: Probes) -> Frontend:
    """Return the door of a graph."""
    made_by = plugin(GROUP, state.arbiter.runtime)
    if made_by is None:
        return RouterDoor(probes, state.arbiter.router_url)
    return cast(Frontend, made_by(probes, state.arbiter))
