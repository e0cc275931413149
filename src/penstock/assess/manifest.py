"""Writes the graph that an assessment simulates and recommends; pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.api import GraphDeployment, SloConfig
from penstock.core.durations import duration_text


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What goes into a graph.

    Attributes:
        model: As the engines serve it.
        gpus: Of one replica.
        is_disaggregated: Prefill and decode on their own workers.
        replicas: Of all workers at the beginning, >= 1.
        max_gpus: Budget.
        floor: Fewest aggregated workers, >= 1.
    """

    model: str
    slo: SloConfig
    gpus: int
    is_disaggregated: bool
    replicas: int
    max_gpus: int
    floor: int = 1

    def graph(self) -> GraphDeployment:
        """Return the graph as it is validated."""
        return GraphDeployment.model_validate(self.manifest())

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for vLLM."""
        largest = max(1, self.max_gpus // self.gpus)
        slo: dict[str, Any] = {
            "ttft": duration_text(self.slo.ttft_seconds),
            "attainment": self.slo.attainment,
        }
        if self.slo.itl_seconds is not None:
            slo["itl"] = duration_text(self.slo.itl_seconds)
        return {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "metadata": {"name": graph_name(self.model)},
            "spec": {
                "model": {"name": self.model, "servedName": self.model},
                "runtime": "vllm",
                "image": IMAGE,
                "slo": slo,
                "services": {"frontend": {"role": "router", "replicas": 2}, **self._workers(largest)},
                "planner": {"mode": "adaptive", "maxGpuBudget": self.max_gpus},
            },
        }

    def _workers(self, largest: int) -> dict[str, Any]:
        def service(role: str, replicas: int, floor: int, most: int) -> dict[str, Any]:
            return {
                "role": role,
                "replicas": replicas,
                "gpusPerReplica": self.gpus,
                "scaling": {"minReplicas": floor, "maxReplicas": most},
            }

        if not self.is_disaggregated:
            return {"worker": service("aggregated", max(self.replicas, self.floor), self.floor, largest)}
        prefill = max(1, math.ceil(self.replicas / 2))
        return {
            "prefill": service("prefill", prefill, 1, max(1, largest - 1)),
            "decode": service("decode", max(1, self.replicas - prefill), 1, max(1, largest - 1)),
        }


IMAGE: Final = "vllm/vllm-openai:v0.32.0"
"""As in the samples; replace it by the image that serves today."""


def graph_name(model: str) -> str:
    """Return a name for the graph of a model: lower case, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"model-{name}".rstrip("-")
