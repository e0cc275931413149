"""What the router's state machine asks its driver to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from penstock.api import Role
from penstock.router.core.assignment import Assignment

T = TypeVar("T")


class RefusalReason(Enum):
    """Why a request gets no worker."""

    QUEUE_FULL = auto()
    QUEUE_TIMEOUT = auto()
    NO_WORKER = auto()
    SHED = auto()
    ALL_BUSY = auto()


@dataclass(frozen=True, slots=True)
class Dispatch(Generic[T]):
    """A request goes to its worker now; `RouterCore.release` ends its assignment."""

    assignment: Assignment[T]


@dataclass(frozen=True, slots=True)
class Refuse(Generic[T]):
    """A request gets no worker.

    Attributes:
        item: The request.
        role: Of the stage that has no worker for it.
        reason: Why.
        message: For the client: what was exceeded or is missing, and the remedy.
        retry_after_s: When there is expected to be room, simulated seconds from now; None: unknown.
    """

    item: T
    role: Role
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None


Effects = list[Dispatch[T] | Refuse[T]]
