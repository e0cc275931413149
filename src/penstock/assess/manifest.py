"""Writes the graph that an assessment simulates and recommends; pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import GraphDeployment, SloConfig
from penstock.api.graph import API_VERSION


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What goes into a graph.

    Attributes:
        model: As the engines serve it.
        gpus: Of one replica.
        is_disaggregated: Prefill and decode on their own workers.
        replicas: Of all workers at the beginning, >= 1.
        max_gpus: Budget.
    """

    model: str
    slo: SloConfig
    gpus: int
    is_disaggregated: bool
    replicas: int
    max_gpus: int

    def graph(self) -> GraphDeployment:
        """Return the graph as it is validated."""
        return GraphDeployment.model_validate(self.manifest())

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for vLLM."""
        largest = max(1, self.max_gpus // self.gpus)
        return {
            "apiVersion": API_VERSION,
            "kind": "GraphDeployment",
            "metadata": {"name": graph_name(self.model)},
            "spec": {
                "model": {"name": self.model, "servedName": self.model},
                "runtime": "vllm",
                "image": IMAGE,
                "slo": self.slo.model_dump(mode="json", by_alias=True, exclude_none=True),
                "services": {"frontend": {"role": "router", "replicas": 2}, **self._workers(largest)},
                "planner": {"mode": "adaptive", "maxGpuBudget": self.max_gpus},
            },
        }

    def _workers(self, largest: int) -> dict[str, Any]:
        def service(role: str, replicas: int, most: int) -> dict[str, Any]:
            return {
                "role": role,
                "replicas": replicas,
                "gpusPerReplica": self.gpus,
                "scaling": {"minReplicas": 1, "maxReplicas": most},
            }

        if not self.is_disaggregated:
            return {"worker": service("aggregated", self.replicas, largest)}
        prefill = max(1, math.ceil(self.replicas / 2))
        return {
            "prefill": service("prefill", prefill, max(1, largest - 1)),
            "decode": service("decode", max(1, self.replicas - prefill), max(1, largest - 1)),
        }


IMAGE: Final = "vllm/vllm-openai:v0.32.0"
"""As in the samples; replace it by the image that serves today."""


def graph_name(model: str) -> str:
    """Return a name for the graph of a model: lower case, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"model-{name}".rstrip("-")
