"""Reads a routing policy's parameters from the graph's router section into the policy's own model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.api import RouterConfig
from penstock.core.validation import read_parameters

P = TypeVar("P")


def parameters(model: type[P], config: RouterConfig, own: Mapping[str, Any] | None = None) -> P:
    """Return a policy's parameters as an instance of ``model``.

    Args:
        model: A dataclass or pydantic model; its fields convert the texts of ``policyParameters`` to values.
        config: Router section of the graph.
        own: Values, by field name, that are set by other keys of the router section (not by ``policyParameters``); a field in
            ``own`` is rejected in ``policyParameters``. None if there are no such fields.

    Raises:
        ConfigError: a parameter is unknown, or its value does not fit its field.
    """
    given = config.policy_parameters or {}
    return read_parameters(model, given, key="router.policyParameters", policy=config.policy, own=own)
