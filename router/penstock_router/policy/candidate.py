"""What a policy sees and answers: candidates, the request, and a choice with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_graph.models import Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be chosen now, as the router knows it.

    Attributes:
        name: Worker's name, unique in the fleet.
        role: prefill, decode or aggregated.
        inflight_requests: Requests that this router has under way there, >= 0.
        inflight_tokens: Their tokens: prompts, and for decode what was generated so far, >= 0.
        kv_usage_fraction: KV blocks in use when last scraped, 0-1; None when unknown or too old.
        scraped_tokens: ``inflight_tokens`` at the moment of that scrape.
    """

    name: str
    role: Role
    inflight_requests: int = 0
    inflight_tokens: int = 0
    kv_usage_fraction: float | None = None
    scraped_tokens: int = 0

    def projected_kv_usage(self) -> float | None:
        """Return the KV usage scaled by how the in-flight tokens changed since the scrape; None if unknown.

        A scrape is up to a second old; without the projection every request of that second would go to
        the worker that was emptiest at its start. Half full at 1,000 tokens in flight and 1,500 now: 0.75.
        """
        if self.kv_usage_fraction is None:
            return None
        if self.scraped_tokens <= 0 and self.kv_usage_fraction == 0:
            # Idle when scraped and busy now: its usage says nothing about the requests sent since.
            return 0.0 if self.inflight_tokens <= 0 else None
        if self.scraped_tokens <= 0:
            return self.kv_usage_fraction
        return min(1.0, self.kv_usage_fraction * self.inflight_tokens / self.scraped_tokens)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a policy may know of a request.

    Attributes:
        prompt_tokens: Known or estimated prompt length, >= 0.
    """

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen candidate and why, in one short phrase for logs."""

    candidate: Candidate
    reason: str


class PolicyState:
    """What a policy remembers between choices; owned by the caller, one per role.

    Attributes:
        turn: Choices made so far; rotates among equals.
    """

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn = 0


class Policy(Protocol):
    """Chooses among candidates."""

    def new_state(self) -> PolicyState:
        """Return fresh state for one pool."""

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, state: PolicyState) -> Choice:
        """Return one of ``candidates``, which is not empty, and update ``state``."""
