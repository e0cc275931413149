"""`penstock validate`, `render` and `import`: check, show and convert manifests; nothing is started."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml

from penstock.api import GraphDeployment, ProfileRequest
from penstock.api.manifests import STDIN, Manifests, load_graph, parse_manifests, read_text
from penstock.api.manifests.importing import import_graph
from penstock.api.manifests.validation import template_of
from penstock.api.manifests.yaml_text import as_yaml
from penstock.cli import fields, option
from penstock.cli.graph_warnings import cluster_warnings, parameter_problems, print_warnings, warnings_of
from penstock.cli.say import say, say_json
from penstock.cli.terminal import write_text
from penstock.core.errors import ConfigError, InvalidSpecError, ManifestProblem
from penstock.core.flags import flag, time_scale
from penstock.core.printable import printable_json
from penstock.kube.kinds import INFERENCE_POOL, LEADER_WORKER_SET
from penstock.kube.objects.names import SERVICE_LABEL
from penstock.runtimes import ProcessSpec, RuntimeContext, masked_argv, masked_env, process_specs
from penstock_operator.resources import BuildContext, absent_files, adapter, allowances_of, children
from penstock_operator.resources.accelerators import GPU_RESOURCES, uncounted_devices
from penstock_operator.resources.profile import profile_objects

_EXIT_INVALID = 2

_ALLOWED = (
    "privileges that the operator allows in podTemplates, as in the chart's podTemplates.allow: "
    "hostIPC,capabilities=IPC_LOCK and so on, or everything."
)
_GPU_LIST = ",".join(GPU_RESOURCES)
_GPU_RESOURCES = (
    "node resources that count as GPUs, as in the chart's operator.gpuResources; names or patterns."
)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--allow-pod-templates",
    "allowed",
    default="",
    metavar="LIST",
    help=f"{_ALLOWED}  [default: nothing]",
)
@click.option(
    "--gpu-resources",
    default=_GPU_LIST,
    metavar="LIST",
    show_default=True,
    help=f"Comma-separated {_GPU_RESOURCES}",
)
@option.as_json("Print one JSON object instead of lines.")
def validate(files: tuple[Path, ...], allowed: str, gpu_resources: str, as_json: bool) -> None:
    """Check manifests as the API server and the operator do; print every problem of every FILE (- is stdin) at once.

    Exits 0 if all are valid, 2 if any problem was found.
    """
    context = context_of(allowed, gpu_resources)
    problems: list[ManifestProblem] = []
    warned: list[ManifestProblem] = []
    summaries: list[dict[str, Any]] = []
    for file in files:
        local: list[ManifestProblem] = []
        found, manifests = _check(file, context, local)
        found = [*found, *parameter_problems(manifests.graphs, file)]
        problems += found
        warned += warnings_of(manifests.graphs, file)
        warned += cluster_warnings(manifests.graphs, file)
        devices = (
            each for graph in manifests.graphs for each in uncounted_devices(graph, context.gpu_resources)
        )
        warned += (replace(each, file=str(file)) for each in (*devices, *local))
        objects = [f"{each.kind} {each.name}" for each in manifests.graphs]
        objects += [f"{each.kind} {each.metadata.name}" for each in manifests.adapters]
        objects += [f"{each.kind} {each.name}" for each in manifests.profile_requests]
        objects += [f"{each.kind} {each.name}" for each in manifests.gpu_pools]
        summaries.append({"file": str(file), "valid": not found, "objects": objects})
    if as_json:
        say_json({"valid": not problems, "files": summaries, "problems": problems, "warnings": warned})
    else:
        for problem in problems:
            say(str(problem), err=True)
        print_warnings(warned)
        for summary in summaries:
            if summary["valid"]:
                say(f"{summary['file']}: valid ({', '.join(summary['objects'])})")
    if problems:
        sys.exit(_EXIT_INVALID)


def _check(
    file: Path, context: BuildContext, local: list[ManifestProblem]
) -> tuple[list[ManifestProblem], Manifests]:
    """Return what is wrong with a file, and what it holds; `local` gets what only a graph outside a cluster may say."""
    try:
        text = read_text(file)
    except InvalidSpecError as exc:
        return list(exc.problems), Manifests((), ())

    def check(model: object) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield what the operator would refuse of an object."""
        try:
            if isinstance(model, GraphDeployment):
                local.extend(absent_files(model, objects_of(model, context, service=None)))
            elif isinstance(model, ProfileRequest) and (graph := template_of(model)[1]) is not None:
                profile_objects(model, graph, context)
        except InvalidSpecError as exc:
            yield from ((tuple(_KEY.findall(each.path)), each.message) for each in exc.problems)

    manifests, problems = parse_manifests(text, str(file), check=check)
    return problems, manifests


_KEY = re.compile(r"[^.\[]+(?:\[[^\]]*\])*")
"""A key of a path such as ``spec.containers[main].env``."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What `penstock render` prints, and how."""

    graph_name: str | None = flag(
        "Name of the graph, if FILE holds several.", name="--graph", metavar="NAME", default=None
    )
    service: str | None = flag(
        "Print only this service; `planner` is the planner's process.", metavar="NAME", default=None
    )
    layout: str | None = flag(
        "text: one command to copy for each process; json and yaml: every detail.",
        name="--format",
        choices=("text", "json", "yaml"),
        unset="text",
    )
    speed: float = time_scale()
    kubernetes: bool = flag(
        "Print the objects that the operator would create in a cluster, as YAML for kubectl.",
        default=False,
    )
    allow_pod_templates: str = flag(f"With --kubernetes: {_ALLOWED}", metavar="LIST", default="")
    gpu_resources: str = flag(f"With --kubernetes: {_GPU_RESOURCES}", metavar="LIST", default=_GPU_LIST)
    namespace: str | None = flag(
        "With --kubernetes: namespace of the objects.",
        metavar="NAME",
        unset="the graph's namespace, or default",
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@fields.options(RenderOptions)
@option.as_json("The same as --format json; with --kubernetes a list of objects.")
def render(file: Path, *, as_json: bool, **given: Any) -> None:
    """Print the processes that the graph in FILE (- is stdin) becomes: command, environment, ports, GPUs.

    Values of secrets are masked. ``{port}`` and other ports in braces are filled at start.

    With --kubernetes, the objects are printed without an owner, and variables as the manifest has them. To compare
    them with a cluster: penstock render FILE --kubernetes | kubectl diff -f -
    """
    said = _render_options(given, as_json=as_json)
    graph, service, layout = load_graph(file, name=said.graph_name), said.service, said.layout
    if said.kubernetes:
        if layout is not None or said.speed != 1:
            raise ConfigError("--kubernetes: excludes --format and --speed; remove them")
        _check_service(graph, service, graph.spec.services)
        place = said.namespace or graph.metadata.namespace or "default"
        context = context_of(said.allow_pod_templates, said.gpu_resources, namespace=place)
        objects = objects_of(graph, context, service=service)
        if problems := list(absent_files(graph, objects)):
            raise InvalidSpecError(problems)
        if as_json:
            say_json(objects)
        else:
            say(as_yaml(objects), nl=False)
        return
    if said.namespace is not None:
        raise ConfigError("--namespace: only with --kubernetes; remove it or add --kubernetes")
    runtime = RuntimeContext(
        python=sys.executable,
        graph_file="GRAPH.yaml" if str(file) == STDIN else str(file),
        discovery=f"STATE_DIR/{graph.name}.json",
        namespace=graph.name,
        speed=said.speed,
    )
    specs = process_specs(graph, runtime)
    _check_service(graph, service, (each.service for each in specs))
    specs = [each for each in specs if service in {None, each.service}]
    described = [_described(each) for each in specs]
    if layout == "json":
        say_json(described)
    elif layout == "yaml":
        say(yaml.safe_dump(described, sort_keys=False, width=110), nl=False)
    else:
        say("\n\n".join(_as_text(each) for each in specs))


def _render_options(given: dict[str, Any], *, as_json: bool) -> RenderOptions:
    said = fields.take(RenderOptions, given)
    if not as_json or said.kubernetes:
        return said
    if said.layout not in {None, "json"}:
        raise ConfigError(f"--json: excludes --format {said.layout}; keep one")
    return replace(said, layout="json")


def _check_service(graph: GraphDeployment, service: str | None, known: Iterable[str]) -> None:
    names = list(known)
    if service is not None and service not in names:
        raise ConfigError(
            f"--service: {service!r} is not in graph {graph.name}; choose one of {', '.join(names)}"
        )


def _described(spec: ProcessSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "service": spec.service,
        "role": spec.role,
        "replicas": spec.replicas,
        "minReplicas": spec.bounds[0],
        "maxReplicas": spec.bounds[1],
        "gpusPerReplica": spec.gpus,
        "nodesPerReplica": spec.nodes,
        "argv": list(masked_argv(spec.argv)),
        "env": masked_env(spec.env),
        "envFromKubernetes": [each.name for each in spec.env_sources],
        "envFrom": [each.to_manifest() for each in spec.env_from],
        "ports": list(spec.ports),
        "healthPath": spec.health_path,
        "image": spec.image,
        "startupTimeoutSeconds": spec.startup_s,
        "terminationGracePeriodSeconds": spec.grace_s,
        "livenessTimeoutSeconds": spec.liveness_s,
    }


def _as_text(spec: ProcessSpec) -> str:
    low, high = spec.bounds
    scale = f"{spec.replicas}" if low == high else f"{spec.replicas} ({low} to {high})"
    ports = ", ".join(spec.ports) or "none"
    head = f"# {spec.name}: role {spec.role}, replicas {scale}, GPUs {spec.gpus} each, ports {ports}"
    lines = [
        head,
        f"#   health {spec.health_path or 'none'}, grace {spec.grace_s:g} s, image {spec.image}",
        *(f"#   environment from {json.dumps(each.to_manifest())}" for each in spec.env_from),
        *(f"#   {each.name} from {json.dumps(each.value_from)}" for each in spec.env_sources),
    ]
    assignments = [f"{name}={shlex.quote(value)}" for name, value in masked_env(spec.env).items()]
    words = [*assignments, *(shlex.quote(word) for word in masked_argv(spec.argv))]
    return "\n".join([*lines, " ".join(words)])


@click.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Write the manifest to this file instead of stdout.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit 1 if any setting could not be converted; the manifest is still written.",
)
@click.option(
    "--name",
    help="Name of the deployment to convert, if FILE holds several; of values without a name, the graph's name.  [default: the only one]",
)
@option.as_json("Print one JSON object: manifest, and unconverted with line, path, value and reason of each.")
def import_(file: Path, output: Path | None, strict: bool, name: str | None, as_json: bool) -> None:
    """Convert a manifest or Helm values of another stack in FILE to a GraphDeployment.

    FILE is YAML with NVIDIA's DynamoGraphDeployment (v1alpha1 or v1beta1), KServe's LLMInferenceService, or the values
    of the charts of vLLM's production-stack or llm-d-modelservice. The manifest is written to stdout, the list of
    settings that could not be converted to stderr. A deployment that no graph can run is refused with exit status 2.
    """
    result = import_graph(read_text(file), str(file), name=name)
    manifest = result.graph.to_manifest()
    if as_json:
        report = {"manifest": manifest, "unconverted": [asdict(each) for each in result.unconverted]}
        text = printable_json(json.dumps(report, indent=2) + "\n")
    else:
        text = as_yaml([manifest])
    if output is None:
        say(text, nl=False)
    else:
        write_text(f"--output {output}", output, text)
    for each in () if as_json else result.unconverted:
        say(f"{file}: not carried: {each}", err=True)
    if strict and result.unconverted:
        sys.exit(1)


def context_of(allowed: str, gpu_resources: str = _GPU_LIST, *, namespace: str = "default") -> BuildContext:
    """Return what the operator would build with, by its chart's values.

    Raises:
        ConfigError: they allow or count what cannot be.
    """
    resources = tuple(filter(None, (each.strip() for each in gpu_resources.split(","))))
    if not resources:
        raise ConfigError("--gpu-resources: is empty; name at least one, or leave it out")
    return BuildContext(
        owner_uid="",
        namespace=namespace,
        kinds=frozenset({LEADER_WORKER_SET, INFERENCE_POOL}),
        allowed=allowances_of(allowed),
        gpu_resources=resources,
    )


def objects_of(graph: GraphDeployment, context: BuildContext, *, service: str | None) -> list[dict[str, Any]]:
    """Return what the operator would make of a graph, or of one of its services; no graph in a cluster owns them yet."""
    found = children(graph, context, replicas={}, unavailable={})
    for name, spec in graph.spec.services.items():
        if spec.scaling is not None and spec.role.is_worker:
            found.append(adapter(graph, name, context, replicas=spec.first_replicas))
    if service is None:
        return found
    return [each for each in found if each["metadata"]["labels"].get(SERVICE_LABEL) == service]
