"""Says which settings of a valid graph do nothing here, as for lack of a package, in this planner mode or behind a gateway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel

from penstock.api import AdmissionMode, GraphDeployment, GraphSpec, PlannerMode, Role, RouterConfig
from penstock.api.planner import READ_IN_MODES, PlannerConfig, unread_keys
from penstock.api.service import DEFAULT_ROUTERS
from penstock.api.slo import UNUSUAL_ITL_S, UNUSUAL_TTFT_S
from penstock.cli.say import say
from penstock.core.durations import duration_text
from penstock.core.errors import ConfigError, ManifestProblem
from penstock.router.gateway.ignored_keys import ignored_keys
from penstock.router.policy.busy import BusyThresholds
from penstock.runtimes.build import connector_warnings, missing_extras
from penstock_planner.decide.config import ADAPTIVE_INTERVAL_S
from penstock_planner.decide.demand.trend import STARTUP_S
from penstock_planner.decide.policy import parameters_of
from penstock_planner.options import modes_of

_UNREAD = "does not read it"
_EVERY = f"decides every {ADAPTIVE_INTERVAL_S:g} s regardless"


def warnings_of(
    graphs: Iterable[GraphDeployment], file: Path, *, mode: str | None = None
) -> list[ManifestProblem]:
    """Return the warnings about all graphs of a file, each with the file's name; ``mode`` overrides their planners'."""
    found: list[ManifestProblem] = []
    for graph in graphs:
        found += missing_extras(graph)
        found += connector_warnings(graph)
        found += _without_scaling(graph)
        found += _unstated_startups(graph, mode or graph.spec.planner.mode)
        found += _unusual_targets(graph.spec, mode or graph.spec.planner.mode)
        found += _behind_gateway(graph)
        found += _switched_off(graph.spec.router)
        found += _of_another_mode(graph.spec.planner, mode or graph.spec.planner.mode)
    return [replace(each, file=str(file)) for each in found]


def machine_warnings(graph: GraphDeployment, file: Path) -> Iterator[ManifestProblem]:
    """Yield what a cluster does with a graph and one machine does not."""
    for name, service in graph.spec.services.items():
        if service.role is Role.ROUTER and (service.replicas or 0) > 1:
            message = (
                f"{service.replicas}, but on one machine only one router runs; a cluster starts all of them"
            )
            yield ManifestProblem(f"spec.services.{name}.replicas", message, file=str(file))


def cluster_warnings(graphs: Iterable[GraphDeployment], file: Path) -> Iterator[ManifestProblem]:
    """Yield what is right on one machine and costs requests on a cluster: a single router."""
    for graph in graphs:
        routers = graph.spec.services_of(Role.ROUTER)
        if [service.replica_bounds[1] for service in routers.values()] == [1]:
            (name,) = routers
            key = "replicas" if routers[name].scaling is None else "scaling.maxReplicas"
            message = (
                "1, so no router answers while its node is drained or its process restarts; leave it out, "
                f"which means {DEFAULT_ROUTERS} on Kubernetes, or write {DEFAULT_ROUTERS} or more"
            )
            yield ManifestProblem(f"spec.services.{name}.{key}", message, str(file))


def _without_scaling(graph: GraphDeployment) -> Iterator[ManifestProblem]:
    """Yield a planner that has no role to scale."""
    bounds = [service.replica_bounds for service in graph.spec.workers.values()]
    if graph.spec.planner.enabled and all(fewest == most for fewest, most in bounds):
        message = (
            "enabled, but no service may change its number of replicas, so nothing is ever scaled; "
            "give prefill or decode scaling: {minReplicas: …, maxReplicas: …}, or set "
            "planner.enabled: false"
        )
        yield ManifestProblem("spec.planner", message)


def _unstated_startups(graph: GraphDeployment, mode: str) -> Iterator[ManifestProblem]:
    """Yield services of real engines whose start-up time the planner has to guess until it has observed one."""
    if not graph.spec.planner.enabled or mode != PlannerMode.ADAPTIVE or graph.spec.models_gpus:
        return
    for name, service in graph.spec.workers.items():
        fewest, most = service.replica_bounds
        if fewest < most and not service.startup_seconds and not service.is_external:
            message = (
                f"not set, so the planner assumes {STARTUP_S:g} s until it has observed a start, and may remove replicas "
                "too early; write how long a replica takes to load its model, such as 120"
            )
            yield ManifestProblem(f"spec.services.{name}.startupSeconds", message)


def _unusual_targets(spec: GraphSpec, mode: str) -> Iterator[ManifestProblem]:
    """Yield targets that are probably written in another unit than meant, and the one that mode sla would use."""
    slo, tiers = spec.slo, spec.router.tiers.slo
    of_tiers = {name: getattr(tiers, name) for name in type(tiers).model_fields}
    places: dict[str, Any] = {
        "slo": slo,
        **{f"router.tiers.slo.{tier}": own for tier, own in of_tiers.items()},
    }
    for place, own in places.items():
        limits = (("ttft", own.ttft_seconds, UNUSUAL_TTFT_S), ("itl", own.itl_seconds, UNUSUAL_ITL_S))
        for key, target_s, limit_s in limits:
            if target_s is not None and target_s > limit_s:
                message = (
                    f"{duration_text(target_s)} is unusual, above {duration_text(limit_s)}; check its unit"
                )
                yield ManifestProblem(f"spec.{place}.{key}", message)
    if spec.planner.enabled and mode == PlannerMode.SLA and slo.itl_seconds is None:
        message = "null, so mode sla sizes decode by its capacity alone; write a target, such as 50ms"
        yield ManifestProblem("spec.slo.itl", message)


def _behind_gateway(graph: GraphDeployment) -> Iterator[ManifestProblem]:
    """Yield the given keys that requests of a gateway do not have."""
    router = graph.spec.router
    if router.gateway.enabled:
        for key, words in ignored_keys(router):
            yield ManifestProblem(
                f"spec.{key}", f"{words}; remove it, unless clients connect to the router directly"
            )


def _switched_off(router: RouterConfig) -> Iterator[ManifestProblem]:
    """Yield the given keys of sections whose own switch is off."""
    if router.admission.mode is AdmissionMode.NONE:
        thresholds = router.admission.model_fields_set & {*BusyThresholds._fields}
        yield from _without_effect("admission", thresholds, "mode: token-capacity")
    for name, section in (("tiers", router.tiers), ("gateway", router.gateway)):
        if not section.enabled:
            yield from _without_effect(name, section.model_fields_set - {"enabled"}, "enabled: true")


def _without_effect(section: str, keys: Iterable[str], switch: str) -> Iterator[ManifestProblem]:
    for key in sorted(keys):
        message = f"has no effect without router.{section}.{switch}; set that, or remove it"
        yield ManifestProblem(f"spec.router.{section}.{to_camel(key)}", message)


def _of_another_mode(planner: PlannerConfig, mode: str) -> Iterator[ManifestProblem]:
    """Yield the given keys that a mode does not decide by."""
    for key in unread_keys(planner, mode):
        effect = _UNREAD
        if key == "adjustment_interval_seconds":
            if planner.adjustment_interval_seconds < ADAPTIVE_INTERVAL_S:
                continue
            effect = _EVERY
        modes = " or ".join(READ_IN_MODES[key])
        message = f"mode {mode} {effect}; remove it, or choose mode {modes}"
        yield ManifestProblem(f"spec.planner.{to_camel(key)}", message)


def parameter_problems(graphs: Iterable[GraphDeployment], file: Path) -> Iterator[ManifestProblem]:
    """Yield what of the graphs' ``planner.policyParameters`` their planner policies do not take."""
    for graph in graphs:
        planner = graph.spec.planner
        try:
            parameters_of(planner.mode, planner.policy_parameters)
        except ConfigError as exc:
            yield ManifestProblem("spec.planner.policyParameters", str(exc).partition(": ")[2], str(file))


def option_warnings(given: Mapping[str, Any], mode: str) -> list[ManifestProblem]:
    """Return warnings of the planner's options, by their names without dashes in front, that a mode does not decide by."""
    found = []
    for name, value in given.items():
        modes = modes_of(name)
        is_interval = name == "adjustment-interval"
        if not modes or mode in modes or (is_interval and float(value) < ADAPTIVE_INTERVAL_S):
            continue
        effect = _EVERY if is_interval else _UNREAD
        message = f"mode {mode} {effect}; leave it out, or choose mode {' or '.join(modes)}"
        found.append(ManifestProblem(f"--{name}", message, "planner"))
    return found


def print_warnings(found: Iterable[ManifestProblem]) -> None:
    """Write one line each to stderr."""
    for each in found:
        say(f"warning: {each}", err=True)
