"""One factory builds the live router's core and the simulated one: no setting of a manifest reaches only one of them."""

from collections.abc import Collection, Mapping
from enum import Enum
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from penstock.api import GraphSpec, Role, RouterConfig, Tier
from penstock.api.base import SpecModel
from penstock.api.fields import bounds, keys_of, walk
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.registry import policy_names
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings
from penstock.simulator.scenario import NOT_SIMULATED, PoolSpec, ProfiledModel, Scenario, unsimulated
from penstock.simulator.simulation import Simulation

MODEL = ProfiledModel("a100-llama-8b-bf16-tp1", request_limit=9)
DRIVERS = {"kvEventsPort", "retries.maxContinuations"}
"""Keys that the simulation reads alongside the core."""
GIVEN = {
    "policy": policy_names(),
    "sessionHeader": ["x-session"],
    "tokenizer": ["simulated"],
    "default": [Tier.PREMIUM, Tier.BACKGROUND],
    "shares": [{"premium": 0.6, "standard": 0.3, "background": 0.1}],
}
"""Values of keys that a type and its bounds do not say."""
OWN = {"is_supervised", "_refilled_s"}
"""Attributes of a driver: who restarts workers, and when it began."""


def scalars(value, path="", seen=None):
    """Return every scalar that an object reaches, by its path; functions are left out."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum):
        return {path: value}
    if id(value) in seen or callable(value):
        return {}
    seen.add(id(value))
    found = {path: type(value).__name__}
    if isinstance(value, BaseModel):
        parts = value.model_dump()
    elif isinstance(value, Mapping):
        parts = {str(key): each for key, each in value.items()}
    elif isinstance(value, Collection):
        parts = dict(enumerate(value))
    else:
        slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
        names = [*getattr(value, "__dict__", {}), *sorted(slots)]
        parts = {name: getattr(value, name) for name in names if hasattr(value, name)}
    for name, each in parts.items():
        if str(name).lstrip("_") not in {own.lstrip("_") for own in OWN}:
            found |= scalars(each, f"{path}.{name}", seen)
    return found


def roles_of(is_split):
    """Return the roles of a graph's workers."""
    return (Role.PREFILL, Role.DECODE) if is_split else (Role.AGGREGATED,)


def graph_of(is_split):
    """Return the graph whose workers are those of the simulation."""
    engine = {"maxBatchTokens": MODEL.max_num_batched_tokens, "requestLimit": MODEL.request_limit}
    services = {"frontend": {"role": "router"}, **{role.value: {"role": role} for role in roles_of(is_split)}}
    spec = {"model": {"name": "m"}, "runtime": "simulated", "engine": engine, "services": services}
    return GraphSpec.model_validate(spec)


def live(config, is_split):
    """Return what the live router's core and retries hold."""
    workers = tuple(WorkerSpec(role, role, f"http://{role}") for role in roles_of(is_split))
    server = RouterServer(
        RouterSettings(
            "m",
            disaggregated=is_split,
            config=config,
            lease_s=MODEL.lease.duration_s,
            graph=graph_of(is_split),
            workers=workers,
        )
    )
    return scalars(server.core) | scalars(server._handler._retries, "retries")


def simulated(config, is_split):
    """Return what the simulated router's core and retries hold."""
    pools = [PoolSpec(role, 1, MODEL) for role in roles_of(is_split)]
    router = Simulation(Scenario(pools, config), []).routers[0]
    return scalars(router.core) | scalars(router.retries, "retries")


def values_of(key, info):
    """Return a strategy for one key's values; None: its type says too little."""
    if key in GIVEN:
        return st.sampled_from(GIVEN[key])
    kind = type(info.default)
    if isinstance(info.default, SpecModel):
        return sections_of(kind)
    if isinstance(info.default, bool | Enum):
        return st.booleans() if kind is bool else st.sampled_from(list(kind))
    limits = bounds(info)
    if not limits:
        return None
    least = limits.get("ge", limits.get("gt", 0))
    most = min(limits.get("le", limits.get("lt", 10**6)), least + 1000)
    if isinstance(info.default, float) or "float" in str(info.annotation):
        return st.floats(least, most, exclude_min="gt" in limits)
    return st.integers(int(least), int(most))


@cache
def sections_of(model):
    """Return a strategy for a section's keys, each present or not."""
    found = {key: values_of(key, info) for key, info in keys_of(model).items()}
    return st.fixed_dictionaries({}, optional={key: each for key, each in found.items() if each is not None})


def valid(section):
    """Return whether a section breaks no rule."""
    try:
        RouterConfig.model_validate(section)
    except ValidationError:
        return False
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(sections_of(RouterConfig).filter(valid), st.booleans())
def test_the_live_and_the_simulated_core_hold_the_same_settings(section, is_split):
    """Whatever a manifest says, every scalar that either core reaches is the same in both."""
    config = RouterConfig.model_validate(section).model_copy(
        update={"kv_events_port": None, "tokenizer": None}
    )

    assert simulated(config, is_split) == live(config, is_split)


def other(key, info):
    """Return a value of a key that is not its default; None: its type says too little."""
    default, limits = info.default, bounds(info)
    if key in GIVEN:
        return next(each for each in GIVEN[key] if each != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, Enum):
        return next(each for each in type(default) if each is not default)
    if not limits:
        return None
    if default is None:
        return 1.0 if "float" in str(info.annotation) else max(1, int(limits.get("ge", 1)))
    return default * 2 if 0 < default * 2 <= limits.get("le", 10**9) else default / 2 or 1


def with_key(path, value):
    """Return a section in which everything counts, and one key has a value; without the key where that is None."""
    section = {"policy": "dualmap", "tiers": {"enabled": True}, "admission": {"mode": "token-capacity"}}
    if path.startswith("prefillDeflection"):
        # Refused alongside tiers.
        section = {"policy": "dualmap", "prefillDeflection": {"enabled": True}}
    *above, last = path.split(".")
    within = section
    for each in above:
        within = within.setdefault(each, {})
    if value is None:
        within.pop(last, None)
    else:
        within[last] = value
    return section


def test_every_key_of_the_router_reaches_the_simulated_core_or_is_named():
    """One key at a time: what changes nothing there is read by the simulation itself, or named as without effect."""
    silent = set()
    for entry in walk(RouterConfig):
        value = None if entry.section else other(entry.path.rpartition(".")[2], entry.info)
        sections = [with_key(entry.path, each) for each in (None, value)]
        if value is not None and valid(sections[1]):
            without, with_it = (simulated(RouterConfig.model_validate(each), True) for each in sections)
            if without == with_it:
                silent.add(entry.path)

    named = {path for path in silent if any(f"{path}.".startswith(f"{key}.") for key in NOT_SIMULATED)}
    assert silent - named == DRIVERS


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({}, []),
        (
            {"sessionHeader": "x-session", "limits": {"maxBodyBytes": 2048}},
            ["router.sessionHeader", "router.limits"],
        ),
        ({"tiers": {"header": "x-tier"}}, ["router.tiers.header"]),
    ],
)
def test_keys_without_effect_in_a_simulation_are_named(section, told):
    """As the command's notes say them."""
    assert unsimulated(RouterConfig.model_validate(section)) == told
