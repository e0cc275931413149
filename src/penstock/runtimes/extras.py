"""Which optional packages a graph's own processes need where they run. Pure but for asking whether one is installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from penstock.api.enums import PlannerMode, Predictor
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
        modules: Their names to import.
        fall_back: What the process does without; empty: it cannot start.
    """

    path: str
    process: str
    extra: str
    modules: tuple[str, ...]
    fall_back: str = ""

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
            message=f"the {self.process} needs {names}, not installed here{self.fall_back}; {remedy}",
        )


def predictor_extra(predictor: Predictor) -> tuple[str, str]:
    """Return the extra that brings a fitted predictor's library, and the library's name to import."""
    return ("prophet", "prophet") if predictor is Predictor.PROPHET else ("forecast", "statsmodels")


def predictor_needs(path: str, predictor: Predictor) -> list[ExtraNeed]:
    """Return what a predictor of mode sla needs; nothing where none is fitted.

    Args:
        path: The setting, as the user gave it.
        predictor: Of mode sla.
    """
    if not predictor.is_fitted:
        return []
    extra, module = predictor_extra(predictor)
    fall_back = f" for {predictor.value}: it goes by its own trend"
    return [ExtraNeed(path, "planner", extra, (module,), fall_back)]


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
    if spec.planner.enabled and spec.planner.mode is PlannerMode.SLA:
        found += predictor_needs("spec.planner.sla.predictor", spec.planner.sla.predictor)
    if spec.traits.frontend is not None:
        return tuple(found)
    if spec.router.tokenizer not in {None, SIMULATED}:
        found.append(ExtraNeed("spec.router.tokenizer", "router", "tokenizer", ("jinja2", "tokenizers")))
    if spec.router.kv_events_port is not None:
        found.append(ExtraNeed("spec.router.kvEventsPort", "router", "kv-events", ("msgspec", "zmq")))
    return tuple(found)
