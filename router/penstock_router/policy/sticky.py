"""Session stickiness around any placing policy: requests of one session stay where its first was placed. Pure."""

from __future__ import annotations

from itertools import islice

from penstock_router.policy.placer import Arrival, Instances, Place, Placer, View

SESSIONS = 65_536
"""Sessions remembered. Chosen: about 10 MiB; beyond it, those that were quiet longest are placed anew."""


class StickySessions:
    """Sends a session's requests to one instance, as long as that is there and has not failed them."""

    __slots__ = ("_homes", "_inner", "_limit")

    def __init__(self, inner: Placer, *, limit: int = SESSIONS) -> None:
        """Wrap a policy.

        Args:
            inner: Places requests without a session, and the first of each.
            limit: Sessions remembered, >= 1.
        """
        self._inner = inner
        self._limit = limit
        self._homes: dict[str, str] = {}

    def joined(self, name: str) -> None:
        """Pass it on."""
        self._inner.joined(name)

    def left(self, name: str) -> None:
        """Pass it on; sessions there are placed anew when they next ask."""
        self._inner.left(name)

    def place(self, arrival: Arrival, instances: Instances, view: View) -> Place:
        """Return the session's instance, or the policy's choice."""
        session = arrival.session
        if not session:
            return self._inner.place(arrival, instances, view)
        home = self._homes.pop(session, None)
        if home is not None and home in instances and home not in arrival.avoid:
            self._homes[session] = home
            return Place(home, "its session's instance")
        place = self._inner.place(arrival, instances, view)
        self._homes[session] = place.name
        if len(self._homes) > self._limit:
            # Several at once: taking the oldest out of a dict walks over all that went before it.
            for quiet in list(islice(self._homes, 1 + self._limit // 32)):
                del self._homes[quiet]
        # Moving one request of a session would take it from its home.
        return Place(place.name, place.reason, "", False, place.uncached)
