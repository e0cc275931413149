"""Which optional packages a graph's own processes need where they run. Pure but for asking whether one is installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from penstock.api.graph import GraphDeployment
from penstock.core.errors import Problem
from penstock.core.simulated_tokens import SIMULATED


@dataclass(frozen=True, slots=True)
class ExtraNeed:
    """One setting that needs an optional package.

    Attributes:
        path: The setting, as the manifest spells it.
        process: Whose process needs it: planner or router.
        extra: Which of Penstock's extras brings the packages.
    """

    path: str
    process: str
    extra: str
    modules: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Modules that are not installed here."""
        return tuple(module for module in self.modules if find_spec(module) is None)

    def problem(self) -> Problem:
        """Return what is wrong where the packages are missing, with the remedy."""
        names = ", ".join(self.missing)
        remedy = f"pip install 'penstock[{self.extra}]'"
        return Problem(
            path=self.path,
            message=f"the {self.process} needs {names}, not installed here; {remedy}",
        )


def needed_extras(graph: GraphDeployment) -> tuple[ExtraNeed, ...]:
    """Return the optional packages that the graph's planner and router import."""
    spec = graph.spec
    found = []
    if spec.planner.enabled and spec.planner.metrics.prometheus_url is not None:
        found.append(
            ExtraNeed(
                "spec.planner.metrics.prometheusUrl", "planner", "prometheus", ("prometheus_api_client",)
            )
        )
    if spec.traits.frontend is not None:
        return tuple(found)  # its router is the engine's frontend
    if spec.router.tokenizer not in {None, SIMULATED}:
        found.append(ExtraNeed("spec.router.tokenizer", "router", "tokenizer", ("jinja2", "tokenizers")))
    if spec.router.kv_events_port is not None:
        found.append(ExtraNeed("spec.router.kvEventsPort", "router", "kv-events", ("zmq",)))
    if spec.router.gateway.enabled:
        found.append(ExtraNeed("spec.router.gateway.enabled", "router", "gateway", ("grpc", "envoy")))
    return tuple(found)
