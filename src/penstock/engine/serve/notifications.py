"""What the reading worker tells the one that keeps the blocks: heartbeats and completed reads, as JSON.

vLLM's NIXL notifications say the same in text: ``HB:id,id`` and ``id:readers``, to each agent of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.core.validation import findings
from penstock.engine.core.fan_out import Read

MAX_RANKS = 1024
"""Most ranks of one worker, chosen: far above any tensor parallelism."""

_Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
_Row = tuple[str, _Rank, _Rank, Annotated[int, Field(ge=1, le=MAX_RANKS)]]
"""Request id, rank read from, rank that read, readers of the former."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One message.

    Attributes:
        engine_id: The process that it is meant for; another one at the same address must not take it.
        heartbeats: Prompts whose leases it renews.
    """

    engine_id: str
    reads: list[Read] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        """Every prompt named, once."""
        return list(dict.fromkeys((*self.heartbeats, *(read.request_id for read in self.reads))))


def encode(engine_id: str, reads: Iterable[Read], heartbeats: Iterable[str]) -> bytes:
    """Return a message's body."""
    rows = [[each.request_id, each.rank, each.reader, each.readers] for each in reads]
    return orjson.dumps({"engine_id": engine_id, "read": rows, "heartbeat": list(heartbeats)})


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    engine_id: str
    heartbeat: list[str] = Field(default=[])
    read: list[_Row] = Field(default=[])


def parse(body: bytes) -> Notification:
    """Return the message in ``body``.

    Raises:
        ValueError: it is none; the text says what it lacks.
    """
    try:
        message = _Message.model_validate_json(body)
    except ValidationError as exc:
        raise ValueError(
            f"{findings(exc, root='body', most=1)}; a notification is engine_id, heartbeat: [request id] and "
            "read: [[request id, rank, reader, readers]]"
        ) from exc
    return Notification(message.engine_id, [Read(*row) for row in message.read], message.heartbeat)
