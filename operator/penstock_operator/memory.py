"""What saves memory: equal parts of objects are kept once."""

from __future__ import annotations

from typing import Any, Final

LIMIT: Final = 20_000
"""Parts remembered. Chosen: all that a few hundred graphs have in common, in about five megabytes."""


class InterningPool:
    """Remembers parts of JSON objects by their content."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._parts: dict[Any, Any] = {}

    def intern(self, value: Any) -> Any:
        """Return an equal value made of shared parts, which must not be changed; the input is left as it is."""
        if isinstance(value, float):
            return value  # 0.0 equals -0.0
        # A part is known by the identities of its own parts: those are shared, and live as long as it does.
        made, identity = value, (type(value), value)
        if isinstance(value, dict):
            made = {key: self.intern(each) for key, each in value.items()}
            identity = (dict, (*made, *map(id, made.values())))
        elif isinstance(value, list):
            made = list(map(self.intern, value))
            identity = (list, tuple(map(id, made)))
        if len(self._parts) >= self._limit:
            self._parts.clear()
        return self._parts.setdefault(identity, made)
