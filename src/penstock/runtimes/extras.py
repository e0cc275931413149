"""Which optional packages a graph's own processes need and lack. Pure but for asking whether one is installed."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.api.graph import GraphDeployment
from penstock.core.errors import Problem
from penstock.core.simulated_tokens import SIMULATED


def missing_extras(graph: GraphDeployment, *, with_planner: bool = True) -> list[Problem]:
    """Return the settings whose packages the graph's router or planner would import and that are not installed here."""
    planner, router = graph.spec.planner, graph.spec.router
    has_router = graph.spec.traits.frontend is None  # else its router is the engine's frontend
    needs = (
        (
            with_planner and planner.enabled and planner.metrics.prometheus_url is not None,
            ("metrics.prometheusUrl", "planner", "prometheus", ("prometheus_api_client",)),
        ),
        (
            has_router and router.tokenizer not in {None, SIMULATED},
            ("tokenizer", "router", "tokenizer", ("jinja2", "tokenizers")),
        ),
        (
            has_router and router.kv_events_port is not None,
            ("kvEventsPort", "router", "kv-events", ("zmq",)),
        ),
        (
            has_router and router.gateway.enabled,
            ("gateway.enabled", "router", "gateway", ("grpc", "envoy")),
        ),
    )
    problems = []
    for is_needed, (key, process, extra, modules) in needs:
        missing = ", ".join(module for module in modules if find_spec(module) is None) if is_needed else ""
        if missing:
            remedy = f"pip install 'penstock[{extra}]'"
            message = f"the {process} needs {missing}, not installed here; {remedy}"
            problems.append(Problem(path=f"spec.{process}.{key}", message=message))
    return problems
