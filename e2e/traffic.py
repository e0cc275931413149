"""Load from inside the cluster, through the router's Service, as an application would send it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kube import Graph, say, wait_for
from openai import OpenAI

CLIENTS = Path(__file__).parents[1] / "tests/support/clients.py"
IMAGE = "localhost/penstock:e2e"
STREAMING = "every client streams"
"""What the clients print once."""


def client_of(url: str) -> OpenAI:
    """Return the official client of a router; it shows every failure, and closes its connections as a context."""
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@dataclass(frozen=True)
class Outcome:
    """What came of a load.

    Attributes:
        answered: Streams that came complete.
        lost: The others, each with its problem.
    """

    answered: int
    lost: list[dict[str, Any]]


class Load:
    """Clients in a pod that stream until stopped."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        *,
        concurrency: int,
        max_tokens: int,
        host: str | None = None,
        node: str | None = None,
        silence_s: float = 300.0,
    ) -> None:
        """Start the pod and wait until every client has had its first token.

        Args:
            graph: To ask.
            name: Of the pod, made unique.
            concurrency: Clients, each with one stream at a time.
            max_tokens: Of each stream.
            host: One router's address; None: the routers' Service.
            node: Where the pod runs; None: wherever there is room.
            silence_s: After which a client gives a stream up.
        """
        name = f"{name}-{uuid.uuid4().hex[:4]}"
        self.graph, self.name = graph, name
        self._is_finishing = False
        url = f"http://{host or f'{graph.name}-frontend'}:8000"
        model = graph.object()["spec"]["model"]["servedName"]
        settings = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"clients.py": CLIENTS.read_text()},
        }
        container = {
            "name": "client",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": [
                "python",
                "/client/clients.py",
                url,
                model,
                *map(str, (concurrency, max_tokens, silence_s)),
            ],
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "client", "mountPath": "/client"}],
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "nodeSelector": {} if node is None else {"kubernetes.io/hostname": node},
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": [{"name": "client", "configMap": {"name": name}}],
            },
        }
        graph.kube.apply(settings, pod, namespace=graph.namespace)
        logs = ("logs", *graph.scope, name)
        wait_for(f"load {name} streams", lambda: STREAMING in graph.kube.kubectl(*logs), 60)

    def _phase(self) -> str:
        phase: str = self.graph.kube.get("pod", self.name, *self.graph.scope)["status"]["phase"]
        return phase

    def finish(self) -> None:
        """Let the streams under way be the last ones."""
        if self._is_finishing:
            return
        self._is_finishing = True
        self.graph.kube.kubectl("exec", *self.graph.scope, self.name, "--", "touch", "/tmp/stop")

    def stop(self, timeout_s: float = 180.0) -> Outcome:
        """Let the streams under way finish; return what came of all."""
        kube, scope = self.graph.kube, self.graph.scope
        if self._phase() == "Running":
            self.finish()
        wait_for(f"load {self.name} ends", lambda: self._phase() in {"Succeeded", "Failed"}, timeout_s)
        log = kube.kubectl("logs", *scope, self.name)
        outcome = json.loads(log.strip().splitlines()[-1])
        answered, lost = outcome["answered"], outcome["lost"]
        say(f"{self.name}: {len(lost)} of {answered + len(lost)} streams lost {lost or ''}")
        return Outcome(answered, lost)
