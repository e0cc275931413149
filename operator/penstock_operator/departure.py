"""Removes the finalizer of graphs whose operator will not return, so that no graph or namespace remains in Terminating forever.

There are two cases:

- The operator's own namespace is deleted. Kubernetes deletes the operator's pod together with the namespace. So the
operator calls `release_graphs` as its last action, which removes the finalizer that only an operator removes.
- The Helm release is uninstalled. The chart's pre-delete hook runs `finish_drains` while the operator still works.

A graph without its finalizer is deleted at once, together with its children. Kubernetes deletes their pods, which
finish their requests after SIGTERM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.core.errors import ClusterError, ConflictError, NotFoundError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT, NAMESPACE
from penstock.kube.objects.names import OPERATOR, drain_finalizer, is_of_class

log = get_logger(__name__)

POLL_S: Final = 2.0
"""Wall-clock seconds between two reads of the graphs. Chosen."""

ATTEMPTS: Final = 5
"""Number of attempts to remove one finalizer while the operator and other writers change the graph. Chosen."""

Graph = dict[str, Any]


async def release_graphs(client: KubeClient, namespace: str, *, finalizer: str) -> int:
    """Remove ``finalizer`` from the namespace's graphs if the namespace is being deleted; return the number of graphs changed.

    Graphs that keep the finalizer would block the namespace's deletion, since no operator runs any more that removes
    it. Call this as the process ends, when nothing adds the finalizer any more. Returns 0 if the namespace is not being
    deleted or cannot be read. A graph that cannot be written is logged together with the kubectl command that removes
    its finalizer.

    Args:
        client: Client of the Kubernetes API.
        namespace: The operator's own namespace.
        finalizer: Finalizer to remove.
    """
    try:
        found = await client.get(NAMESPACE, namespace)
        if not found["metadata"].get("deletionTimestamp"):
            return 0
        graphs = (await client.list(GRAPH_DEPLOYMENT, namespace=namespace)).items
    except ClusterError as exc:
        log.warning("own namespace not read", namespace=namespace, error=str(exc))
        return 0
    with_finalizer = [each for each in graphs if finalizer in each["metadata"].get("finalizers", ())]
    return sum([await _release(client, each, finalizer) for each in with_finalizer])


async def finish_drains(
    client: KubeClient,
    namespaces: Sequence[str | None],
    *,
    operator_class: str,
    limit_s: float,
    print_line: Callable[[str], None],
) -> bool:
    """Wait until no graph of an operator class is being deleted any more, and report the graphs whose workers still drain.

    Args:
        client: Client of the Kubernetes API with the rights to list and patch graphs.
        namespaces: Namespaces of the installation's graphs; None in it means every namespace.
        operator_class: Operator class of the graphs.
        limit_s: Maximum wall-clock seconds to wait. Afterwards the finalizers of graphs that are still draining are
            removed.
        print_line: Called with each line of text that the user should see.

    Returns:
        True if every graph was drained or its finalizer removed; False if a finalizer could not be removed.
    """
    finalizer = drain_finalizer(operator_class)
    end_s, reported = time.monotonic() + limit_s, ""
    while True:
        graphs = await _graphs(client, namespaces, operator_class)
        pending = [each for each in graphs if _is_drained_by(each, finalizer)]
        if not pending or time.monotonic() >= end_s:
            break
        text = f"waiting up to {limit_s:g} s for the drain of {_names(pending)}"
        if text != reported:
            print_line(text)
            reported = text
        await asyncio.sleep(min(POLL_S, max(0.0, end_s - time.monotonic())))
    done = [await _release(client, each, finalizer) for each in pending]
    if pending:
        print_line(
            f"{_names(pending)}: not drained after {limit_s:g} s; the drain was abandoned, and the pods finish"
            " their requests within their terminationGracePeriodSeconds"
        )
    not_deleted = [each for each in graphs if not each["metadata"].get("deletionTimestamp")]
    if not_deleted:
        print_line(
            f"{_names(not_deleted)}: not deleted; they continue to serve, and without an operator nothing scales, repairs"
            " or drains them. Install Penstock again before you delete them"
        )
    elif all(done):
        print_line("all graphs are deleted")
    return all(done)


async def _graphs(client: KubeClient, namespaces: Sequence[str | None], operator_class: str) -> list[Graph]:
    """Return the graphs of an operator class in these namespaces; none if the cluster does not serve the kind."""
    found: list[Graph] = []
    for namespace in namespaces:
        try:
            found += (await client.list(GRAPH_DEPLOYMENT, namespace=namespace)).items
        except NotFoundError:  # the CRDs are deleted
            return []
    return [each for each in found if is_of_class(each.get("spec", {}), operator_class)]


def _is_drained_by(graph: Graph, finalizer: str) -> bool:
    metadata = graph["metadata"]
    return bool(metadata.get("deletionTimestamp")) and finalizer in metadata.get("finalizers", ())


def _names(graphs: Sequence[Graph]) -> str:
    named = ", ".join(f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in graphs)
    return f"GraphDeployment{'' if len(graphs) == 1 else 's'} {named}"


async def _release(client: KubeClient, graph: Graph, finalizer: str) -> bool:
    """Remove the finalizer from a graph; return whether the graph no longer has it."""
    name, namespace = graph["metadata"]["name"], graph["metadata"]["namespace"]
    try:
        for _ in range(ATTEMPTS):
            if await _is_patched(client, graph["metadata"], finalizer):
                log.warning(
                    "finalizer removed because the operator is stopping", namespace=namespace, name=name
                )
                return True
            graph = await client.get(GRAPH_DEPLOYMENT, name, namespace=namespace)
        error = "other writers change it continuously"
    except NotFoundError:
        return True
    except ClusterError as exc:
        error = str(exc)
    remedy = f"""kubectl patch gd {name} -n {namespace} --type merge --patch '{{"metadata":{{"finalizers":null}}}}'"""
    log.warning("finalizer not removed", namespace=namespace, name=name, error=error, remedy=remedy)
    return False


async def _is_patched(client: KubeClient, metadata: Mapping[str, Any], finalizer: str) -> bool:
    """Remove the finalizer from the graph's version that was read; return False if another write was first."""
    remaining = [each for each in metadata.get("finalizers", ()) if each != finalizer]
    patch = {"metadata": {"finalizers": remaining, "resourceVersion": metadata["resourceVersion"]}}
    try:
        await client.patch(
            GRAPH_DEPLOYMENT, metadata["name"], patch, namespace=metadata["namespace"], field_manager=OPERATOR
        )
    except ConflictError:
        return False
    return True
