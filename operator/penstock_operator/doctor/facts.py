"""Facts about a cluster that `gather` reads and `check` evaluates. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock_operator.rbac import Right

Object = dict[str, Any]


def full_name(obj: Object) -> str:
    """Return ``namespace/name`` of an object."""
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


class Unreadable(NamedTuple):
    """Takes the place of something in the cluster that could not be read.

    Attributes:
        why: Reason, as the API server or the pod gave it.
        is_forbidden: Whether the reason is a missing right.
    """

    why: str
    is_forbidden: bool = False


class Page(NamedTuple):
    """Two readings of a pod's metrics page, `Facts.interval_s` wall-clock seconds apart, which show whether counters increase.

    Attributes:
        first: Text of the first reading.
        later: Text of the second reading.
    """

    first: str | Unreadable
    later: str | Unreadable


@dataclass(frozen=True, slots=True)
class LeaseFact:
    """Two readings of the Lease (leader election) of an operator or planner, which show whether a process renews it.

    The readings are `Facts.interval_s` wall-clock seconds apart.

    Attributes:
        component: ``operator`` or ``planner``.
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        first: The Lease at the first reading; None if it did not exist.
        later: The Lease at the second reading; None if it did not exist.
    """

    component: str
    namespace: str
    name: str
    first: Object | Unreadable | None
    later: Object | Unreadable | None


@dataclass(frozen=True, slots=True)
class RightsFact:
    """Result of asking the API server whether one account has the rights that it needs.

    Attributes:
        who: The account: ``you`` (the user who runs the doctor) or ``system:serviceaccount:NAMESPACE:NAME``.
        component: ``operator`` or ``planner``; empty for the user who runs the doctor.
        namespace: Namespace in which the rights are needed; None means all.
        checked: Number of rights that were checked.
        missing: Needed rights that the account does not have.
        unreadable: Reason why rights could not be checked; None if they could.
    """

    who: str
    component: str
    namespace: str | None
    checked: int
    missing: tuple[Right, ...] = ()
    unreadable: Unreadable | None = None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One graph, its pods, and what the pods answered; a part that could not be read is `Unreadable`.

    Attributes:
        graph: The GraphDeployment.
        pods: All its pods.
        ready: Response of each ready router to /ready, by pod name.
        pages: Two readings of the metrics page of each ready pod, by pod name; of at most 64 pods (`gather.MAX_PAGES`).
        prometheus: Number of the graph's workers with series in the configured Prometheus; None if no Prometheus is
            configured.
    """

    graph: Object
    pods: tuple[Object, ...] | Unreadable = ()
    ready: Mapping[str, str | Unreadable] = field(default_factory=dict)
    pages: Mapping[str, Page] = field(default_factory=dict)
    prometheus: int | Unreadable | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that `penstock doctor` read from a cluster; if the API server does not answer, only ``url`` and ``version`` are meaningful.

    Attributes:
        url: URL of the API server.
        version: Version of the API server, such as ``v1.34.4``.
        now_s: Unix time in seconds at the second reading, by this machine's clock minus ``skew_s``.
        interval_s: Wall-clock seconds between the two readings.
        release: Penstock version of this program.
        skew_s: This machine's clock minus the server's clock in seconds, exact to about one second; None if unknown.
        crds: CustomResourceDefinitions in the cluster by name; None for an absent one.
        deployments: Deployments of operators and planners, from all namespaces that could be read.
        leases: Two readings of the Lease of each operator and planner.
        rights: Rights of the user and of each operator and planner.
        graphs: The inspected graphs.
        profiles: The inspected ProfileRequests.
        cluster_gpu_pools: All ClusterGpuPools.
        nodes: All nodes.
        requested: Amount of each extended resource that pods request, by node and then by resource name.
    """

    url: str
    version: str | Unreadable
    now_s: float
    interval_s: float
    release: str
    skew_s: float | None = None
    crds: Mapping[str, Object | Unreadable | None] = field(default_factory=dict)
    deployments: tuple[Object, ...] | Unreadable = ()
    leases: tuple[LeaseFact, ...] = ()
    rights: tuple[RightsFact, ...] = ()
    graphs: tuple[GraphFacts, ...] | Unreadable = ()
    profiles: tuple[Object, ...] | Unreadable = ()
    cluster_gpu_pools: tuple[Object, ...] | Unreadable = ()
    nodes: tuple[Object, ...] | Unreadable = ()
    requested: Mapping[str, Mapping[str, int]] | Unreadable = field(default_factory=dict)

    @property
    def server_now_s(self) -> float | None:
        """Unix time in seconds at the second reading, by the API server's clock; None if unknown."""
        return None if self.skew_s is None else self.now_s
