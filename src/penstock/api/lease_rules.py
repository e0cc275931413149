"""The rules that relate leases to services and to the router's queues. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.api.engine import SHORTEST_SAFE_LEASE_S, LeaseConfig
from penstock.api.enums import KvConnector, Role
from penstock.api.graph import GraphSpec
from penstock.api.rule import Breach, Rule
from penstock.api.runtimes import HAS_LEASES

DISPATCH_FRACTION: Final = 0.8
"""Chosen: share of a lease within which decode must have the request; a lease begins before the router learns of it."""

_OWN = "has(self.services[k].lease) && has(self.services[k].lease.durationSeconds)"


def _duration(name: str) -> str:
    """Return the CEL of the lease of a service, ``name`` being the CEL of its name."""
    lease = f"self.services[{name}].lease"
    return f"(has({lease}) && has({lease}.durationSeconds) ? {lease}.durationSeconds : self.lease.durationSeconds)"


def _with(prefill: str) -> str:
    """Return the CEL that holds for the name ``p`` of the prefill service, if there is one."""
    return f"self.services.filter(k, self.services[k].role == 'prefill').all(p, {prefill})"


_DEFAULTS: Final = LeaseConfig()
_AS_BY_DEFAULT: Final = (
    f"!self.lease.acknowledgeShortLease && self.lease.durationSeconds == {_DEFAULTS.duration_seconds} && "
    f"self.lease.decoderBlocksTtlSeconds == {_DEFAULTS.decoder_blocks_ttl_seconds}"
)


def _gives_leases(spec: GraphSpec) -> bool:
    return spec.lease != _DEFAULTS or any(service.lease is not None for service in spec.services.values())


def _short_overrides(spec: GraphSpec) -> Iterator[Breach]:
    for name, service in spec.services.items():
        own = None if service.lease is None else service.lease.duration_seconds
        if own is not None and own < SHORTEST_SAFE_LEASE_S and not spec.lease.acknowledge_short_lease:
            yield Breach((name, own), ("services", name, "lease", "durationSeconds"), _ACKNOWLEDGED)


def _short_lives(spec: GraphSpec) -> Iterator[Breach]:
    for name, service in spec.services.items():
        lease = spec.lease_of(service)
        is_own = service.role is Role.DECODE and service.lease is not None
        if is_own and lease.decoder_blocks_ttl_seconds < lease.duration_seconds:
            values = (name, lease.decoder_blocks_ttl_seconds, lease.duration_seconds)
            yield Breach(values, ("services", name, "lease"), (("lease",),))


def _slow_heartbeats(spec: GraphSpec) -> Iterator[Breach]:
    prefill, decode = spec.service(Role.PREFILL), spec.service(Role.DECODE)
    if prefill is None or decode is None:
        return
    held_s, renewed_s = (spec.lease_of(each).duration_seconds for each in (prefill[1], decode[1]))
    if renewed_s > 2 * held_s:
        path = ("services", decode[0], "lease")
        yield Breach((decode[0], renewed_s, held_s), path, (("services", prefill[0], "lease"), ("lease",)))


def _long_waits(spec: GraphSpec) -> Iterator[Breach]:
    longest_s, prefill = spec.router.decode_queue.max_wait_seconds, spec.service(Role.PREFILL)
    if longest_s is None or prefill is None:
        return
    lease_s = spec.lease_of(prefill[1]).duration_seconds
    if longest_s > DISPATCH_FRACTION * lease_s:
        related = (("services", prefill[0], "lease"), ("lease", "durationSeconds"))
        yield Breach((float(longest_s), lease_s), related=related)


_ACKNOWLEDGED = (("lease", "acknowledgeShortLease"),)
_TTL = (
    "(has(self.services[k].lease.decoderBlocksTtlSeconds) ? self.services[k].lease.decoderBlocksTtlSeconds : "
    "self.lease.decoderBlocksTtlSeconds)"
)
_DECODES = "has(self.services[k].lease) && self.services[k].role == 'decode'"
_WAIT = "self.router.decodeQueue.maxWaitSeconds"
_PREFILL = "self.services.filter(k, self.services[k].role == 'prefill')[0]"

SPEC_LEASE_RULES: tuple[Rule[GraphSpec], ...] = (
    Rule(
        path="lease",
        must=f"lease needs runtime {' or '.join(HAS_LEASES.names)}",
        cel=f"{HAS_LEASES.cel} || ({_AS_BY_DEFAULT} && self.services.all(k, !has(self.services[k].lease)))",
        holds=lambda spec: HAS_LEASES(spec.runtime) or not _gives_leases(spec),
        text="given, but prefill workers of runtime %s hold KV without a lease",
        values=("self.runtime",),
        remedy="remove it, and the services' own",
    ),
    Rule(
        path="lease",
        must="lease needs engine.kvConnector nixl",
        cel=f"self.engine.kvConnector == 'nixl' || ({_AS_BY_DEFAULT} && self.services.all(k, !has(self.services[k].lease)))",
        holds=lambda spec: spec.engine.kv_connector is KvConnector.NIXL or not _gives_leases(spec),
        text="given, but Mooncake knows no lease",
        remedy="remove it, and the services' own",
    ),
    Rule(
        path="services",
        at="spec.services.%s.lease.durationSeconds",
        must=f"a service's lease under {SHORTEST_SAFE_LEASE_S} s needs spec.lease.acknowledgeShortLease: true",
        cel=(
            "self.lease.acknowledgeShortLease || "
            f"self.services.all(k, !({_OWN}) || self.services[k].lease.durationSeconds >= {SHORTEST_SAFE_LEASE_S})"
        ),
        find=_short_overrides,
        first=f"self.services.filter(k, {_OWN} && self.services[k].lease.durationSeconds < {SHORTEST_SAFE_LEASE_S})",
        text=f"the lease of %s, %d s, is below {SHORTEST_SAFE_LEASE_S} s, so heartbeats would go out in every step",
        values=("k", "self.services[k].lease.durationSeconds"),
        remedy="raise it or set spec.lease.acknowledgeShortLease: true",
    ),
    Rule(
        path="services",
        at="spec.services.%s.lease",
        must="a decode service's decoderBlocksTtlSeconds is at least its durationSeconds, its own or the graph's",
        cel=f"self.services.all(k, !({_DECODES}) || {_TTL} >= {_duration('k')})",
        find=_short_lives,
        first=f"self.services.filter(k, {_DECODES} && {_TTL} < {_duration('k')})",
        text="%s would keep blocks for the next turn for %d s, below its lease of %d s",
        values=("k", _TTL, _duration("k")),
        remedy="raise decoderBlocksTtlSeconds or lower durationSeconds",
    ),
    Rule(
        path="services",
        at="spec.services.%s.lease",
        must="a decode service's lease is at most twice the prefill service's",
        cel=_with(
            f"self.services.all(k, self.services[k].role != 'decode' || {_duration('k')} <= 2 * {_duration('p')})"
        ),
        find=_slow_heartbeats,
        first="self.services.filter(k, self.services[k].role == 'decode')",
        text="the lease of %s, %d s, sets its heartbeats, which come too seldom for prefill's lease of %d s",
        values=("k", _duration("k"), f"[{_PREFILL}].map(p, {_duration('p')})[0]"),
        remedy="lower it to twice the prefill service's at most",
    ),
    Rule(
        path="router.decodeQueue.maxWaitSeconds",
        must=f"router.decodeQueue.maxWaitSeconds is at most {DISPATCH_FRACTION} of the prefill service's lease",
        cel=(
            f"!has(self.router.decodeQueue) || !has({_WAIT}) || "
            + _with(f"double({_WAIT}) <= {DISPATCH_FRACTION} * double({_duration('p')})")
        ),
        find=_long_waits,
        text="%s s is a longer wait for decode than a lease of %d s lasts, which is not renewed meanwhile",
        values=(_WAIT, f"[{_PREFILL}].map(p, {_duration('p')})[0]"),
        remedy="lower it, remove it, or raise lease.durationSeconds",
    ),
    Rule(
        path="router.prefillDeflection.enabled",
        must="router.prefillDeflection.enabled needs services of roles prefill and decode, of runtime "
        + " or ".join(HAS_LEASES.names),
        cel=f"!self.router.prefillDeflection.enabled || ({HAS_LEASES.cel} && "
        "self.services.exists(k, self.services[k].role == 'prefill'))",
        holds=lambda spec: (
            not spec.router.prefill_deflection.enabled or (HAS_LEASES(spec.runtime) and spec.is_disaggregated)
        ),
        text="true, but there is no prefill worker next to which a decode worker of runtime %s could compute prompts",
        values=("self.runtime",),
        remedy="turn it off",
    ),
)
