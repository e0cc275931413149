"""Which requests may have killed workers, and the proof: a suspect runs alone. Pure.

A worker that dies breaks off everything that runs there, and one of those requests may be why. Presence proves nothing:
workers also die from outside. So a request that was on two workers that died is a suspect. It continues on a worker on which
nothing else runs but what is cleared, and no other suspect with it. If that worker dies, the request has killed it and is
convicted: three workers at most. If the request gets past the place where it was broken off, it is cleared, and others may
come. A request that kills later than that, while a suspect is tried alongside it, cannot be told from the suspect; nor can a kill
from outside in that moment.

While other workers of the role are away, a suspect does not get the last one that serves; it waits. Where the role has one
worker only, there is no other to wait for, and the suspects run there one after the other while everything else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from penstock.api import Role
from penstock.router.core.retries import Assignment
from penstock.router.core.worker import Worker

T = TypeVar("T")

SUSPECT_DEATHS: Final = 2
"""Deaths at which a request was present that make it a suspect. Chosen: after one, all requests of a worker would be."""

CLEARED_TOKENS: Final = 16
"""Tokens that a suspect generates alone before it is cleared. Chosen: a deadly request kills at its prompt or at one place of
its answer, which it reaches again with the first of them; a quarter of a second at 60 tokens/s."""

ALONE: Final = "alone: it was on workers that died"
"""The reason of an assignment to a worker on which a suspect runs alone."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker at which a request was present; ``life`` tells a worker that came back from one that is still dead."""

    worker: str
    role: Role
    life: tuple[int, int]


class Suspicion:
    """What the deaths of workers say of one request.

    Attributes:
        deaths: At which it was present since it was last cleared, oldest first.
    """

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths: tuple[Death, ...] = ()

    @property
    def alone_at(self) -> tuple[Role, ...]:
        """Roles on whose workers it may only run alone; empty: it is not a suspect."""
        if len(self.deaths) < SUSPECT_DEATHS:
            return ()
        return tuple({each.role: None for each in self.deaths})

    def was_at(self, worker: Worker) -> None:
        """Record that a worker died on which it ran; once, though it was sent there again before that was known."""
        death = Death(worker.name, worker.spec.role, (worker.outages, worker.recoveries))
        if death not in self.deaths:
            self.deaths = (*self.deaths, death)

    def clear(self) -> None:
        """Forget the deaths: it ran alone past the place where it was broken off."""
        self.deaths = ()


class Ward(Generic[T]):
    """The suspects at one role's workers.

    Attributes:
        role: The workers'.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self._inside: dict[T, Assignment[T]] = {}

    def enter(self, assignment: Assignment[T]) -> None:
        """Record that a suspect runs at a worker."""
        self._inside[assignment.item] = assignment

    def leave(self, item: T) -> None:
        """Record that it has left; does nothing for a request that is not inside."""
        self._inside.pop(item, None)

    @property
    def has_uncleared(self) -> bool:
        """Whether a suspect runs that is not cleared yet."""
        return any(not each.is_cleared for each in self._inside.values())

    def closed(
        self, serving: Collection[Worker], known: Iterable[Worker], *, is_awaited: bool
    ) -> frozenset[str]:
        """Return the names of workers that take nothing but cleared requests and suspects now.

        Args:
            serving: The workers that may be chosen.
            known: All of the role that are not leaving, whether they serve or not.
            is_awaited: A suspect waits for one: the worker that will be free first is kept for it.
        """
        closed = {each.worker.name for each in self._inside.values() if not each.is_cleared}
        if is_awaited and not closed and _may_spare(serving, known):
            closed.add(min(serving, key=self._uncleared_at).name)
        return frozenset(closed)

    def free(
        self, serving: Collection[Worker], known: Iterable[Worker], may_take: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return a worker on which nothing runs but what is cleared, an idle one if there is; None: a suspect has to wait.

        Args:
            serving: The workers that may be chosen.
            known: All of the role that are not leaving, whether they serve or not.
            may_take: Whether a worker is not about to be found dead, and no other router has requests there.
        """
        if not _may_spare(serving, known):
            return None
        found = [each for each in serving if self._uncleared_at(each) == 0 and may_take(each)]
        return min(found, key=lambda each: each.inflight_requests, default=None)

    def _uncleared_at(self, worker: Worker) -> int:
        cleared = sum(each.is_cleared for each in self._inside.values() if each.worker is worker)
        return worker.inflight_requests - cleared


def _may_spare(serving: Collection[Worker], known: Iterable[Worker]) -> bool:
    """Return whether a suspect may have a worker: another one serves besides, or the role has no other."""
    return len(serving) > 1 or (len(serving) == 1 and sum(1 for _ in known) == 1)


def is_trial(assignment: Assignment[Any]) -> bool:
    """Return whether a request was assigned to a worker as a suspect, alone."""
    return assignment.reason == ALONE
