"""The rules of a runtime's own frontend: which settings of the router it cannot follow. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from pydantic.alias_generators import to_camel

from penstock.api.base import SpecModel
from penstock.api.router import RouterConfig
from penstock.api.rule import Rule, literal, quoted
from penstock.api.runtimes import DEFAULT_RUNTIME, OwnFrontend

_WITHOUT_EFFECT = (
    "session_header",
    "tokenizer",
    "policy_parameters",
    "dualmap",
    "auth",
    "cors_allowed_origins",
    "prefill_queue",
    "limits",
    "breaker",
    "health",
    "gateway",
    "tiers.enabled",
    "retries.budget_fraction",
    "retries.min_per_second",
)
"""Keys of ``spec.router`` that configure Penstock's router alone; ``kvEventsPort`` needs ``tokenizer``."""


def _is_default(path: str, value: Any, annotation: Any) -> str:
    """Return CEL that holds while the key at ``path`` has its default."""
    if value is None:
        return f"!has({path})"
    if isinstance(value, SpecModel):
        fields = type(value).model_fields
        parts = (
            _is_default(f"{path}.{to_camel(name)}", getattr(value, name), field.annotation)
            for name, field in fields.items()
        )
        return f"(!has({path}) || {' && '.join(parts)})"
    if isinstance(value, tuple | dict):
        return f"(!has({path}) || size({path}) == 0)"
    return f"{path} == {literal(value, annotation)}"


def policy_rule(runtime: str, frontend: OwnFrontend) -> Rule[Any]:
    """Return the rule that a graph's policy is one that the runtime's frontend knows."""
    known = ", ".join(frontend.policies)
    listed = ", ".join(map(quoted, frontend.policies))
    return Rule(
        path="router.policy",
        must=f"under runtime {runtime}, whose own frontend routes, the policy is one of {known}",
        cel=f"self.runtime != '{runtime}' || self.router.policy in [{listed}]",
        holds=lambda spec: spec.runtime != runtime or spec.router.policy in frontend.policies,
        text=f"%s is not known to {frontend.name}'s frontend, which routes here",
        values=("self.router.policy",),
        remedy=f"choose {known}",
    )


def frontend_rules(runtime: str, frontend: OwnFrontend) -> tuple[Rule[Any], ...]:
    """Return the rules that settings without effect keep their defaults."""
    url = "planner.metrics.prometheusUrl"
    return (
        *(_unused(runtime, frontend, name) for name in _WITHOUT_EFFECT),
        Rule(
            path=url,
            must=f"{url} is null under runtime {runtime}",
            cel=f"self.runtime != '{runtime}' || !has(self.{url})",
            holds=lambda spec: spec.runtime != runtime or spec.planner.metrics.prometheus_url is None,
            text=f"Prometheus is asked by the names of Penstock's router, which {frontend.name}'s frontend does not export",
            remedy=f"remove it: source router reads {frontend.name}'s frontends and workers",
        ),
    )


def _unused(runtime: str, frontend: OwnFrontend, name: str) -> Rule[Any]:
    *sections, key = name.split(".")
    kind: Any = RouterConfig
    for section in sections:
        kind = kind.model_fields[section].annotation
    field, read = kind.model_fields[key], attrgetter(f"router.{name}")
    path = ".".join(("router", *map(to_camel, (*sections, key))))
    return Rule(
        path=path,
        must=f"{path} keeps its default under runtime {runtime}, whose own frontend routes",
        cel=f"self.runtime != '{runtime}' || {_is_default(f'self.{path}', field.default, field.annotation)}",
        holds=lambda spec: spec.runtime != runtime or read(spec) == field.default,
        text=f"has no effect: {frontend.name}'s own frontend takes the requests, not Penstock's router",
        remedy=f"remove it, or choose runtime {DEFAULT_RUNTIME}",
    )
