"""State that the planner carries from one decision to the next: of each role, and what the policy has learned.

A policy declares what it learns as a dataclass of its own, a `PolicyState`. The ledger (the planner's decision log)
stores it by `PolicyState.KEY` in the form that `codec` gives it, and the policy reads it back from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from penstock.api import Role
from penstock_planner.decide.codec import from_plain


class PolicyState:
    """Base of the dataclasses in which policies keep what they learn between decisions.

    A subclass is a frozen dataclass with ``slots=True`` in which every field has a default. Its fields are stored under
    their names, so a renamed field needs an entry in `penstock_planner.core.older_names`.
    """

    __slots__ = ()

    KEY: ClassVar[str]
    """Key under which the ledger stores the state; no other policy may use it, unless it shares this state."""

    @classmethod
    def read(cls, learned: Learned) -> Self:
        """Return this class's part of the planner's learned state; one with the defaults if there is none.

        Args:
            learned: Learned state as a decision left it, or as it was read from a ledger (decision log).

        Raises:
            AttributeError, TypeError, ValueError: The stored data does not have the form of this class.
        """
        known = learned.get(cls.KEY, {})
        return known if isinstance(known, cls) else cls.from_stored(known)

    @classmethod
    def from_stored(cls, plain: Any) -> Self:
        """Return the state that a ledger (the planner's decision log) has stored as plain data, a mapping of values by field name.

        Fields that only another version has are left out.

        Raises:
            AttributeError, TypeError, ValueError: The data does not have the form of this class.
        """
        return from_plain(cls, plain, skips_unknown=True)

    def resumed(self, by_s: float, now_s: float) -> Self | None:
        """Return the state after a restart of the planner, with all times in it converted to the current clock; None to drop it.

        This base class returns None unless ``by_s`` is 0, because it does not know which of its values are times.

        Args:
            by_s: Seconds to add to each time, which is measured on the clock of the previous run; can be negative.
            now_s: Present time, in simulated seconds; no converted time may be later.
        """
        del now_s
        return None if by_s else self

    def for_other_graph(self) -> Self | None:
        """Return the state with which the planner of another graph of the same model can start; None if there is none.

        This base class returns None.
        """
        return None


Learned = Mapping[str, PolicyState | Mapping[str, Any]]
"""Learned state of a planner, by `PolicyState.KEY`. A state that was read from a ledger is plain data until its policy reads it."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """State of one role that the planner carries from one decision to the next.

    Attributes:
        last_ready: Number of ready replicas at the last decision; None before the first one.
        grace: Number of remaining decisions in which decode (or aggregated) must not scale down yet, because a new
            worker's KV cache is still filling; >= 0.
        pending_replicas: Total replicas that the pending scale-up requested. None if no scale-up is pending, that is, all
            requested replicas are ready or the request was dropped.
        failed_scale_ups: Number of consecutive scale-ups that were rolled back because a replica never became ready.
        failed_replicas: Total replicas that the last failed scale-up requested. None if that many replicas have been
            ready since.
        backoff: Number of remaining decisions in which the role must not scale up, because a scale-up was rolled back;
            >= 0.
        reserved: Whether GPUs that another role gives up are reserved for this role. This role grows as soon as the
            GPUs are free.
        writer: Name of the other client that set the role's replica count last. Empty if there was none, or if its
            last write was long ago.
        foreign_writes: Number of consecutive writes of the role's replica count by other clients; 0 if there was none
            recently.
        since_write: Number of decisions since the last write of the replica count by another client.
    """

    last_ready: int | None = None
    grace: int = 0
    pending_replicas: int | None = None
    failed_scale_ups: int = 0
    failed_replicas: int | None = None
    backoff: int = 0
    reserved: bool = False
    writer: str = ""
    foreign_writes: int = 0
    since_write: int = 0


@dataclass(frozen=True, slots=True)
class PlannerState:
    """State that the planner carries from one decision to the next.

    Attributes:
        sequence: Number of decisions and roll-backs so far. The id of the next decision is made from it.
        roles: State of each role; a role without an entry has the default `RoleState`.
        learned: Learned state of the policy, such as demand and throughput, by `PolicyState.KEY`.
        interval_s: Simulated seconds until the next decision. None means the regular interval of the mode.
    """

    sequence: int = 0
    roles: Mapping[Role, RoleState] = field(default_factory=dict)
    learned: Learned = field(default_factory=dict)
    interval_s: float | None = None

    def of(self, role: Role) -> RoleState:
        """Return the state of a role between decisions, such as its pending scale-up and back-off.

        Returns the default if the role has none yet.
        """
        return self.roles.get(role, _BLANK)


_BLANK = RoleState()


def learned_by(*states: PolicyState) -> dict[str, PolicyState]:
    """Return learned states by the key (`KEY` of their class) under which a ledger (decision log) stores them."""
    return {each.KEY: each for each in states}


def for_other_graph(known: Learned, kinds: Sequence[type[PolicyState]]) -> Learned:
    """Return the part of a planner's learned state with which the planner of another graph can start.

    The traffic and the replicas of this graph are left out, and so is the learned state of policies other than the
    present one.

    Args:
        known: Learned state of a planner.
        kinds: Classes of the states that the policy declares, `PlannerPolicy.states`.
    """
    started = (each.read(known).for_other_graph() for each in kinds if each.KEY in known)
    return learned_by(*(each for each in started if each is not None))


def resumed(
    state: PlannerState, kinds: Sequence[type[PolicyState]], by_s: float, now_s: float
) -> PlannerState:
    """Return the state of a planner after a restart, with its times converted to another clock.

    Args:
        state: State as read from the ledger (the planner's decision log).
        kinds: Classes of the states that the policy declares, `PlannerPolicy.states`.
        by_s: Simulated seconds to add to a time of the ledger's clock to get a time of the current clock; can be
            negative. Unless it is 0, the learned state of other policies is dropped, because it is unknown which of
            their values are times.
        now_s: Present time, in simulated seconds. No converted time is later than this.
    """
    moved = (each.read(state.learned).resumed(by_s, now_s) for each in kinds if each.KEY in state.learned)
    known = learned_by(*(each for each in moved if each is not None))
    return replace(state, learned=known if by_s else {**state.learned, **known})
