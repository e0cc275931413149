"""Objects that a graph's routers share: the ConfigMap with the graph's settings, and the Secret with which they authenticate each other."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from penstock.api import GraphDeployment, LeaseConfig
from penstock.api.engine import SHORTEST_SAFE_LEASE_S
from penstock.kube.kinds import CONFIG_MAP, GRAPH_DEPLOYMENT, SECRET
from penstock.kube.objects.names import GRAPH_FILE, GRAPH_SECRET_VARIABLE, child_name
from penstock_operator.resources.metadata import ROUTER_SUFFIX, BuildContext, graph_child

_DIGEST_CHARS = 16
"""Length of the digest in hexadecimal digits: 64 bits, enough that two configurations of one graph never collide by
chance."""

_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""YAML dumper: libyaml's, which is ten times as fast, if PyYAML was built with it."""


def config_map(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the ConfigMap that a graph's routers mount: the graph as YAML, reduced to the fields that a router reads.

    ``context`` are the settings from which the objects are built.
    """
    data = {PurePosixPath(GRAPH_FILE).name: router_manifest(graph)}
    return graph_child(CONFIG_MAP, graph, context, ROUTER_SUFFIX, data=data)


def config_digest(graph: GraphDeployment) -> str:
    """Return a digest of the settings that are read only when a router starts; a changed digest restarts the routers and nothing else.

    The admission section and the tiers' shares and targets are left out, because running routers reload them. Of the
    graph's SLO it includes only the TTFT, which routing policies read at their start.
    """
    manifest = _router_spec(graph)
    spec = {key: value for key, value in manifest["spec"].items() if key != "engine"}
    router = {key: value for key, value in spec["router"].items() if key not in {"admission", "tiers"}}
    spec["slo"] = graph.spec.slo.ttft_seconds
    if graph.spec.engine.tls is not None:
        spec["tls"] = manifest["spec"]["engine"]["tls"]
    tiers = graph.spec.router.tiers
    spec["router"] = {**router, "tiers": [tiers.enabled, tiers.keys_secret, tiers.keys_file]}
    # JSON, because dumping YAML a second time would take most of a build's time.
    text = json.dumps({**manifest, "spec": spec}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def router_manifest(graph: GraphDeployment) -> str:
    """Return the graph as YAML, reduced to the fields that a router reads.

    Of services only the roles remain, so that scaling or changing a worker restarts no router. The planner is
    disabled, because its budget would be validated against replica numbers that are absent.
    """
    return str(yaml.dump(_router_spec(graph), Dumper=_DUMPER, sort_keys=True, width=110))


def _router_spec(graph: GraphDeployment) -> dict[str, Any]:
    spec = graph.spec
    manifest: dict[str, Any] = {
        "model": spec.model.to_manifest(),
        "runtime": spec.runtime,
        "services": {name: {"role": each.role.value} for name, each in spec.services.items()},
        "slo": spec.slo.to_manifest(),
        "router": spec.router.to_manifest(),
        "lease": _lease(spec.lease_seconds),
        "planner": {"enabled": False},
    }
    bounds = {
        "maxBatchTokens": spec.batch_tokens,
        "requestLimit": spec.engine.request_limit if spec.router.tiers.enabled else None,
    }
    if any(bound is not None for bound in bounds.values()):
        manifest["engine"] = {key: bound for key, bound in bounds.items() if bound is not None}
    if spec.engine.tls is not None:
        manifest["engine"] = {**manifest.get("engine", {}), "tls": spec.engine.tls.to_manifest()}
    return GRAPH_DEPLOYMENT.of({"name": graph.name}, spec=manifest)


def _lease(duration_seconds: int) -> dict[str, Any]:
    """Return a lease section that contains only what a router reads: the lease that prefill grants."""
    lease = {
        "durationSeconds": duration_seconds,
        "decoderBlocksTtlSeconds": max(LeaseConfig().decoder_blocks_ttl_seconds, duration_seconds),
        "acknowledgeShortLease": duration_seconds < SHORTEST_SAFE_LEASE_S,
    }
    return LeaseConfig.model_validate(lease).to_manifest()


_KEY: Final = "secret"
_UID_DIGITS: Final = 8


def graph_secret(graph: GraphDeployment, context: BuildContext, value: str) -> dict[str, Any]:
    """Return the Secret ``GRAPH-router-UID``, which the operator creates once and never reads.

    Its name contains the first digits of the graph's UID. So a new graph with the name of a deleted one has a
    different Secret, which the garbage collector does not delete.

    Args:
        graph: The graph.
        context: Settings from which the objects are built.
        value: The secret value.
    """
    return graph_child(SECRET, graph, context, _suffix(context), immutable=True, stringData={_KEY: value})


def graph_secret_variable(graph: GraphDeployment, context: BuildContext) -> dict[str, Any]:
    """Return the entry of a router container's ``env`` that sets the value of the graph's Secret.

    Routers of the graph authenticate each other with this value. ``context`` has the graph's UID, a part of the
    Secret's name.
    """
    reference = {"name": child_name(graph.name, _suffix(context)), "key": _KEY}
    return {"name": GRAPH_SECRET_VARIABLE, "valueFrom": {"secretKeyRef": reference}}


def _suffix(context: BuildContext) -> str:
    return f"{ROUTER_SUFFIX}-{context.owner_uid[:_UID_DIGITS]}" if context.owner_uid else ROUTER_SUFFIX
