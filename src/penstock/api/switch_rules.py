"""The rules of workers that can be of either role, ``engine.switchable``. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from pydantic.alias_generators import to_camel

from penstock.api.enums import Role
from penstock.api.graph import GraphSpec
from penstock.api.rule import Breach, Rule
from penstock.api.runtimes import SWITCHES_ROLES

_REQUIRED: Final = ("gpus_per_replica", "nodes_per_replica")
_OPTIONAL: Final = ("node_pool", "image", "profile", "lease")
_LISTED: Final = ("args", "env", "env_from", "pod_template")
"""Keys of a service by which a process is started or placed: its new role finds it as it is. Of the last CEL knows no equality at a
bounded cost."""


def _unlike(key: str, spec: GraphSpec) -> Iterator[Breach]:
    prefill, decode = spec.service(Role.PREFILL), spec.service(Role.DECODE)
    if not spec.engine.switchable or prefill is None or decode is None:
        return
    if getattr(prefill[1], key) != getattr(decode[1], key):
        related = (("services", prefill[0], to_camel(key)), ("engine", "switchable"))
        yield Breach((prefill[0],), ("services", decode[0], to_camel(key)), related)


def _of(role: Role) -> str:
    return f"self.services.filter(k, self.services[k].role == '{role}')"


def _alike(key: str) -> str:
    """Return the CEL of whether every decode service ``d`` has the key as every prefill service ``p``."""
    mine, other = (f"self.services[{name}].{to_camel(key)}" for name in "dp")
    same = f"{mine} == {other}"
    if key in _OPTIONAL:
        same = f"has({mine}) == has({other}) && (!has({mine}) || {same})"
    return f"!self.engine.switchable || {_of(Role.PREFILL)}.all(p, {_of(Role.DECODE)}.all(d, {same}))"


def _same(key: str) -> Rule[GraphSpec]:
    return Rule(
        path="services",
        at=f"spec.services.%s.{to_camel(key)}",
        must=f"under engine.switchable the decode service's {to_camel(key)} is the prefill service's",
        cel=None if key in _LISTED else _alike(key),
        find=partial(_unlike, key),
        first=_of(Role.DECODE),
        text="differs from that of %s, whose workers are to take this role",
        values=(f"{_of(Role.PREFILL)}[0]",),
        remedy="make them equal, or remove engine.switchable",
    )


SWITCH_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="engine.switchable",
        must=f"engine.switchable needs runtime {' or '.join(SWITCHES_ROLES.names)}",
        cel=f"!self.engine.switchable || {SWITCHES_ROLES.cel}",
        holds=lambda spec: not spec.engine.switchable or SWITCHES_ROLES(spec.runtime),
        text="true, but workers of runtime %s keep their role",
        values=("self.runtime",),
        remedy="remove it or choose another runtime",
    ),
    Rule(
        path="engine.switchable",
        must="engine.switchable needs prefill and decode workers",
        cel="!self.engine.switchable || !self.services.exists(k, self.services[k].role == 'aggregated')",
        holds=lambda spec: not spec.engine.switchable or spec.service(Role.AGGREGATED) is None,
        text="true, but aggregated workers have one role",
        remedy="remove it",
    ),
    *map(_same, (*_REQUIRED, *_OPTIONAL, *_LISTED)),
)
