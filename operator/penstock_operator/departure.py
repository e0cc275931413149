"""The operator's last act where its own namespace is deleted: its graphs there wait for a drain that no operator would finish.

Kubernetes deletes the operator's pod with the rest of the namespace. Graphs would keep the finalizer that only the operator
removes, and the namespace would never be gone. Their pods are deleted by Kubernetes and finish their requests at SIGTERM.
"""

from __future__ import annotations

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT, NAMESPACE
from penstock.kube.objects.names import OPERATOR

log = get_logger(__name__)


async def release_graphs(client: KubeClient, namespace: str, *, finalizer: str) -> int:
    """Remove ``finalizer`` from the namespace's graphs if the namespace is being deleted; return from how many.

    To be called once nothing adds the finalizer any more: as the process ends. A graph that cannot be read or written is
    logged with the command that releases it.
    """
    try:
        found = await client.get(NAMESPACE, namespace)
        if not found["metadata"].get("deletionTimestamp"):
            return 0
        graphs = (await client.list(GRAPH_DEPLOYMENT, namespace=namespace)).items
    except ClusterError as exc:
        log.warning("own namespace not looked at", namespace=namespace, error=str(exc))
        return 0
    released = 0
    for graph in graphs:
        metadata = graph["metadata"]
        finalizers = metadata.get("finalizers", [])
        if finalizer not in finalizers:
            continue
        left = [each for each in finalizers if each != finalizer]
        patch = {"metadata": {"finalizers": left, "resourceVersion": metadata["resourceVersion"]}}
        name = metadata["name"]
        try:
            await client.patch(GRAPH_DEPLOYMENT, name, patch, namespace=namespace, field_manager=OPERATOR)
        except ClusterError as exc:
            remedy = f"""kubectl patch gd {name} -n {namespace} --type merge --patch '{{"metadata":{{"finalizers":null}}}}'"""
            log.warning("graph not released", namespace=namespace, name=name, error=str(exc), remedy=remedy)
        else:
            released += 1
            log.warning(
                "graph released: the operator's namespace is being deleted", namespace=namespace, name=name
            )
    return released
