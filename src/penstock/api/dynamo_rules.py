"""Rules of runtime dynamo: its own frontend stands at the door, so settings of Penstock's router would do nothing."""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from pydantic.alias_generators import to_camel

from penstock.api.base import SpecModel
from penstock.api.enums import Runtime
from penstock.api.router import RetriesConfig, RouterConfig
from penstock.api.rule import Rule, quoted, unless
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
    "peers",
)
"""Keys of ``spec.router`` that Dynamo's frontend has no flag for; ``kvEventsPort`` needs ``tokenizer``."""

_WITHIN = (
    ("tiers", TiersConfig, "enabled"),
    ("retries", RetriesConfig, "budget_fraction"),
    ("retries", RetriesConfig, "min_per_second"),
)
"""Keys of its sections likewise; ``retries.maxPerRequest`` is the frontend's ``--migration-limit``."""


def _is_default(path: str, value: Any, annotation: Any) -> str:
    """Return CEL that holds while the key at ``path`` has its default.

    Args:
        path: From ``self``.
        value: The default.
        annotation: The field's type; tells a number's CEL type, which a whole default does not.
    """
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
    return f"{path} == {_literal(value, annotation)}"


def _literal(value: Any, annotation: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return quoted(str(value.value))
    if isinstance(value, str):
        return quoted(value)
    return repr(float(value)) if _holds_float(annotation) else str(value)


def _holds_float(annotation: Any) -> bool:
    return annotation is float or any(map(_holds_float, get_args(annotation)))


def _unused(name: str, kind: type[SpecModel] = RouterConfig, section: str = "") -> Rule[Any]:
    field = kind.model_fields[name]
    path = ".".join(("router", *filter(None, (section, to_camel(name)))))

    def holds(spec: Any) -> bool:
        within = getattr(spec.router, section) if section else spec.router
        return spec.runtime is not Runtime.DYNAMO or getattr(within, name) == field.default

    return Rule(
        path=path,
        must=f"{path} keeps its default under runtime dynamo, whose own frontend routes",
        cel=f"self.runtime != 'dynamo' || {_is_default(f'self.{path}', field.default, field.annotation)}",
        find=unless(holds),
        text="has no effect: Dynamo's own frontend stands at the door, not Penstock's router",
        remedy="remove it, or choose runtime vllm",
    )


DYNAMO_RULES: tuple[Rule[Any], ...] = (
    *(_unused(name) for name in _WITHOUT_EFFECT),
    *(_unused(name, kind, section) for section, kind, name in _WITHIN),
    Rule(
        path="planner.metrics.prometheusUrl",
        must="planner.metrics.prometheusUrl is null under runtime dynamo",
        cel="self.runtime != 'dynamo' || !has(self.planner.metrics.prometheusUrl)",
        find=unless(
            lambda spec: spec.runtime is not Runtime.DYNAMO or spec.planner.metrics.prometheus_url is None
        ),
        text="Prometheus is asked by the names of Penstock's router, which Dynamo's frontend does not export",
        remedy="remove it: source router reads Dynamo's frontends and workers",
    ),
)
"""Rules of ``spec``."""
