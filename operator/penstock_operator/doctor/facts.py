"""What `gather` reads of a cluster, and `check` evaluates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock_operator.rbac import Right

Object = dict[str, Any]


def full_name(obj: Object) -> str:
    """Return ``namespace/name``."""
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


class Unreadable(NamedTuple):
    """Something that could not be read: why, in the other side's words, and whether a right was missing."""

    why: str
    is_forbidden: bool = False


class Page(NamedTuple):
    """The text of a metrics page, read twice."""

    first: str | Unreadable
    later: str | Unreadable


@dataclass(frozen=True, slots=True)
class LeaseFact:
    """The Lease of operator or planner, None where there is none, looked at twice."""

    component: str
    namespace: str
    name: str
    first: Object | Unreadable | None
    later: Object | Unreadable | None


@dataclass(frozen=True, slots=True)
class RightsFact:
    """What one account may not do.

    Attributes:
        who: ``you`` or ``system:serviceaccount:NAMESPACE:NAME``.
        component: ``operator`` or ``planner``; empty for the caller.
        namespace: Where it must; None: in all namespaces.
        unseen: Why it could not be asked; None if it could.
    """

    who: str
    component: str
    namespace: str | None
    asked: int
    missing: tuple[Right, ...] = ()
    unseen: Unreadable | None = None


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One graph, its pods, and what they say.

    Attributes:
        ready: By router pod, what its /ready answers.
        pages: By pod, its /metrics; at most `gather.MAX_PAGES` of them.
        prometheus: Number of workers' series in the configured Prometheus; None if none is configured.
    """

    graph: Object
    pods: tuple[Object, ...] | Unreadable = ()
    ready: Mapping[str, str | Unreadable] = field(default_factory=dict)
    pages: Mapping[str, Page] = field(default_factory=dict)
    prometheus: int | Unreadable | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was seen; nothing but the server where that does not answer.

    Attributes:
        version: The API server's, such as ``v1.34.4``.
        now_s: This machine's clock at the second look, corrected by the skew; seconds since the epoch.
        interval_s: Time between the two looks, real seconds.
        release: Penstock's, of this program.
        skew_s: This machine's clock less the server's, seconds; None if unknown. Exact to about a second.
        crds: By name, the live CustomResourceDefinition; None if absent.
        deployments: Of operator and planner, wherever they could be looked for.
        requested: By node, extended resources that its pods asked for.
        cluster_gpu_pools: All of them.
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
        """The server's clock at the second look, seconds since the epoch; None if unknown."""
        return None if self.skew_s is None else self.now_s
