"""Kubernetes Events about graphs: every scaling decision with its sentence, and what else a user must see.

Listeners may not block, so Events wait in a short queue for one task that writes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.events import EventMessage, EventRecorder
from penstock.kube.objects.names import PLANNER
from penstock.planner.decide.decision import Action, Decision, Reason, RoleDecision
from penstock.planner.observers import View

MAX_WAITING: Final = 1000
"""Chosen: several decisions of every graph of a large cluster; more are dropped."""

WRITE_TIMEOUT_S: Final = 10.0
"""Real seconds for one Event. Chosen: a busy API server answers within; others wait for it."""

log = get_logger(__name__)


class DecisionEventWriter:
    """The one writer of a process's Events.

    Attributes:
        dropped: Events that could not be written.
    """

    def __init__(self, client: KubeClient, *, instance: str, now_s: Callable[[], float] = time.time) -> None:
        self._recorder = EventRecorder(client, PLANNER, instance, "Scale", on_dropped=self._drop, now_s=now_s)
        self._waiting: asyncio.Queue[tuple[Mapping[str, Any], EventMessage]] = asyncio.Queue(MAX_WAITING)
        self.dropped = 0

    def emit(self, regarding: Mapping[str, Any], message: EventMessage) -> None:
        """Queue an Event about an object with apiVersion, kind and metadata."""
        try:
            self._waiting.put_nowait((regarding, message))
        except asyncio.QueueFull:
            self._drop()

    async def run(self) -> None:
        """Write posted Events until cancelled."""
        while True:
            regarding, message = await self._waiting.get()
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._recorder.emit(regarding, message)
            except TimeoutError:
                self._drop()
            finally:
                self._waiting.task_done()

    async def written(self) -> None:
        """Wait until nothing waits."""
        await self._waiting.join()

    def _drop(self) -> None:
        self.dropped += 1
        log.warning("event dropped", dropped=self.dropped)


class EventListener:
    """Posts every change that a decision makes."""

    def __init__(self, emit: Callable[[EventMessage], None]) -> None:
        self._emit = emit

    def tick(self, view: View) -> None:
        """Take no note of a tick."""

    def decided(self, decision: Decision, view: View) -> None:  # noqa: ARG002 - the listener's shape
        """Emit one Event per role that changes or has failed to."""
        for role in decision.roles:
            if not decision.no_operation and (
                role.action is not Action.HOLD or role.reason is Reason.NEVER_READY
            ):
                self._emit(_message(role, decision.id))


def _message(role: RoleDecision, decision_id: str) -> EventMessage:
    is_held, has_failed = role.action is Action.HOLD, role.reason is Reason.NEVER_READY
    reason = "ScaledUp" if role.action is Action.UP else "ScaledDown"
    if has_failed:
        reason = "ScaleUpFailed" if is_held else "ScaleUpRolledBack"
    return EventMessage(reason, role.sentence, is_warning=has_failed, detail=decision_id)
