"""What the router asks of a source of workers, and of its like."""

from __future__ import annotations

from typing import Protocol

from penstock.router.core.worker_spec import WorkerSpec


class Discovery(Protocol):
    """Tells which workers there are; `WorkerWatch` polls it some ten times a second."""

    @property
    def problem(self) -> str | None:
        """Why the view may be out of date, or None."""

    def poll(self) -> tuple[WorkerSpec, ...] | None:
        """Return the workers if they have changed since the last call, else None; never raises or blocks."""

    def routers(self) -> tuple[str, ...]:
        """Return the base URLs of the graph's routers as last seen, the asker's own among them; never raises or blocks."""

    async def start(self) -> None:
        """Begin to look; returns once the first view is in, or after a bounded wait without one."""

    async def close(self) -> None:
        """End what `start` began."""
