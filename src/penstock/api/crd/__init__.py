"""The API as CustomResourceDefinitions, made from the models; no second description of any field.

`python -m penstock.api.crd` writes the files, and `definitions` gives them to who compares them with a
cluster's. `schema` makes the models' JSON schema a structural OpenAPI schema, with bounds and rules in CEL; here are the
names, columns and subresources around it. Pure except for ``__main__``, which writes the files.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from penstock.api.base import SpecModel
from penstock.api.crd.schema import openapi
from penstock.api.gpu_pool import ClusterGpuPool, GpuPool
from penstock.api.graph import API_VERSION, GraphDeployment, ScalingAdapter
from penstock.api.profile_request import ProfileRequest

Column = dict[str, Any]

_GROUP, _, _VERSION = API_VERSION.partition("/")
_CATEGORIES: Final = ("penstock", "all")
"""Categories of the namespaced kinds alone: who may list a namespace's objects need not see the cluster's, and `kubectl get all` would fail."""


def _column(name: str, path: str, *, of: str = "string", wide: bool = False, about: str = "") -> Column:
    column: Column = {"name": name, "type": of, "jsonPath": path}
    if about:
        column["description"] = about
    if wide:
        column["priority"] = 1
    return column


_AGE = _column("Age", ".metadata.creationTimestamp", of="date")

_GRAPH_COLUMNS = (
    _column("Phase", ".status.phase", about="Pending, Progressing, Ready, Degraded or Failed."),
    _column(
        "Since",
        '.status.conditions[?(@.type=="Ready")].lastTransitionTime',
        of="date",
        about="How long requests have been served, or not.",
    ),
    _column("Prefill", ".status.summary.prefill", about="Prefill replicas, ready/target."),
    _column("Decode", ".status.summary.decode", about="Decode or aggregated replicas, ready/target."),
    _column("GPUs", ".status.summary.gpus", about="GPUs of workers, used/budget."),
    _column("Model", ".spec.model.name"),
    _AGE,
    _column("URL", ".status.address.url", wide=True, about="Where clients reach it, within the cluster."),
    _column("Reason", '.status.conditions[?(@.type=="Ready")].reason', wide=True, about="Why, or why not."),
    _column("Decision", ".status.planner.lastDecision", wide=True, about="The planner's last."),
)

_ADAPTER_COLUMNS = (
    _column("Graph", ".spec.graph"),
    _column("Service", ".spec.service"),
    _column("Desired", ".spec.replicas", of="integer", about="Desired replicas."),
    _column("Min", ".status.minReplicas", of="integer", about="Minimum that the graph allows."),
    _column("Max", ".status.maxReplicas", of="integer", about="Maximum that the graph allows."),
    _column(
        "Limited",
        '.status.conditions[?(@.type=="ScalingLimited")].status',
        about="Whether the desired number is outside what the graph allows.",
    ),
    _column("Ready", ".status.ready", of="integer", about="Replicas that pass their probes."),
    _AGE,
)

_REQUEST_COLUMNS = (
    _column("Phase", ".status.phase", about="Pending, Profiling, Succeeded or Failed."),
    _column(
        "Prefill-TP",
        ".status.recommendation.prefillTensorParallel",
        of="integer",
        about="Best tensor-parallel size for prefill.",
    ),
    _column(
        "Decode-TP",
        ".status.recommendation.decodeTensorParallel",
        of="integer",
        about="Best tensor-parallel size for decode.",
    ),
    _column("ConfigMap", ".status.configMap", about="Holds the result."),
    _AGE,
    _column("Graph", ".spec.graph", wide=True),
    _column(
        "Message", '.status.conditions[?(@.type=="Complete")].message', wide=True, about="Why, or why not."
    ),
)

_POOL_COLUMNS = (
    _column("Total", ".status.gpus.total", of="integer", about="GPUs of the pool."),
    _column("Held", ".status.gpus.held", of="integer", about="GPUs of existing workers."),
    _column("Free", ".status.gpus.free", of="integer", about="GPUs that none holds."),
    _column("Borrowed", ".status.gpus.borrowed", of="integer", about="GPUs held above guarantees."),
    _column(
        "Valid",
        '.status.conditions[?(@.type=="Valid")].status',
        about="Whether guarantees and graphs fit into the pool.",
    ),
    _column(
        "Met",
        '.status.conditions[?(@.type=="GuaranteesMet")].status',
        about="Whether every guarantee is satisfied.",
    ),
    _AGE,
)


@cache
def definitions() -> dict[str, dict[str, Any]]:
    """Return the CustomResourceDefinitions by name; shared by all callers, so not to be changed."""
    graph = _definition(GraphDeployment, "gd", _GRAPH_COLUMNS, {"status": {}})
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    adapter = _definition(ScalingAdapter, "gsa", _ADAPTER_COLUMNS, {"status": {}, "scale": scale})
    request = _definition(ProfileRequest, "gpr", _REQUEST_COLUMNS, {"status": {}})
    pool = _definition(GpuPool, "gpool", _POOL_COLUMNS, {"status": {}})
    of_cluster = _definition(ClusterGpuPool, "cgpool", _POOL_COLUMNS, {"status": {}}, is_namespaced=False)
    return {each["metadata"]["name"]: each for each in (graph, request, adapter, pool, of_cluster)}


def file_name(definition: dict[str, Any]) -> str:
    """Return the name of a definition's file: group, then plural."""
    return f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml"


def _definition(
    model: type[SpecModel],
    short: str,
    columns: tuple[Column, ...],
    subresources: dict[str, Any],
    *,
    is_namespaced: bool = True,
) -> dict[str, Any]:
    kind = model.__name__
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{_GROUP}"},
        "spec": {
            "group": _GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                **({"categories": list(_CATEGORIES)} if is_namespaced else {}),
            },
            "scope": "Namespaced" if is_namespaced else "Cluster",
            "versions": [
                {
                    "name": _VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": list(columns),
                    "subresources": subresources,
                    "schema": {"openAPIV3Schema": openapi(model)},
                }
            ],
        },
    }
