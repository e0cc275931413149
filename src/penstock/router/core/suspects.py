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
            worker, so that a death that is reported twice is counted once.
    """

    worker: str
    role: Role
    incarnation: tuple[int, int]


class DeathRecord:
    """The worker deaths at which one request was present.

    Attributes:
        deaths: Worker deaths since the request was last cleared (shown not to crash workers), the oldest first.
    """

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths: tuple[Death, ...] = ()

    @property
    def alone_at(self) -> tuple[Role, ...]:
        """Roles on whose workers the request must run alone, because it is suspected of crashing workers; empty if it is not."""
        if len(self.deaths) < SUSPECT_DEATHS:
            return ()
        return tuple({each.role: None for each in self.deaths})

    def record_death(self, worker: Worker) -> None:
        """Record that a worker died on which the request ran; does nothing if this death is recorded already.

        The same death can be reported twice, if the request was sent to the worker again before the death was known.
        """
        death = Death(worker.name, worker.spec.role, (worker.outages, worker.recoveries))
        if death not in self.deaths:
            self.deaths = (*self.deaths, death)

    def clear(self) -> None:
        """Delete the recorded deaths, so that the request is no longer suspected of crashing workers.

        Called when it has run alone past the point at which it was broken off.
        """
        self.deaths = ()


class IsolatedRequests(Generic[T]):
    """The requests suspected of crashing workers that run on the workers of one role.

    Such a request runs on a worker without other requests. When it has run past the point at which it was broken off
    before, it is cleared (no longer suspected), and other requests can be sent to its worker.

    Attributes:
        role: Role of the workers.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self._inside: dict[T, Assignment[T]] = {}

    def enter(self, assignment: Assignment[T]) -> None:
        """Record that a request suspected of crashing workers runs on the worker of ``assignment`` from now on."""
        self._inside[assignment.item] = assignment

    def leave(self, item: T) -> None:
        """Record that a request suspected of crashing workers has left its worker; does nothing if it was not recorded as running."""
        self._inside.pop(item, None)

    @property
    def has_uncleared(self) -> bool:
        """Whether a request runs that is suspected of crashing workers and has not got past the point at which it was broken off."""
        return any(not each.is_cleared for each in self._inside.values())

    def closed(
        self, serving: Collection[Worker], known: Iterable[Worker], *, is_awaited: bool
    ) -> frozenset[str]:
        """Return the names of the workers that must get no other requests now, because a suspected request is to run there alone.

        A suspected request is one that may crash its worker. Its worker is closed until the request gets past the point
        at which it was broken off before (it is then cleared).

        Args:
            serving: Workers that can be routed to.
            known: All workers of the role that are not draining, whether they serve or not; used to find out whether the
                role has only one.
            is_awaited: Whether a suspected request waits for a worker. If no worker is closed yet, the one with the
                fewest requests (cleared ones not counted) is then closed for it, provided that another one serves or that
                the role has only one.
        """
        closed = {each.worker.name for each in self._inside.values() if not each.is_cleared}
        if is_awaited and not closed and _may_reserve(serving, known):
            closed.add(min(serving, key=self._uncleared_requests_at).name)
        return frozenset(closed)

    def free(
        self, serving: Collection[Worker], known: Iterable[Worker], may_take: Callable[[Worker], bool]
    ) -> Worker | None:
        """Return a worker on which a request that is suspected of crashing its worker can run alone; None if it has to wait.

        No other request runs on that worker, or only cleared ones: requests that were suspected as well, and have since
        run past the point at which they were broken off. An idle worker is preferred. The last worker in service is only
        returned if the role has no other worker at all, because the request may crash it.

        Args:
            serving: Workers that can be routed to.
            known: All workers of the role that are not draining, whether they serve or not. If ``serving`` has one worker
                and this has several, None is returned.
            may_take: Returns whether a worker can be used: no other router has requests there, and no recent failure
                leaves open whether the worker still runs.
        """
        if not _may_reserve(serving, known):
            return None
        found = [each for each in serving if self._uncleared_requests_at(each) == 0 and may_take(each)]
        return min(found, key=lambda each: each.inflight_requests, default=None)

    def _uncleared_requests_at(self, worker: Worker) -> int:
        cleared = sum(each.is_cleared for each in self._inside.values() if each.worker is worker)
        return worker.inflight_requests - cleared


def _may_reserve(serving: Collection[Worker], known: Iterable[Worker]) -> bool:
    """Return whether a worker can be given to a suspect: another worker serves as well, or the role has no other worker."""
    return len(serving) > 1 or (len(serving) == 1 and sum(1 for _ in known) == 1)


def is_trial(assignment: Assignment[Any]) -> bool:
    """Return whether a request runs alone on its worker because it is suspected of crashing workers.

    ``assignment`` is the request's assignment to the worker; the attribute ``reason`` of the assignment shows whether the
    request was sent there to run alone.
    """
    return assignment.reason == ALONE
