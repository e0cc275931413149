"""Rules of a runtime whose own frontend serves requests, so that settings of Penstock's router would do nothing."""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from penstock.api.base import SpecModel
from penstock.api.router import RetriesConfig, RouterConfig
from penstock.api.rule import Rule, literal, quoted, unless
from penstock.api.runtimes import DEFAULT_RUNTIME, OwnFrontend
from penstock.api.tiers import TiersConfig

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
)
"""Keys of ``spec.router`` that configure Penstock's router alone; ``kvEventsPort`` needs ``tokenizer``."""

_WITHIN = (
    ("tiers", TiersConfig, "enabled"),
    ("retries", RetriesConfig, "budget_fraction"),
    ("retries", RetriesConfig, "min_per_second"),
)
"""Keys of its sections likewise."""


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
        find=unless(lambda spec: spec.runtime != runtime or spec.router.policy in frontend.policies),
        text=f"%s is not known to {frontend.name}'s frontend, which routes here",
        values=("self.router.policy",),
        remedy=f"choose {known}",
    )


def frontend_rules(runtime: str, frontend: OwnFrontend) -> tuple[Rule[Any], ...]:
    """Return the rules that settings without effect keep their defaults."""
    url = "planner.metrics.prometheusUrl"
    return (
        *(_unused(runtime, frontend, name) for name in _WITHOUT_EFFECT),
        *(_unused(runtime, frontend, name, kind, section) for section, kind, name in _WITHIN),
        Rule(
            path=url,
            must=f"{url} is null under runtime {runtime}",
            cel=f"self.runtime != '{runtime}' || !has(self.{url})",
            find=unless(lambda spec: spec.runtime != runtime or spec.planner.metrics.prometheus_url is None),
            text=f"Prometheus is asked by the names of Penstock's router, which {frontend.name}'s frontend does not export",
            remedy=f"remove it: source router reads {frontend.name}'s frontends and workers",
        ),
    )


def _unused(
    runtime: str,
    frontend: OwnFrontend,
    name: str,
    kind: type[SpecModel] = RouterConfig,
    section: str = "",
) -> Rule[Any]:
    field = kind.model_fields[name]
    path = ".".join(("router", *filter(None, (section, to_camel(name)))))

    def holds(spec: Any) -> bool:
        within = getattr(spec.router, section) if section else spec.router
        return bool(spec.runtime != runtime or getattr(within, name) == field.default)

    return Rule(
        path=path,
        must=f"{path} keeps its default under runtime {runtime}, whose own frontend routes",
        cel=f"self.runtime != '{runtime}' || {_is_default(f'self.{path}', field.default, field.annotation)}",
        find=unless(holds),
        text=f"has no effect: {frontend.name}'s own frontend takes the requests, not Penstock's router",
        remedy=f"remove it, or choose runtime {DEFAULT_RUNTIME}",
    )
