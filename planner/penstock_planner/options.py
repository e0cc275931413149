"""The planner's options: the fifteen of NVIDIA Dynamo's planner documentation by their names, and a few more.

Precedence: flag > environment (``PENSTOCK_PLANNER_…``) > ``--config`` file > ``--graph`` > default. The command line collects flags and
environment; this module combines and validates all layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from penstock.api import (
    Environment,
    GraphDeployment,
    MetricsSource,
    PlannerMode,
    Predictor,
    Role,
    SloConfig,
)
from penstock.api.base import RULE_ERROR
from penstock.api.durations import DURATION_ERROR, Duration
from penstock.api.fields import bounds
from penstock.api.manifests import read_text
from penstock.api.planner import READ_IN_MODES, PlannerConfig, PolicyName
from penstock.api.rule import Violation
from penstock.api.runtimes import traits_of
from penstock.api.schedule import TimeZone
from penstock.core.durations import duration_text
from penstock.core.errors import InvalidSpecError, ManifestProblem
from penstock.core.flags import RENAMED_FLAGS
from penstock.core.local_state import state_dir
from penstock.performance.profile import PerformanceProfile
from penstock_planner.decide.config import DecideConfig, targets_of
from penstock_planner.decide.policy import parameters_of
from penstock_planner.decide.schedule import ScheduledBounds

SECTION = "Planner"
"""Top-level key of the planner in a configuration file of NVIDIA Dynamo; other sections of the file belong to other
components."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in {"none", "null"} else value


class DeclaredOption(NamedTuple):
    """Where an option is declared in ``spec.planner`` of the manifest, and which decision setting it fills.

    Attributes:
        key: Dotted attribute path, below ``spec.planner``, of the field from which the option takes its bounds, default
            and help.
        decides: Field of `DecideConfig` that receives the option; None if decisions do not depend on it.
    """

    key: str
    decides: str | None = None


def _declared(key: str, decides: str | None = None, **overrides: Any) -> Any:
    """Return a field with the bounds, default and help of the field ``key`` in ``spec.planner``, except for ``overrides``."""
    *sections, last = key.split(".")
    model: Any = PlannerConfig
    for section in sections:
        model = model.model_fields[section].annotation
    field: FieldInfo = model.model_fields[last]
    shared = {"default": field.default, "description": field.description, **bounds(field), **overrides}
    return Field(**shared, json_schema_extra={"setting": DeclaredOption(key, decides)})  # type: ignore[dict-item]


_SLO = SloConfig()


def _meaning(target: str) -> str:
    return str(SloConfig.model_fields[target].description)


class PlannerOptions(BaseModel):
    """Settings of one planner, as given by flags, environment, files and the graph.

    Options that are also keys of ``spec.planner`` in the manifest take their bounds, default and help from the
    manifest's schema. The options before ``mode`` have the names and defaults of NVIDIA Dynamo's planner documentation.

    ``min_gpu_budget`` is the minimum GPUs of each role by itself, ``min_total_gpus`` of all roles together.
    ``no_operation`` records decisions without carrying them out. ``gpu_percent_per_point`` is the extra GPU cost
    accepted to serve one percentage point more of the requests on time. ``memory`` names a file with learned state of
    another graph's planner.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_kebab, populate_by_name=False, allow_inf_nan=False
    )

    namespace: Annotated[str, Field(min_length=1)] = Field(
        "dynamo", description="Namespace of the graph; locally, the name of its statefile."
    )
    environment: Environment = Field(Environment.LOCAL, description="Backend that runs the workers.")
    served_model_name: Annotated[str, Field(min_length=1)] = Field(
        "vllm", description="Model name in the series read from Prometheus."
    )
    no_operation: bool = _declared("no_operation", "no_operation")
    log_dir: str | None = Field(
        None,
        description="Folder of dashboard, ledger and state. Without it the ledger is next to the statefile, and "
        "a dashboard is written only with --no-operation, into a folder named after the start time.",
    )
    adjustment_interval: float = _declared("adjustment_interval_seconds", "adjustment_interval_s")
    metric_pulling_interval: float = _declared("metric_pulling_interval_seconds", "metric_pulling_interval_s")
    max_gpu_budget: Annotated[int | None, BeforeValidator(_none_word)] = _declared(
        "max_gpu_budget",
        "max_gpu_budget",
        description="Maximum GPUs for prefill and decode together; none: unlimited.",
    )
    min_gpu_budget: int = _declared("min_gpu_budget", "min_gpu_budget")
    decode_kv_scale_up_threshold: float = _declared("decode_kv_scale_up_threshold", "kv_up")
    decode_kv_scale_down_threshold: float = _declared("decode_kv_scale_down_threshold", "kv_down")
    prefill_queue_scale_up_threshold: float = _declared("prefill_queue_scale_up_threshold", "queue_up")
    prefill_queue_scale_down_threshold: float = _declared("prefill_queue_scale_down_threshold", "queue_down")
    decode_engine_num_gpu: Annotated[int, Field(ge=1, le=512)] = Field(
        1, description="GPUs of one decode (or aggregated) engine."
    )
    prefill_engine_num_gpu: Annotated[int, Field(ge=1, le=512)] = Field(
        1, description="GPUs of one prefill engine."
    )

    mode: PolicyName = _declared(
        "mode",
        "mode",
        description="What to scale on: adaptive (demand at the router), load (thresholds) or sla (TTFT and ITL targets).",
    )
    max_step: int = _declared("max_step", "max_step")
    min_total_gpus: int = _declared("min_total_gpus", "min_total_gpus")
    scale_to_zero_after: Annotated[float | None, BeforeValidator(_none_word)] = _declared(
        "scale_to_zero_after_seconds", "scale_to_zero_after_s"
    )
    time_zone: TimeZone = _declared("time_zone", "time_zone")
    gpu_percent_per_point: float = _declared("objective.gpu_percent_per_point", "gpu_percent_per_point")
    ttft_slo: Duration = Field(_SLO.ttft_seconds, description=_meaning("ttft_seconds"))
    itl_slo: Annotated[Duration | None, BeforeValidator(_none_word)] = Field(
        _SLO.itl_seconds, description=_meaning("itl_seconds")
    )
    attainment: Annotated[float, Field(ge=0.5, lt=1)] = Field(
        _SLO.attainment, description=_meaning("attainment")
    )
    predictor: Predictor = _declared("sla.predictor", "predictor")
    profile: str | None = _declared(
        "sla.profile",
        description="Performance profile for mode sla: file or folder that `penstock profile` wrote, or the name "
        "of a latency profile. Without it, simulated engines use their own latency profile.",
    )
    prefill_queue_per_worker: bool = _declared("prefill_queue_per_worker", "queue_per_worker")
    metrics_source: MetricsSource = _declared("metrics.source")
    prometheus_url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = _declared(
        "metrics.prometheus_url", description="Prometheus server, http://host:port or https://host:port."
    )
    prometheus_credentials: str | None = Field(
        None,
        description="YAML file that maps Prometheus servers, https://host:port, to files with their credentials.",
    )
    router_url: Annotated[str, Field(pattern=r"^http://\S+$")] | None = Field(
        None, description="Router, http://host:port; default: the statefile's."
    )
    metrics_max_age: float = _declared("metrics.max_age_seconds")
    memory: str | None = _declared("memory")
    adjustment_deadline: Annotated[float, Field(gt=0)] = Field(
        600, description="Maximum wait for a new replica before it is rolled back; simulated seconds."
    )

    @property
    def slo(self) -> SloConfig:
        """Latency targets for TTFT and ITL, and the fraction of requests that must meet them."""
        return _SLO.model_copy(
            update={
                "ttft_seconds": self.ttft_slo,
                "itl_seconds": self.itl_slo,
                "attainment": self.attainment,
            }
        )

    def decide_config(
        self,
        graph: GraphDeployment | None = None,
        performance: PerformanceProfile | None = None,
        *,
        speed: float = 1.0,
    ) -> DecideConfig:
        """Return the configuration of the planner's decisions: these options with the graph's bounds and profile.

        Args:
            graph: Graph whose replica bounds and GPUs per replica are used; None uses defaults.
            performance: Performance profile; ignored except in mode sla.
            speed: Time factor, simulated seconds per real second.
        """
        is_sla = self.mode == PlannerMode.SLA
        services = list(graph.spec.workers.values()) if graph is not None else []
        rules = graph.spec.planner if graph is not None else PlannerConfig()
        gpus = {each.role: each.gpus for each in services}
        declared = {
            setting.decides: getattr(self, name) for name, setting in SETTINGS.items() if setting.decides
        }
        return DecideConfig(
            **declared,
            **targets_of(self.slo),
            decode_gpus=self.decode_engine_num_gpu,
            prefill_gpus=self.prefill_engine_num_gpu,
            performance=performance if is_sla else None,
            min_replicas={each.role: each.replica_bounds[0] for each in services},
            max_replicas={each.role: each.replica_bounds[1] for each in services},
            parameters=parameters_of(self.mode, rules.policy_parameters) if rules.mode == self.mode else None,
            schedule=tuple(ScheduledBounds.of(each, gpus) for each in rules.schedule),
            switches_roles=graph is not None and graph.spec.engine.switchable,
            external=tuple(each.role for each in services if each.is_external),
            startups_s={each.role: each.startup_seconds for each in services if each.startup_seconds},
            startup_timeout_s=max((each.startup_timeout_seconds for each in services), default=600.0),
            learning_identity=self._learns_from(graph, performance if is_sla else None, speed),
            speed=speed,
            decode_grace_intervals=rules.new_decode_worker_grace_intervals,
            queue_buffer_intervals=rules.new_prefill_worker_queue_buffer_intervals,
        )

    def _learns_from(
        self, graph: GraphDeployment | None, performance: PerformanceProfile | None, speed: float
    ) -> str:
        words = [f"model {self.served_model_name}"]
        if graph is not None:
            spec = graph.spec
            profiled = f" {spec.engine.profile}" if traits_of(spec.runtime).is_simulated else ""
            words.append(f"runtime {spec.runtime}{profiled}")
        if performance is not None:
            words.append(f"profile {performance.model}")
        return ", ".join([*words, f"speed {speed:g}"])

    def log_folder(self) -> Path:
        """Return the folder of the ledger (decision log) and of ``state.json``: ``log_dir``, or a folder next to the statefile."""
        if self.log_dir is not None:
            return Path(self.log_dir).expanduser()
        return state_dir() / f"{self.namespace}-planner"


SETTINGS: Mapping[str, DeclaredOption] = {
    name: field.json_schema_extra["setting"]  # type: ignore[misc, index]
    for name, field in PlannerOptions.model_fields.items()
    if field.json_schema_extra
}
"""Declarations of the options that are also keys of ``spec.planner`` in the manifest, by attribute name of the option."""

TARGETS: Mapping[str, tuple[str, ...]] = {
    "ttft_slo": ("ttft_slo_s",),
    "itl_slo": ("itl_slo_s",),
    "attainment": ("attainment", "in_time"),
}
"""Fields of `DecideConfig` that each option from ``spec.slo`` of the manifest fills, by attribute name of the option."""

_DEMAND_MODES = (PlannerMode.ADAPTIVE, PlannerMode.SLA)


def modes_of(name: str) -> tuple[PlannerMode, ...]:
    """Return the planner modes that use an option; empty if every mode does or the option is unknown.

    Args:
        name: Name of the option, without leading dashes.
    """
    attribute = name.replace("-", "_")
    if attribute in TARGETS:
        return _DEMAND_MODES
    setting = SETTINGS.get(attribute)
    if setting is None:
        return ()
    return READ_IN_MODES.get(setting.key) or READ_IN_MODES.get(setting.key.partition(".")[0], ())


FLAGS = tuple(_kebab(name) for name in PlannerOptions.model_fields)
"""Name of every option without leading dashes; the fifteen from NVIDIA Dynamo's planner documentation come first."""


def join(
    *, given: Mapping[str, Any], file: Path | None = None, graph: GraphDeployment | None = None
) -> PlannerOptions:
    """Return the planner's options, combined from flags, environment, file, graph and defaults, and validated.

    Args:
        given: Options set by flags and environment, by kebab-case name; they override all other values.
        file: File of ``--config``; None if there is none.
        graph: Graph of ``--graph``, with the lowest precedence above the defaults; None if there is none.

    Raises:
        InvalidSpecError: options are invalid or contradict each other; it lists all problems found.
    """
    said = {**(_from_file(file) if file is not None else {}), **given}
    layers = {**_from_graph(graph), **said}
    options = _checked(layers, given, file)
    zero_after_s = options.scale_to_zero_after
    # Without the key in the graph, its routers would refuse requests while it is scaled to zero.
    if zero_after_s is not None and (graph is None or graph.spec.planner.scale_to_zero_after_seconds is None):
        message = (
            f"{zero_after_s:g} s, but no graph sets planner.scaleToZeroAfterSeconds, which its router "
            "and services must be configured for; set it in the graph"
        )
        raise InvalidSpecError([ManifestProblem("--scale-to-zero-after", message, "planner")])
    refuse_contradictions(options, is_aggregated=graph is not None and not graph.spec.is_disaggregated)
    return options


def refuse_contradictions(options: PlannerOptions, *, is_aggregated: bool) -> None:
    """Check options that are valid on their own for contradictions between them.

    Args:
        options: Options to check.
        is_aggregated: Whether the graph has one aggregated role instead of prefill and decode.

    Raises:
        InvalidSpecError: options contradict each other; it lists all problems found.
    """
    problems = _contradictions(options, is_aggregated=is_aggregated)
    if problems:
        raise InvalidSpecError([ManifestProblem(f"--{key}", message, "planner") for key, message in problems])


def stated(*, given: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    """Return only the options that are set explicitly, by kebab-case name: by flags and environment, or by the ``--config`` file.

    Args:
        given: Options set by flags and environment, by kebab-case name.
        file: File of ``--config``; None if there is none.

    Raises:
        InvalidSpecError: values are invalid on their own; it lists all of them.
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
            [ManifestProblem("", f"not YAML: {getattr(exc, 'problem', exc)}", str(path), line)]
        ) from exc
    section = content.get(SECTION) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        message = (
            f"no section {SECTION!r}; write the options below it, e.g. {SECTION}: {{environment: local}}"
        )
        raise InvalidSpecError([ManifestProblem("", message, str(path))])
    return section


def _from_graph(graph: GraphDeployment | None) -> dict[str, Any]:
    if graph is None:
        return {}
    spec, planner = graph.spec, graph.spec.planner
    decode = spec.service(Role.DECODE) or spec.service(Role.AGGREGATED)
    prefill = spec.service(Role.PREFILL)
    starts = [service.startup_timeout_seconds for service in spec.workers.values()]
    declared = {_kebab(name): attrgetter(setting.key)(planner) for name, setting in SETTINGS.items()}
    found = {
        **declared,
        "namespace": graph.name,
        "served-model-name": spec.served_name,
        "decode-engine-num-gpu": decode[1].gpus if decode else None,
        "prefill-engine-num-gpu": prefill[1].gpus if prefill else None,
        "ttft-slo": duration_text(spec.slo.ttft_seconds),
        "itl-slo": None if spec.slo.itl_seconds is None else duration_text(spec.slo.itl_seconds),
        "attainment": spec.slo.attainment,
        "adjustment-deadline": max(starts, default=None),
    }
    stated = {key: value for key, value in found.items() if value is not None}
    return {**stated, "max-gpu-budget": planner.max_gpu_budget}


def _contradictions(options: PlannerOptions, *, is_aggregated: bool) -> list[tuple[str, str]]:
    found = _broken_rules(options)
    if options.max_gpu_budget is None or any(key == _kebab("min_gpu_budget") for key, _ in found):
        return found
    floors = {"decode": options.decode_engine_num_gpu}
    if not is_aggregated:
        floors["prefill"] = options.prefill_engine_num_gpu
    needed = {k: max(1, math.ceil(options.min_gpu_budget / gpus)) * gpus for k, gpus in floors.items()}
    if sum(needed.values()) > options.max_gpu_budget:
        text = " + ".join(f"{count} for {role}" for role, count in needed.items())
        message = (
            f"{options.max_gpu_budget} is below the floor of {text} that --min-gpu-budget "
            f"{options.min_gpu_budget} requires; raise it or lower the floor"
        )
        found.append(("max-gpu-budget", message))
    return found


def _broken_rules(options: PlannerOptions) -> list[tuple[str, str]]:
    """Return the rules of ``spec.planner`` that the options break, each as (option at fault, message)."""
    plain: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        *sections, key = setting.key.split(".")
        section = plain
        for each in sections:
            section = section.setdefault(each, {})
        section[key] = getattr(options, name)
    try:
        PlannerConfig.model_validate(plain)
    except ValidationError as exc:
        return [
            _as_option(violation, error["loc"])
            for error in exc.errors()
            if error["type"] == RULE_ERROR
            for violation in error["ctx"]["violations"]
        ]
    return []


def _as_option(violation: Violation, section: tuple[int | str, ...]) -> tuple[str, str]:
    """Return a broken rule of ``spec.planner`` with manifest keys replaced by flags."""
    flags = {_camel(setting.key.split(".")): _kebab(name) for name, setting in SETTINGS.items()}
    message = violation.message
    for path in violation.related:
        message = re.sub(rf"\b{path[-1]}\b", f"--{flags[_camel((*section, *path))]}", message)
    return flags[_camel((*section, *violation.path))], message


def _camel(key: Iterable[object]) -> str:
    return ".".join(to_camel(str(part)) for part in key)


def _problem(error: Any, file: Path | None, given: Mapping[str, Any]) -> ManifestProblem:
    key = str(error["loc"][0]) if error["loc"] else ""
    where = str(file) if file is not None and key not in given else "planner"
    if error["type"] == DURATION_ERROR:
        return ManifestProblem(f"--{key}", error["msg"], where)
    if f"--{key}" in RENAMED_FLAGS:
        return ManifestProblem(f"{SECTION}.{key}", f"no longer an option; {RENAMED_FLAGS[f'--{key}']}", where)
    if error["type"] == "extra_forbidden":
        return ManifestProblem(f"{SECTION}.{key}", f"unknown option; known: {', '.join(FLAGS)}", where)
    return ManifestProblem(f"--{key}", f"{error['input']!r}: {error['msg'].lower()}; correct it", where)
