"""The LeaderWorkerSet of a service whose replicas span several nodes, one pod per node.

The leader answers requests, its followers compute with it: `Runtime.node_args` says how they join. LeaderWorkerSet gives
each container ``LWS_LEADER_ADDRESS`` and ``LWS_WORKER_INDEX``. A worker that knows no nodes, such as a simulated one,
serves the whole replica from its leader, and its followers only hold their GPUs.

Source: lws.sigs.k8s.io, API v1.
Rendered from them; multi-node vLLM was not run by this project.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.deployment import rollout
from penstock.operator.resources.labels import service_labels
from penstock.operator.resources.metadata import metadata
from penstock.operator.resources.pod import pod_template
from penstock.runtimes import ProcessSpec, runtime_of
from penstock.runtimes.engine_flags import LEADER_RANK


def leader_worker_set(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> dict[str, Any]:
    """Return a service's LeaderWorkerSet; the arguments are `deployment`'s."""
    runtime = runtime_of(graph.spec.runtime)
    leader, follower = (
        runtime.node_args(graph.spec, spec.nodes, rank) for rank in (LEADER_RANK, "$(LWS_WORKER_INDEX)")
    )
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(graph, context, spec.service, service_labels(graph, spec.service)),
        "spec": {
            "replicas": replicas,
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rollout(unavailable)},
            # Shared would need a Service of the set's own name, which is the one that routers use: it leaves out
            # pods that are not ready, and followers must find their leader before that.
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            # Not LeaderReady: the leader becomes ready only with its followers.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": spec.nodes,
                # A rank that restarts cannot rejoin the others.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": pod_template(graph, spec, context, more_args=leader),
                "workerTemplate": pod_template(graph, spec, context, follows=True, more_args=follower),
            },
        },
    }
