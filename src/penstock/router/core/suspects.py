"""Detects requests that crash workers (queries of death): a suspected request must run alone until it is cleared. Pure.

When a worker dies, all requests that run there are broken off, and one of those requests may be the cause. Presence alone
proves nothing, because workers also die for other reasons. So a request that was on two workers that died becomes a suspect.
It continues on a worker on which no other request runs except cleared suspects. If that worker dies too, the request is
convicted of having killed it: it costs at most three workers. If the request gets past the point where it was broken off, it
is cleared, and other requests may run on that worker again. If a cleared request kills the worker later, while another
suspect is tried there, the two cannot be told apart; nor can a crash with another cause at that moment.

While other workers of the role are unavailable, a suspect does not get the last worker that serves; it waits. If the role has
only one worker, there is no other to wait for: the suspects run there one after the other while all other requests wait.
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
"""Number of worker deaths at which a request was present that make it a suspect. Chosen: with one, all requests of a dead worker
would be suspects."""

CLEARED_TOKENS: Final = 16
"""Number of tokens that a suspect must generate alone before it is cleared. Chosen: a request that crashes workers does so at its
prompt or at one point of its response, which it reaches again within the first of these tokens; they take a quarter of a second at
60 tokens/s."""

ALONE: Final = "alone: it was on workers that died"
"""The `Assignment.reason` of a suspect that runs alone on its worker."""


@dataclass(frozen=True, slots=True)
class Death:
    """The death of a worker on which a request ran.

    Attributes:
        worker: Name of the worker.
        role: Role of the worker.
        incarnation: The worker's numbers of outages and recoveries at that time. They differ between two deaths of the same
            worker and are equal if the same death is recorded twice.
    """

    worker: str
    role: Role
    incarnation: tuple[int, int]


class DeathRecord:
    """The worker deaths at which one request was present.

    Attributes:
        deaths: Worker deaths since the request was last cleared, the oldest first.
    """

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths: tuple[Death, ...] = ()

    @property
    def alone_at(self) -> tuple[Role, ...]:
        """Roles on whose workers the request must run alone; empty if the request is not a suspect."""
        if len(self.deaths) < SUSPECT_DEATHS:
            return ()
        return tuple({each.role: None for each in self.deaths})

    def was_at(self, worker: Worker) -> None:
        """Record that a worker died on which the request ran; does nothing if this death is recorded already.

        The same death can be reported twice, if the request was sent to the worker again before the death was known.
        """
        death = Death(worker.name, worker.spec.role, (worker.outages, worker.recoveries))
        if death not in self.deaths:
            self.deaths = (*self.deaths, death)

    def clear(self) -> None:
        """Delete the recorded deaths, because the request ran alone past the point where it was broken off."""
        self.deaths = ()


class IsolatedRequests(Generic[T]):
    """The suspects that run on the workers of one role; a suspect is a request that is suspected of crashing workers.

    Attributes:
        role: Role of the workers.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self._inside: dict[T, Assignment[T]] = {}

    def enter(self, assignment: Assignment[T]) -> None:
        """Record that a suspect runs on a worker."""
        self._inside[assignment.item] = assignment

    def leave(self, item: T) -> None:
        """Record that a suspect has left its worker; does nothing for a request that was not entered."""
        self._inside.pop(item, None)

    @property
    def has_uncleared(self) -> bool:
        """Whether a suspect runs that is not cleared yet."""
        return any(not each.is_cleared for each in self._inside.values())

    def closed(
        self, serving: Collection[Worker], known: Iterable[Worker], *, is_awaited: bool
    ) -> frozenset[str]:
        """Return the names of the workers that must not get other requests now, because a suspect runs or is to run there alone.

        Args:
            serving: Workers that can be routed to.
            known: All workers of the role that are not draining, whether they serve or not.
            is_awaited: Whether a suspect waits for a worker; the worker that will be free first is then closed for it, if the
                role can spare one.
        """
        closed = {each.worker.name for each in self._inside.values() if not each.is_cleared}
        if is_awaited and not closed and _may_spare(serving, known):
            closed.add(min(serving, key=self._uncleared_at).name)
        return frozenset(closed)

    def free(
        self, serving: Collection[Worker], known: Iterable[Worker], may_take: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return a worker on which a suspect can run alone: nothing runs there except cleared suspects.

        Idle workers are preferred. Returns None if the suspect has to wait.

        Args:
            serving: Workers that can be routed to.
            known: All workers of the role that are not draining, whether they serve or not.
            may_take: Returns whether a worker can be used: it is not suspected to be dead, and no other router has requests
                there.
        """
        if not _may_spare(serving, known):
            return None
        found = [each for each in serving if self._uncleared_at(each) == 0 and may_take(each)]
        return min(found, key=lambda each: each.inflight_requests, default=None)

    def _uncleared_at(self, worker: Worker) -> int:
        cleared = sum(each.is_cleared for each in self._inside.values() if each.worker is worker)
        return worker.inflight_requests - cleared


def _may_spare(serving: Collection[Worker], known: Iterable[Worker]) -> bool:
    """Return whether a worker can be given to a suspect: another worker serves as well, or the role has no other worker."""
    return len(serving) > 1 or (len(serving) == 1 and sum(1 for _ in known) == 1)


def is_trial(assignment: Assignment[Any]) -> bool:
    """Return whether a request was assigned to its worker as a suspect that runs there alone."""
    return assignment.reason == ALONE
