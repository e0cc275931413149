"""Prompt tokens on their way through the first stage, as a queue counts them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class PromptTokenCounts:
    """Counts of one queue and of the workers that it gives requests to.

    A request weighs the same in every count: the tokens that routing expected to be computed when it was admitted.
    So what was admitted is what was computed, waits, is pending, or has left before it was computed.

    Attributes:
        waiting: Of the requests that wait.
        pending: Of the requests given to a worker and not computed there yet, by worker; absent means 0.
        routed: Prompt tokens of all requests admitted so far, cached ones included; a retry does not count again.
        admitted: Of the same requests.
        computed: Of the requests computed so far.
    """

    waiting: int = 0
    pending: dict[str, int] = field(default_factory=dict)
    routed: int = 0
    admitted: int = 0
    computed: int = 0

    def admit(self, prompt_tokens: int, weight: int) -> None:
        """Count a request in that comes for the first time."""
        self.routed += prompt_tokens
        self.admitted += weight

    def give(self, worker: str, weight: int) -> None:
        """Count a request as pending at a worker."""
        self.pending[worker] = self.pending.get(worker, 0) + weight

    def take_back(self, worker: str, weight: int) -> None:
        """End what `give` began."""
        left = self.pending[worker] - weight
        if left:
            self.pending[worker] = left
        else:
            del self.pending[worker]

    def copy(self) -> PromptTokenCounts:
        """Return the counts as they are now."""
        return replace(self, pending=dict(self.pending))
