"""KServe's LLMInferenceService becomes a graph; what has no counterpart is listed. Pure."""

from __future__ import annotations

from typing import Any

from penstock.api.manifests.foreign import ManifestSource
from penstock.api.manifests.importing import ImportResult
from penstock_importers.container import read_container, read_parallelism, read_pod
from penstock_importers.graph import Draft, convert, graph_name, read_model, read_service

_GROUP = "serving.kserve.io/"
_FURTHER_FLAGS = "VLLM_ADDITIONAL_ARGS"
_NOTES = {
    "baseRefs": "is merged by KServe; write what it sets into this graph",
    "worker": "spans nodes by a LeaderWorkerSet; write nodesPerReplica and all GPUs as gpusPerReplica",
    "model.lora": "is not carried; write model.adapters",
    "model.criticality": "is not carried; write router.tiers",
    "router.gateway": "is not made by a graph; point the Gateway at the router's Service, or set router.gateway",
    "router.route": "is not made by a graph; point the route at the router's Service",
    "router.ingress": "is not made by a graph; point the Ingress at the router's Service",
    "router.scheduler": "is replaced by router.policy",
}


def import_llmisvc(text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
    """Convert one LLMInferenceService of ``text``; see `Importer`."""

    def is_own(value: dict[str, Any]) -> bool:
        is_kind = value.get("kind") == "LLMInferenceService" and str(value.get("apiVersion")).startswith(
            _GROUP
        )
        return is_kind and name in (None, (value.get("metadata") or {}).get("name"))

    return convert(text, file, is_own=is_own, fill=_fill)


def _fill(source: ManifestSource) -> Draft:
    source.taken.update({("apiVersion",), ("kind",)})
    spec, draft = source.at("spec"), Draft()
    draft.name = graph_name(str(source.take("metadata", "name") or ""))
    draft.namespace = source.take("metadata", "namespace")
    uri = spec.take("model", "uri")
    if not isinstance(uri, str):
        spec.at("model").refuse("names no uri, so there is no model to serve")
        return draft
    served = spec.take("model", "name")
    read_model(draft, spec.at("model", "uri"), uri, served if isinstance(served, str) else None)
    spec.note_given(_NOTES)
    has_prefill = spec.peek("prefill") is not None
    _add_service(draft, spec, "decode" if has_prefill else "aggregated")
    if has_prefill:
        prefill = spec.at("prefill")
        prefill.note_given({"worker": _NOTES["worker"]})
        _add_service(draft, prefill, "prefill")
    return draft


def _add_service(draft: Draft, source: ManifestSource, role: str) -> None:
    service = read_service(source, role)
    containers = source.elements("template", "containers")
    for each in containers:
        if each is containers[0]:
            read_container(each, service, draft.model, more_args=_FURTHER_FLAGS)
        else:
            each.note("is another container of the pod; write it into podTemplate")
    read_pod(source.at("template"), service)
    read_parallelism(source.at("parallelism"), service)
    bounds = {key: source.take("scaling", key) for key in ("minReplicas", "maxReplicas")}
    if any(each is not None for each in bounds.values()):
        service["scaling"] = {key: each for key, each in bounds.items() if each is not None}
    draft.services[role] = service
