"""Releases the graphs in the operator's own namespace if that namespace is being deleted.

Kubernetes deletes the operator's pod together with the namespace. The graphs would keep the finalizer that only the
operator removes, and the namespace would stay in Terminating forever. Kubernetes deletes their pods, which finish
their requests after SIGTERM.
"""

from __future__ import annotations

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT, NAMESPACE
from penstock.kube.objects.names import OPERATOR

log = get_logger(__name__)


async def release_graphs(client: KubeClient, namespace: str, *, finalizer: str) -> int:
    """Remove ``finalizer`` from the namespace's graphs if the namespace is being deleted; return the number of graphs changed.

    Call it as the process ends, when nothing adds the finalizer any more. Returns 0 if the namespace is not being
    deleted or cannot be read. A graph that cannot be written is logged together with the kubectl command that removes
    its finalizer.
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
