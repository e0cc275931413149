"""Values of vLLM's production-stack chart become a graph; what has no counterpart is listed. Pure."""

from __future__ import annotations

from typing import Any, Final

from penstock.api.manifests.foreign import ManifestSource
from penstock.api.manifests.importing import ImportResult
from penstock_importers.container import read_env, read_flags
from penstock_importers.graph import Draft, convert, graph_name, read_model, read_service

OWN_KEY: Final = "servingEngineSpec"
"""The top-level key that only these values have."""

_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}
_POLICIES: Final = {
    "roundrobin": "round-robin",
    "prefixaware": "prefix-cost",
    "kvaware": "prefix-cost",
    "session": "prefix-cost",
}
_FLAGS: Final = {
    "dtype": "--dtype",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxNumSeqs": "--max-num-seqs",
    "maxNumBatchedTokens": "--max-num-batched-tokens",
    "maxLoras": "--max-loras",
}
_SWITCHES: Final = {
    "enableChunkedPrefill": "enable-chunked-prefill",
    "enablePrefixCaching": "enable-prefix-caching",
    "enableLoRA": "enable-lora",
}
_NOTES: Final = {
    "pvcStorage": "is a claim that the chart makes; use cacheMount and cacheClaim of a node pool",
    "pvcAccessMode": "is a claim that the chart makes; use cacheMount and cacheClaim of a node pool",
    "runtimeClassName": "is not carried; write podTemplate.spec.runtimeClassName",
    "requestGPUType": "is not carried; write gpuResourceName of a node pool",
    "nodeSelectorTerms": "is not carried; write a node pool, or podTemplate.spec.affinity",
    "keda.triggers": "has no counterpart: the planner reads the router",
    "labels": "is not carried; the operator labels its pods itself",
}


def import_values(text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
    """Convert one model of the values in ``text``, by its name where there are several; see `Importer`."""
    return convert(text, file, is_own=lambda value: OWN_KEY in value, fill=lambda source: _fill(source, name))


def _fill(source: ManifestSource, name: str | None) -> Draft:
    draft, engines = Draft(), source.at(OWN_KEY)
    source.taken.update({(OWN_KEY, "enableEngine"), (OWN_KEY, "containerPort"), (OWN_KEY, "servicePort")})
    if not engines.peek("runtimeClassName"):
        engines.take("runtimeClassName")
    chosen = _chosen(engines, name)
    for each in chosen:
        _read_engine(draft, each, role=_role_of(each))
    if chosen:
        draft.name = name or graph_name(
            str(chosen[0].peek("name")) if len(chosen) == 1 else draft.model["name"]
        )
    _read_router(draft, source.at("routerSpec"))
    return draft


def _role_of(part: ManifestSource) -> str:
    return _ROLES.get(str(part.peek("lmcacheConfig", "kvRole")), "aggregated")


def _chosen(engines: ManifestSource, name: str | None) -> list[ManifestSource]:
    """Return the entries of one graph: the named or only one, or a pair of prefill and decode."""
    entries = engines.elements("modelSpec")
    if name is None and sorted(map(_role_of, entries)) == ["decode", "prefill"]:
        return entries
    found = [each for each in entries if name in (None, each.peek("name"))]
    if len(found) != 1:
        names = ", ".join(str(each.peek("name")) for each in entries)
        engines.at("modelSpec").refuse(
            f"holds {len(entries)} models, and a graph has one; give --name with one of {names}"
            if entries
            else "names no model"
        )
        return []
    for each in entries:
        if each.base != found[0].base:
            each.note("is another model; convert it by its --name as a graph of its own", each.peek("name"))
    return found


def _read_engine(draft: Draft, source: ManifestSource, *, role: str) -> None:
    source.taken.add((*source.base, "name"))
    uri = source.take("modelURL")
    if not isinstance(uri, str):
        source.refuse("names no modelURL, so there is no model to serve")
        return
    if "name" not in draft.model:
        read_model(draft, source.at("modelURL"), uri if "://" in uri else f"hf://{uri}", None)
    service = read_service(source, role, key="replicaCount")
    gpus = source.take("requestGPU")
    if gpus is not None:
        service["gpusPerReplica"] = max(1, int(gpus))
    repository, tag = source.take("repository"), source.take("tag")
    if repository:
        service["image"] = f"{repository}:{tag}" if tag else str(repository)
    _read_vllm(source.at("vllmConfig"), service, draft.model)
    read_env(source, service)
    _read_token(source.at("hf_token"), service)
    _read_resources(source, service)
    bounds = {
        there: source.take("keda", here)
        for here, there in (("minReplicaCount", "minReplicas"), ("maxReplicaCount", "maxReplicas"))
    }
    if any(each is not None for each in bounds.values()):
        service["scaling"] = {key: each for key, each in bounds.items() if each is not None}
        source.taken.add((*source.base, "keda", "enabled"))
    _read_cache(draft, source.at("lmcacheConfig"), is_transfer=role != "aggregated")
    source.note_given(_NOTES)
    draft.services[role] = service


def _read_vllm(source: ManifestSource, service: dict[str, Any], model: dict[str, Any]) -> None:
    length, tensor = source.take("maxModelLen"), source.take("tensorParallelSize")
    if isinstance(length, int):
        model["contextTokens"] = length
    if isinstance(tensor, int):
        service["gpusPerReplica"] = max(tensor, service["gpusPerReplica"])
    words: list[str] = []
    for key, flag in _FLAGS.items():
        value = source.take(key)
        words += [] if value is None else [flag, str(value)]
    for key, switch in _SWITCHES.items():
        value = source.take(key)
        words += [] if value is None else [f"--{switch}" if value else f"--no-{switch}"]
    words += [str(each) for each in source.take_list("extraArgs")]
    read_flags(source.at("extraArgs"), words, service, model)


def _read_token(source: ManifestSource, service: dict[str, Any]) -> None:
    """A token is never written into a graph; a reference to its Secret is."""
    secret, key = source.peek("secretName"), source.peek("secretKey")
    if source.peek() is None:
        return
    if secret and key:
        source.take()
        reference = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        service.setdefault("env", []).append(reference)
    else:
        source.note("is a secret; put it into a Secret, and name that in envFrom", "(hidden)")


def _read_resources(source: ManifestSource, service: dict[str, Any]) -> None:
    found: dict[str, dict[str, Any]] = {}
    for kind in ("request", "limit"):
        for here, there in (("CPU", "cpu"), ("Memory", "memory")):
            value = source.take(f"{kind}{here}")
            if value is not None:
                found.setdefault(f"{kind}s", {})[there] = str(value)
    if found:
        service["podTemplate"] = {"spec": {"containers": [{"name": "main", "resources": found}]}}


def _read_cache(draft: Draft, source: ManifestSource, *, is_transfer: bool) -> None:
    if source.peek() is None:
        return
    size = source.peek("cpuOffloadingBufferSize")
    if source.peek("enabled") is False:
        source.take()
    elif is_transfer:
        source.note(
            "is replaced by vLLM's NIXL connector, which the runtime sets up",
            "LMCache between prefill and decode",
        )
    elif size:
        source.taken.update({(*source.base, "enabled"), (*source.base, "cpuOffloadingBufferSize")})
        draft.engine["kvOffload"] = {"gigabytes": float(size), "store": "lmcache"}
        source.note_keys("is not carried; LMCache is set up by engine.kvOffload")


def _read_router(draft: Draft, source: ManifestSource) -> None:
    replicas, logic, key = (source.take(each) for each in ("replicaCount", "routingLogic", "sessionKey"))
    if isinstance(replicas, int):
        draft.router_replicas = replicas
    if policy := _POLICIES.get(str(logic)):
        draft.router["policy"] = policy
    if key:
        draft.router["sessionHeader"] = key
    source.note_keys("is of production-stack's router; Penstock's has keys of its own under spec.router")
