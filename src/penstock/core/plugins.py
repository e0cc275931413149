"""What distributions beside this one add: named objects that they register as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by their name, as installed when the process first asks; none is loaded.

    Of two distributions with one name, the first on the path counts, as for modules.
    """
    return {each.name: each for each in reversed(tuple(entry_points(group=group)))}
