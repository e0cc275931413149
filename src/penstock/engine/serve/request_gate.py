"""Holds requests that have no slot in the engine yet on the event loop; `core.request_slots` decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from penstock.core.http.server import Responder
from penstock.engine.core.request_slots import RequestSlots, SlotState

Ticket: TypeAlias = "asyncio.Future[bool]"
"""Whether its request may run: False once its client has left."""


class AtCapacity(Exception):  # noqa: N818 - named like the fact it reports
    """Engine and queue are full; the message is the one that routers know."""

    def __init__(self) -> None:
        super().__init__("Server overloaded: worker at capacity")


class RequestGate:
    """The way into one worker's engine."""

    def __init__(self, limit: int | None, queue: int) -> None:
        """See `RequestSlots`."""
        self.slots: RequestSlots[Ticket] = RequestSlots(limit, queue)

    @property
    def is_empty(self) -> bool:
        """Whether no request runs or waits."""
        return not self.slots.running and not self.slots.queued

    @asynccontextmanager
    async def enter(self, responder: Responder) -> AsyncIterator[bool]:
        """Hold a slot for the block; yields whether the client is still there.

        Args:
            responder: Tells when the client goes away; it leaves the queue at once.

        Raises:
            AtCapacity: engine and queue are full.
        """
        ticket: Ticket = asyncio.get_running_loop().create_future()
        state = self.slots.enter(ticket)
        if state is SlotState.REJECTED:
            raise AtCapacity
        try:
            if state is SlotState.QUEUED:
                responder.on_disconnect(lambda: self._give_up(ticket))
                yield await ticket and not responder.disconnected
            else:
                yield True
        finally:
            self._leave(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        if not ticket.done():
            self._leave(ticket)
            ticket.set_result(False)

    def _leave(self, ticket: Ticket) -> None:
        following = self.slots.leave(ticket)
        if following is not None and not following.done():
            following.set_result(True)
