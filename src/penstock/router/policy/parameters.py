"""What a routing policy reads of its graph's router section, by its own model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.api import RouterConfig
from penstock.core.validation import read_parameters

P = TypeVar("P")


def parameters(model: type[P], config: RouterConfig, own: Mapping[str, Any] | None = None) -> P:
    """Return a policy's parameters as its model reads them.

    Args:
        model: A dataclass or pydantic model; its fields turn the texts of ``policyParameters`` into values.
        config: The router section.
        own: Fields that the section sets by other keys, and ``policyParameters`` may not.

    Raises:
        ConfigError: there is no such parameter, or its value does not fit.
    """
    given = config.policy_parameters or {}
    return read_parameters(model, given, key="router.policyParameters", policy=config.policy, own=own)
