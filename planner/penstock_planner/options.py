"""The planner's options: the document's fifteen by their names, and the few it needs besides.

Precedence: flag > environment (``PENSTOCK_PLANNER_…``) > ``--config`` file > ``--graph`` > default. The
command line gathers the first two; this module joins and checks all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock_core.errors import ConfigError, InvalidSpecError, Problem
from penstock_core.local_state import state_dir
from penstock_graph.loading import read_text
from penstock_graph.models import Environment, GraphDeployment, MetricsSource, PlannerMode, Role
from penstock_planner.decide.config import DecideConfig

SECTION = "Planner"
"""Top-level key of the document's configuration file; other sections belong to other components."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in {"none", "null"} else value


_Threshold = Annotated[float, Field(gt=0, le=1)]
_QueueThreshold = Annotated[float, Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0)]
_Gpus = Annotated[int, Field(ge=1)]
_Url = Annotated[str, Field(pattern=r"^http://\S+$")]


class PlannerOptions(BaseModel):
    """What one planner is told. Defaults of the first fifteen are the planner document's."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_kebab, populate_by_name=False, allow_inf_nan=False
    )

    namespace: Annotated[str, Field(min_length=1)] = Field(
        "dynamo", description="Namespace that the planner looks at; locally, the statefile's name."
    )
    environment: Environment = Field(Environment.LOCAL, description="Backend to scale.")
    served_model_name: Annotated[str, Field(min_length=1)] = Field(
        "vllm", description="Model whose series are read from Prometheus."
    )
    no_operation: bool = Field(False, description="Decide and record, change nothing.")
    log_dir: str | None = Field(
        None,
        description="Folder of dashboard, ledger and state. Without it there is no dashboard, and the ledger "
        "lies beside the statefile.",
    )
    adjustment_interval: _Seconds = Field(30, description="Between two decisions; modelled seconds.")
    metric_pulling_interval: _Seconds = Field(1, description="Between two metric pulls; modelled seconds.")
    max_gpu_budget: Annotated[_Gpus | None, BeforeValidator(_none_word)] = Field(
        8, description="Most GPUs of prefill plus decode; none: no ceiling."
    )
    min_gpu_budget: Annotated[int, Field(ge=0)] = Field(1, description="Fewest GPUs of each role.")
    decode_kv_scale_up_threshold: _Threshold = Field(
        0.9, description="Mean KV usage above which decode grows; fraction."
    )
    decode_kv_scale_down_threshold: _Threshold = Field(
        0.5, description="Mean KV usage below which decode shrinks; fraction."
    )
    prefill_queue_scale_up_threshold: _QueueThreshold = Field(
        0.5, description="Queued requests per prefill worker above which prefill grows; may exceed 1."
    )
    prefill_queue_scale_down_threshold: _QueueThreshold = Field(
        0.2, description="Queued requests per prefill worker below which prefill shrinks."
    )
    decode_engine_num_gpu: _Gpus = Field(1, description="GPUs of one decode (or aggregated) engine.")
    prefill_engine_num_gpu: _Gpus = Field(1, description="GPUs of one prefill engine.")

    metrics_source: MetricsSource = Field(
        MetricsSource.ROUTER, description="Asked first; router and scrape back it up."
    )
    prometheus_url: _Url | None = Field(None, description="Prometheus server, http://host:port.")
    router_url: _Url | None = Field(None, description="Router, http://host:port; default: the statefile's.")
    metrics_max_age: _Seconds = Field(10, description="Older readings are stale; modelled seconds.")
    adjustment_deadline: _Seconds = Field(
        600, description="Longest wait for a new replica before it is withdrawn; modelled seconds."
    )

    def decide_config(self, graph: GraphDeployment | None = None) -> DecideConfig:
        """Return the rules' configuration; replica bounds come from the graph where there is one."""
        bounds = _bounds(graph)
        rules = graph.spec.planner if graph is not None else None
        return DecideConfig(
            adjustment_interval_s=self.adjustment_interval,
            metric_pulling_interval_s=self.metric_pulling_interval,
            max_gpu_budget=self.max_gpu_budget,
            min_gpu_budget=self.min_gpu_budget,
            kv_up=self.decode_kv_scale_up_threshold,
            kv_down=self.decode_kv_scale_down_threshold,
            queue_up=self.prefill_queue_scale_up_threshold,
            queue_down=self.prefill_queue_scale_down_threshold,
            decode_gpus=self.decode_engine_num_gpu,
            prefill_gpus=self.prefill_engine_num_gpu,
            no_operation=self.no_operation,
            min_replicas={role: low for role, (low, _) in bounds.items()},
            max_replicas={role: high for role, (_, high) in bounds.items()},
            decode_grace_intervals=rules.new_decode_worker_grace_intervals if rules else 3,
            queue_buffer_intervals=rules.new_prefill_worker_queue_buffer_intervals if rules else 3,
        )

    def log_folder(self) -> Path:
        """Return the folder of ledger and state: ``log_dir``, or one beside the statefile."""
        if self.log_dir is not None:
            return Path(self.log_dir).expanduser()
        return state_dir() / f"{self.namespace}-planner"


FLAGS = tuple(_kebab(name) for name in PlannerOptions.model_fields)
"""Every option's name, without dashes in front; the document's fifteen first."""


def join(
    *, given: Mapping[str, Any], file: Path | None = None, graph: GraphDeployment | None = None
) -> PlannerOptions:
    """Return the options from all layers.

    Args:
        given: Flags and environment by kebab-case name; those not given are absent.
        file: ``--config``.
        graph: ``--graph``.

    Raises:
        InvalidSpecError: with every problem found.
    """
    layers = {**_from_graph(graph), **(_from_file(file) if file is not None else {}), **given}
    options = _checked(layers, given, file)
    problems = _contradictions(options, is_aggregated=graph is not None and not graph.spec.is_disaggregated)
    if problems:
        raise InvalidSpecError([Problem(f"--{key}", message, "planner") for key, message in problems])
    return options


def stated(*, given: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return what was said explicitly: flags and environment over ``--config``, by kebab-case name.

    Raises:
        InvalidSpecError: with every value that cannot be an option's, whatever the others are.
    """
    layers = {**(_from_file(file) if file is not None else {}), **given}
    checked = _checked(layers, given, file).model_dump(mode="json", by_alias=True)
    return {key: value for key, value in checked.items() if key in layers}


def _checked(layers: Mapping[str, Any], given: Mapping[str, Any], file: Path | None) -> PlannerOptions:
    try:
        return PlannerOptions.model_validate(layers)
    except ValidationError as exc:
        raise InvalidSpecError([_problem(error, file, given) for error in exc.errors()]) from exc


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = mark.line + 1 if mark is not None else None
        raise InvalidSpecError(
            [Problem("", f"not YAML: {getattr(exc, 'problem', exc)}", str(path), line)]
        ) from exc
    section = content.get(SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        message = (
            f"no section {SECTION!r}; write the options below it, e.g. {SECTION}: {{environment: local}}"
        )
        raise InvalidSpecError([Problem("", message, str(path))])
    return section


def _from_graph(graph: GraphDeployment | None) -> dict[str, Any]:
    if graph is None:
        return {}
    spec, planner = graph.spec, graph.spec.planner
    if planner.mode is not PlannerMode.LOAD:
        raise ConfigError(
            f"spec.planner.mode: {planner.mode.value} is not available in this version; set it to load"
        )
    decode = spec.service(Role.DECODE) or spec.service(Role.AGGREGATED)
    prefill = spec.service(Role.PREFILL)
    starts = [service.startup_timeout_seconds for service in spec.workers.values()]
    found = {
        "namespace": planner.namespace or graph.name,
        "environment": planner.environment,
        "served-model-name": planner.served_model_name or spec.served_name,
        "no-operation": planner.no_operation,
        "log-dir": planner.log_dir,
        "adjustment-interval": planner.adjustment_interval_seconds,
        "metric-pulling-interval": planner.metric_pulling_interval_seconds,
        "min-gpu-budget": planner.min_gpu_budget,
        "decode-kv-scale-up-threshold": planner.decode_kv_scale_up_threshold,
        "decode-kv-scale-down-threshold": planner.decode_kv_scale_down_threshold,
        "prefill-queue-scale-up-threshold": planner.prefill_queue_scale_up_threshold,
        "prefill-queue-scale-down-threshold": planner.prefill_queue_scale_down_threshold,
        "decode-engine-num-gpu": planner.decode_engine_num_gpu or (decode[1].gpus if decode else None),
        "prefill-engine-num-gpu": planner.prefill_engine_num_gpu or (prefill[1].gpus if prefill else None),
        "metrics-source": planner.metrics.source,
        "prometheus-url": planner.metrics.prometheus_url,
        "metrics-max-age": planner.metrics.max_age_seconds,
        "adjustment-deadline": max(starts, default=None),
    }
    return {
        "max-gpu-budget": planner.max_gpu_budget,
        **{key: value for key, value in found.items() if value is not None},
    }


def _bounds(graph: GraphDeployment | None) -> dict[Role, tuple[int, int]]:
    if graph is None:
        return {}
    return {service.role: service.replica_bounds for service in graph.spec.workers.values()}


def _contradictions(options: PlannerOptions, *, is_aggregated: bool) -> list[tuple[str, str]]:
    found = []
    for prefix in ("decode-kv", "prefill-queue"):
        stem = prefix.replace("-", "_")
        down = getattr(options, f"{stem}_scale_down_threshold")
        up = getattr(options, f"{stem}_scale_up_threshold")
        if down >= up:
            message = f"{down:g} is not below --{prefix}-scale-up-threshold {up:g}; lower it, or the pool would flap"
            found.append((f"{prefix}-scale-down-threshold", message))
    pull, adjust = options.metric_pulling_interval, options.adjustment_interval
    if pull > adjust:
        message = f"{pull:g} s exceeds --adjustment-interval {adjust:g} s; pull at least once per adjustment"
        found.append(("metric-pulling-interval", message))
    if options.max_gpu_budget is not None:
        floors = {"decode": options.decode_engine_num_gpu}
        if not is_aggregated:
            floors["prefill"] = options.prefill_engine_num_gpu
        needed = {k: max(1, math.ceil(options.min_gpu_budget / gpus)) * gpus for k, gpus in floors.items()}
        if sum(needed.values()) > options.max_gpu_budget:
            text = " + ".join(f"{count} for {role}" for role, count in needed.items())
            message = (
                f"{options.max_gpu_budget} is below the floor of {text} that --min-gpu-budget "
                f"{options.min_gpu_budget} asks for; raise it or lower the floor"
            )
            found.append(("max-gpu-budget", message))
    if options.metrics_source is MetricsSource.PROMETHEUS and options.prometheus_url is None:
        found.append(("prometheus-url", "missing, yet --metrics-source is prometheus; give http://host:port"))
    return found


def _problem(error: Any, file: Path | None, given: Mapping[str, Any]) -> Problem:
    key = str(error["loc"][0]) if error["loc"] else ""
    where = str(file) if file is not None and key not in given else "planner"
    if error["type"] == "extra_forbidden":
        return Problem(f"{SECTION}.{key}", f"unknown option; known are {', '.join(FLAGS)}", where)
    return Problem(f"--{key}", f"{error['input']!r}: {error['msg'].lower()}; correct it", where)
