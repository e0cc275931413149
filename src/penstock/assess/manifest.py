"""Writes the graph that an assessment simulates and recommends; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.api import GraphDeployment, Role, SloConfig
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
        bounds: Fewest and most replicas of each role; of a role that has none 1 and what the budget allows.
        schedule: Entries of ``planner.schedule``.
        startup_s: From the request for a replica until it serves, seconds; None: the manifest does not say it.
        prefill_threshold: Prompt tokens to compute above which a worker is busy; None: the default.
    """

    model: str
    slo: SloConfig
    gpus: int
    is_disaggregated: bool
    replicas: int
    max_gpus: int
    bounds: Mapping[Role, tuple[int, int]] = field(default_factory=dict, hash=False)
    schedule: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    startup_s: float | None = None
    prefill_threshold: int | None = None

    def graph(self) -> GraphDeployment:
        """Return the graph as it is validated."""
        return GraphDeployment.model_validate(self.manifest())

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for vLLM."""
        largest = max(1, self.max_gpus // self.gpus)
        planner: dict[str, Any] = {"mode": "adaptive", "maxGpuBudget": self.max_gpus}
        if self.schedule:
            planner["schedule"] = [dict(each) for each in self.schedule]
        router = {}
        if self.prefill_threshold is not None:
            router["router"] = {"admission": {"activePrefillTokensThreshold": self.prefill_threshold}}
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
                **router,
                "planner": planner,
            },
        }

    def _workers(self, largest: int) -> dict[str, Any]:
        def service(role: Role, replicas: int, most: int) -> dict[str, Any]:
            low, high = self.bounds.get(role, (1, most))
            startup = {} if self.startup_s is None else {"startupSeconds": self.startup_s}
            return {
                "role": role.value,
                "replicas": min(max(replicas, low), high),
                "gpusPerReplica": self.gpus,
                **startup,
                "scaling": {"minReplicas": low, "maxReplicas": high},
            }

        if not self.is_disaggregated:
            return {"worker": service(Role.AGGREGATED, self.replicas, largest)}
        prefill = max(1, math.ceil(self.replicas / 2))
        most = max(1, largest - 1)
        return {
            "prefill": service(Role.PREFILL, prefill, most),
            "decode": service(Role.DECODE, max(1, self.replicas - prefill), most),
        }


GRAPH_FILE: Final = "graph.yaml"

IMAGE: Final = "vllm/vllm-openai:v0.32.0"
"""As in the samples; replace it by the image that serves today."""


def graph_name(model: str) -> str:
    """Return a name for the graph of a model: lower case, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    return name if name and name[0].isalpha() else f"model-{name}".rstrip("-")
