"""The two policies without memory of prompts: round-robin and least-loaded."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_router.policy.candidate import Candidate, Choice, PolicyState, RoutedRequest


class RoundRobin:
    """Each candidate in turn, in the order given."""

    __slots__ = ()

    def new_state(self) -> PolicyState:
        """Return fresh state."""
        return PolicyState()

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, state: PolicyState) -> Choice:  # noqa: ARG002 - looks at no request
        """Return the next candidate."""
        chosen = candidates[state.turn % len(candidates)]
        state.turn += 1
        return Choice(chosen, "next in turn")


class LeastLoaded:
    """The emptiest candidate: least KV in use where every candidate's is known, then fewest tokens in flight.

    Prefill and aggregated workers without a KV reading are compared by tokens alone. Equals take turns, so
    that an idle pool does not send everything to its first worker.
    """

    __slots__ = ()

    def new_state(self) -> PolicyState:
        """Return fresh state."""
        return PolicyState()

    def choose(self, candidates: Sequence[Candidate], request: RoutedRequest, state: PolicyState) -> Choice:  # noqa: ARG002 - looks at no request
        """Return the least loaded candidate."""
        turn = state.turn
        state.turn += 1
        count = len(candidates)
        if count == 1:
            return Choice(candidates[0], "only candidate")
        usages = [each.projected_kv_usage() for each in candidates]
        known = [usage for usage in usages if usage is not None]
        # One unknown reading makes the comparison unfair either way, so tokens decide for all.
        by_kv = len(known) == count
        best_index, best_load = 0, (2.0, 0, 0, 0)
        for index, each in enumerate(candidates):
            usage = known[index] if by_kv else 0.0
            load = (usage, each.inflight_tokens, each.inflight_requests, (index - turn) % count)
            if index == 0 or load < best_load:
                best_index, best_load = index, load
        chosen = candidates[best_index]
        if by_kv:
            reason = f"least KV in use: {best_load[0]:.3f}, {chosen.inflight_tokens} tokens in flight"
        else:
            reason = f"fewest tokens in flight: {chosen.inflight_tokens}"
        return Choice(chosen, reason)
