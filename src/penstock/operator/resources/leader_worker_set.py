"""The LeaderWorkerSet of a service whose replicas span several nodes, one pod per node.

The leader answers requests, its followers compute with it. vLLM 0.32 and Dynamo's vLLM worker join their
nodes by PyTorch's own rendezvous (``--nnodes``, ``--node-rank``, ``--master-addr``), without Ray; followers
run ``--headless``. LeaderWorkerSet gives each container ``LWS_LEADER_ADDRESS`` and ``LWS_WORKER_INDEX``. A
simulated worker knows no nodes: its leader serves the whole replica and its followers only hold their GPUs.

Source: vLLM's documentation, "Parallelism and Scaling", section multiprocessing; lws.sigs.k8s.io, API v1.
Rendered from them; multi-node vLLM was not run by this project.
"""

from __future__ import annotations

from typing import Any

from penstock.api import GraphDeployment, Runtime
from penstock.operator.resources.context import BuildContext
from penstock.operator.resources.deployment import rollout
from penstock.operator.resources.labels import service_labels
from penstock.operator.resources.metadata import metadata
from penstock.operator.resources.pod import pod_template
from penstock.runtimes import ProcessSpec

_RENDEZVOUS_PORT = "29501"
"""vLLM's default of --master-port."""


def leader_worker_set(
    graph: GraphDeployment, spec: ProcessSpec, context: BuildContext, *, replicas: int, unavailable: int
) -> dict[str, Any]:
    """Return a service's LeaderWorkerSet; the arguments are `deployment`'s."""
    follower = _node_args(graph, spec, "$(LWS_WORKER_INDEX)")
    if follower:
        follower.append("--headless")
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
                "leaderTemplate": pod_template(graph, spec, context, more_args=_node_args(graph, spec, "0")),
                "workerTemplate": pod_template(graph, spec, context, follows=True, more_args=follower),
            },
        },
    }


def _node_args(graph: GraphDeployment, spec: ProcessSpec, rank: str) -> list[str]:
    if graph.spec.runtime is Runtime.SIMULATED or graph.spec.engine.mocker:
        return []
    args = ["--distributed-executor-backend", "mp", "--nnodes", str(spec.nodes), "--node-rank", rank]
    return [*args, "--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", _RENDEZVOUS_PORT]
