"""What each runtime says about one worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """Command, variables and ports of one process, before the user's own are added.

    Attributes:
        argv: Command with placeholders.
        ports: Placeholders that need a free TCP port each.
        env: Variables with placeholders.
    """

    argv: tuple[str, ...]
    ports: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
