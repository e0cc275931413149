"""Values of llm-d's chart llm-d-modelservice become a graph; what has no counterpart is listed. Pure."""

from __future__ import annotations

from penstock.api.manifests.foreign import ManifestSource
from penstock.api.manifests.importing import ImportResult
from penstock_importers.container import read_container, read_parallelism, read_pod
from penstock_importers.graph import Draft, convert, graph_name, read_model, read_service

OWN_KEY = "modelArtifacts"
"""The top-level key that only these values have."""
_ROUTING = "is not made by a graph: Penstock's router picks the workers; point the route at its Service, or set router.gateway"
_NOTES = {
    "routing": _ROUTING,
    "accelerator": "is not carried; write gpuResourceName of a node pool, or the claim into podTemplate",
    "multinode": "makes LeaderWorkerSets; write nodesPerReplica and all GPUs as gpusPerReplica",
    "requester": "has no counterpart: workers start by themselves",
    "modelArtifacts.authSecretName": "is not carried; name the Secret in envFrom",
    "modelArtifacts.size": "is a volume for the model; use cacheMount and cacheClaim of a node pool",
    "modelArtifacts.mountPath": "is a volume for the model; use cacheMount and cacheClaim of a node pool",
    "modelArtifacts.labels": "is what the InferencePool selects; the operator labels its pods itself",
}
_SERVICE_NOTES = {
    "autoscaling": "is not carried; write scaling with its bounds",
    "monitoring": "is not carried; the chart's PodMonitor scrapes workers",
    "acceleratorTypes": "is not carried; write a node pool",
    "resourceClaims": "is not carried; write the claims into podTemplate",
    "initContainers": "is not carried; write them into podTemplate",
}


def import_values(text: str, file: str | None = None, *, name: str | None = None) -> ImportResult:
    """Convert one set of values of ``text``, as a graph of this name; see `Importer`."""
    return convert(text, file, is_own=lambda value: OWN_KEY in value, fill=lambda source: _fill(source, name))


def _fill(source: ManifestSource, name: str | None) -> Draft:
    draft, model = Draft(), source.at(OWN_KEY)
    served = model.take("name")
    if not isinstance(served, str):
        model.refuse("has no name, so there is no model to serve")
        return draft
    uri = model.take("uri")
    is_template = not isinstance(uri, str) or "{{" in uri
    read_model(draft, model.at("uri"), f"hf://{served}" if is_template else str(uri), served)
    draft.name = name or graph_name(str(source.take("fullnameOverride") or served))
    for key, why in _NOTES.items():
        part = source.at(*key.split("."))
        if part.peek() in (None, False, ""):
            part.take()
        else:
            part.note(why)
    roles = [role for role in ("prefill", "decode") if _is_used(source.at(role))]
    for role in ("prefill", "decode"):
        part = source.at(role)
        if role in roles:
            _add_service(draft, part, "aggregated" if roles == ["decode"] else role)
        elif part.peek() is not None:
            part.take()
    if roles in ([], ["prefill"]):
        source.at("decode").refuse("creates no decode worker, and a graph needs one")
    return draft


def _is_used(part: ManifestSource) -> bool:
    """The chart creates what is given, unless it says that it shall not, or asks for no replica."""
    return part.peek() is not None and part.peek("create") is not False and part.peek("replicas") != 0


def _add_service(draft: Draft, source: ManifestSource, role: str) -> None:
    service = read_service(source, role)
    source.taken.add((*source.base, "create"))
    containers = source.elements("containers")
    for each in containers:
        if each is not containers[0]:
            each.note("is another container of the pod; write it into podTemplate")
            continue
        each.taken.update({(*each.base, "modelCommand"), (*each.base, "mountModelVolume")})
        read_container(each, service, draft.model)
    read_pod(source, service)
    read_parallelism(source.at("parallelism"), service)
    source.note_given(
        {key: why for key, why in _SERVICE_NOTES.items() if source.peek(key) not in ([], {}, None)}
    )
    draft.services[role] = service
