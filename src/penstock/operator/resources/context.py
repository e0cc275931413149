"""What a graph does not say about the objects it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where children live and what the cluster offers; the same for every child of a graph.

    Attributes:
        owner_uid: UID of the GraphDeployment; empty: children without an owner, for reading only.
        namespace: Namespace of the graph and of its children.
        operator_namespace: Namespace of operator and planner, which may scrape workers; None: the graph's own.
        penstock_image: Image of routers and simulated workers whose graph names none; None: the release's.
        image_pull_policy: Always, IfNotPresent or Never.
        allows_privileges: Whether a podTemplate may add privileges, see `build.privileges`.
        has_leader_worker_set: Whether the cluster knows the kind LeaderWorkerSet.
        has_inference_pool: Whether it knows the kind InferencePool.
        labels: Labels of the graph that its children carry too; pods do not, which a changed one would roll.
        annotations: Annotations of the graph, likewise.
    """

    owner_uid: str
    namespace: str
    operator_namespace: str | None = None
    penstock_image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    allows_privileges: bool = False
    has_leader_worker_set: bool = False
    has_inference_pool: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
