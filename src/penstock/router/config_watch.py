"""Follows the sections of the graph's file that a running router takes over: admission and tiers.

On Kubernetes the file is a ConfigMap's, which the operator renews and the kubelet brings here; locally it is the manifest
itself. All other sections are read at the start alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.api import RouterConfig
from penstock.api.manifests import load_graph
from penstock.core.errors import ConfigError
from penstock.core.logs import get_logger

log = get_logger(__name__)

POLL_REAL_S: Final = 1.0
"""Chosen: a look at a file's date costs microseconds; a kubelet takes up to a minute anyway; real seconds."""


class ConfigWatch:
    """Calls back with each new section of one file.

    What was set at run time meanwhile, as by ``POST /busy_threshold``, stays until its section changes; then the file's
    holds.
    """

    def __init__(
        self, file: Path, current: RouterConfig, on_change: Mapping[str, Callable[[Any], None]]
    ) -> None:
        self._file = file
        self._current = current
        self._on_change = on_change
        self._seen: tuple[int, int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Poll from now on, the first time at once."""
        self._task = asyncio.create_task(self._follow(), name="router settings")

    async def close(self) -> None:
        """Stop; does nothing where nothing was started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _follow(self) -> None:
        while True:
            try:
                await self.check()
            except Exception:  # root of the task: one failure must not end the looks that follow
                log.exception("router settings not followed")
            await asyncio.sleep(POLL_REAL_S)

    async def check(self) -> None:
        """Look once; a file that is gone or wrong leaves the settings as they are, and is logged once."""
        config = await asyncio.to_thread(self._read)
        if config is None:
            return
        before, self._current = self._current, config
        for name, take in self._on_change.items():
            section = getattr(config, name)
            if section != getattr(before, name):
                log.info("router settings changed", section=name, settings=section.to_manifest())
                take(section)

    def _read(self) -> RouterConfig | None:
        try:
            found = self._file.stat()
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
            if seen == self._seen:
                return None
            self._seen = seen
            return load_graph(self._file).spec.router
        except (OSError, ConfigError) as exc:
            log.warning("router settings kept: the graph's file is not usable", problem=str(exc))
            return None
