"""Reads a policy's parameters from the graph's router section into the policy's own model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.api import RouterConfig
from penstock.core.errors import ConfigError

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
    given, own = config.policy_parameters or {}, own or {}
    adapter = TypeAdapter(model)
    known = sorted(adapter.json_schema()["properties"].keys() - own.keys())
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(
            f"router.policyParameters: {', '.join(unknown)}: policy {config.policy} has {', '.join(known) or 'none'}"
        )
    try:
        return adapter.validate_python({**given, **own})
    except ValidationError as exc:
        wrong = "; ".join(f"{each['loc'][0]} {each['input']!r}: {each['msg']}" for each in exc.errors())
        raise ConfigError(f"router.policyParameters: {wrong}") from exc
