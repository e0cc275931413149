"""What the other autoscalers know beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.api import Role

Sizes = tuple[tuple[float, int], ...]
"""(from second, replicas), by strictly increasing time, one at least."""


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """What a user would have measured of the hardware beforehand, and an oracle's schedule.

    Attributes:
        prefill_tokens_per_s: Prompt tokens that one replica computes per second at its best, > 0 (KEDA).
        context_tokens: Longest context, tokens, > 0 (Dynamo measures its prefill queue in it).
        kv_tokens: KV cache of one replica, tokens, > 0 (Dynamo).
        schedule: By role, the sizes that the oracle follows; empty: it cannot run.
    """

    prefill_tokens_per_s: float = 10_000.0
    context_tokens: float = 16_384.0
    kv_tokens: float = 400_000.0
    schedule: Mapping[Role, Sizes] = field(default_factory=dict)


def settings_from(plain: Mapping[str, Any]) -> BaselineSettings:
    """Return the settings that were written as plain data; absent keys take their default.

    Raises:
        KeyError, TypeError, ValueError: the data are not settings.
    """
    known = {each.name for each in fields(BaselineSettings)}
    settings = {key: value for key, value in plain.items() if key in known}
    settings["schedule"] = {
        Role(role): tuple((float(at_s), int(replicas)) for at_s, replicas in sizes)
        for role, sizes in plain.get("schedule", {}).items()
    }
    return BaselineSettings(**settings)
