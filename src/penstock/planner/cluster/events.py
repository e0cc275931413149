"""Kubernetes Events about graphs: every scaling decision with its sentence, and what else a user must see.

Listeners may not block, so Events wait in a short queue for one task that writes them. An Event that cannot
be written is counted and dropped: it is a courtesy, never a condition of acting.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from penstock.core.errors import PenstockError
from penstock.core.logs import get_logger
from penstock.kube.events import MAX_NOTE, EventMessage, EventReporter, truncated
from penstock.kube.objects.names import PLANNER
from penstock.planner.decide.decision import Action, Decision, Reason, RoleDecision
from penstock.planner.observers import View

MAX_WAITING: Final = 1000
"""Chosen: several decisions of every graph of a large cluster; more are dropped."""

WRITE_TIMEOUT_S: Final = 10.0
"""Real seconds for one Event. Chosen: a busy API server answers within; others wait behind it."""

log = get_logger(__name__)


class Creator(Protocol):
    """What the writer needs of a client."""

    async def create(self, obj: Mapping[str, Any], *, field_manager: str) -> dict[str, Any]:
        """Create the object."""
        ...


class DecisionEventWriter:
    """The one writer of a process's Events.

    Attributes:
        dropped: Events that could not be written.
    """

    def __init__(self, client: Creator, *, instance: str, now_s: Callable[[], float] = time.time) -> None:
        """Build it.

        Args:
            client: Writes.
            instance: Name of this process: the pod's or the host's.
            now_s: Seconds since the epoch.
        """
        self._client = client
        self._reporter = EventReporter(PLANNER, instance, "Scale")
        self._now_s = now_s
        self._waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_WAITING)
        self.dropped = 0

    def emit(self, regarding: Mapping[str, Any], message: EventMessage) -> None:
        """Queue an Event about an object with apiVersion, kind and metadata."""
        try:
            self._waiting.put_nowait(self._event(regarding, message))
        except asyncio.QueueFull:
            self._drop(message.reason, "too many wait")

    async def run(self) -> None:
        """Write what is posted until cancelled."""
        while True:
            event = await self._waiting.get()
            try:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await self._client.create(event, field_manager=PLANNER)
            except (PenstockError, TimeoutError) as exc:
                self._drop(event["reason"], str(exc) or "no answer")
            finally:
                self._waiting.task_done()

    async def written(self) -> None:
        """Wait until nothing waits."""
        await self._waiting.join()

    def _drop(self, reason: str, why: str) -> None:
        self.dropped += 1
        log.warning("event dropped", reason=reason, why=why, dropped=self.dropped)

    def _event(self, regarding: Mapping[str, Any], message: EventMessage) -> dict[str, Any]:
        return self._reporter.event(regarding, message, suffix=uuid.uuid4().hex[:16], at_s=self._now_s())


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
    if role.reason is Reason.NEVER_READY:
        reason = "ScaleUpFailed" if role.action is Action.HOLD else "ScaleUpRolledBack"
        return EventMessage(reason, _with_id(role.sentence, decision_id), is_warning=True)
    reason = "ScaledUp" if role.action is Action.UP else "ScaledDown"
    return EventMessage(reason, _with_id(role.sentence, decision_id))


def _with_id(sentence: str, decision_id: str) -> str:
    """Return the sentence with the decision's id behind it, short enough that the id survives."""
    suffix = f" ({decision_id})"
    return truncated(sentence, MAX_NOTE - len(suffix)) + suffix
