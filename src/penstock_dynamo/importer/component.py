"""Dynamo's components: where each version keeps their parts, and which become services of what role, size and scaling.

Version v1beta1 lists components and gives each a native pod template with a container ``main``; v1alpha1 has a map of them,
with the pod's parts apart.

Source: ai-dynamo/dynamo, deploy/operator/api and examples/backends/vllm/deploy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from penstock.api.enums import Role
from penstock.api.manifests.foreign import ManifestSource
from penstock.api.manifests.validation import shown
from penstock.kube.objects.device_claims import claimed_devices
from penstock_dynamo.importer.command import SCRIPT_AT, SHELLS, Command, parse_command

GROUP = "nvidia.com/"
"""API group of Dynamo's operator, before a version."""
ALPHA, BETA = GROUP + "v1alpha1", GROUP + "v1beta1"
MAIN = "main"
GPU_RESOURCE = "nvidia.com/gpu"
MOCKER_MODULE = "dynamo.mocker"
_WORKER_MODULES = frozenset(
    {None, "dynamo.vllm", MOCKER_MODULE, "dynamo.vllm.unified_main", "dynamo.sglang", "dynamo.trtllm"}
)

_KINDS = {
    **dict.fromkeys(("frontend", "main"), "router"),
    **dict.fromkeys(("worker", "prefill", "decode"), "worker"),
    "planner": "planner",
}
_ROLE_WORDS = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "agg": Role.AGGREGATED,
    "aggregated": Role.AGGREGATED,
}
_MODE_FLAGS = {
    "--is-prefill-worker": "prefill",
    "--is-decode-worker": "decode",
    "--multimodal-decode-worker": "decode",
    "--multimodal-encode-worker": "encode",
    "--multimodal-processor": "processor",
}
"""Older flags, and the words of ``--disaggregation-mode`` that they mean."""

_STAGES = frozenset({"encode", "processor"})
"""Stages of multimodal serving other than prefill and decode; a worker with ``--enable-multimodal`` does without them."""


@dataclass
class Component:
    """One component on its way to a service.

    Attributes:
        source: In the foreign manifest.
        key: Its name there.
        shared_env: Variables of all components.
        is_beta: Whether it is in a manifest of v1beta1.
        claimed: GPUs of each ResourceClaimTemplate that is in the same file.
        role: None while it depends on the other components.
        gpus: GPUs of one replica over all its nodes.
        nodes: Nodes of one replica.
        service: The service in manifest form, filled step by step.
    """

    source: ManifestSource
    key: str
    shared_env: ManifestSource
    is_beta: bool
    claimed: Mapping[str, int] = field(default_factory=dict)
    role: Role | None = None
    gpus: int = 1
    nodes: int = 1
    service: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", self.key)
        self.name = re.sub(r"[^a-z0-9]+", "-", spaced.lower()).strip("-") or "service"
        if self.is_beta:
            template = self.source.at("podTemplate")
            self.pod, self.metadata = template.at("spec"), template.at("metadata")
            mains = [each for each in self.pod.elements("containers") if each.peek("name") == MAIN]
            self.container = mains[-1] if mains else self.pod.at("containers", MAIN)
            self.container.take("name")
            self.resources, self.gpu_key, self.type_key = self.container.at("resources"), GPU_RESOURCE, "type"
        else:
            self.pod, self.metadata = self.source.at("extraPodSpec"), self.source.at("extraPodMetadata")
            self.container = self.pod.at("mainContainer")
            self.resources, self.gpu_key, self.type_key = self.source.at("resources"), "gpu", "componentType"
        self.args = self.container.at("args")

    @property
    def kind(self) -> str | None:
        """``router``, ``worker`` or ``planner``; None: one that graphs do not have."""
        return _KINDS.get(self.source.word(self.type_key) or "")

    @cached_property
    def words(self) -> list[str]:
        """The container's command and arguments."""
        found = [self.container.peek(key) for key in ("command", "args")]
        return [str(word) for words in found if isinstance(words, list) for word in words]

    @cached_property
    def command(self) -> Command | None:
        """What its container runs; None if that is not a plain Dynamo module."""
        variables: dict[str, str | None] = {}
        # A later place wins, as in Dynamo's operator.
        for listed in (self.shared_env, self.source.at("envs"), self.container.at("env")):
            for each in listed.elements():
                value = each.peek("value")
                if isinstance(value, str) or isinstance(each.peek("valueFrom"), dict):
                    variables[str(each.peek("name"))] = value if isinstance(value, str) else None
        return parse_command(self.words, variables)

    @property
    def is_frontend(self) -> bool:
        """Whether it runs Dynamo's own frontend."""
        command = self.command if self.kind == "router" else None
        return command is not None and command.module in {None, "dynamo.frontend"}

    @property
    def stage(self) -> str | None:
        """The stage of multimodal serving that a worker is and graphs have no role for; else None."""
        if self.kind != "worker" or self.command is None:
            return None
        mode = Command(None, list(self.command.words)).pop_value("--disaggregation-mode")
        named = [_MODE_FLAGS.get(word, "") for word in self.command.words]
        return next((each for each in (*named, mode) if each in _STAGES), None)

    def read(self) -> None:
        """Read role, size, image and scaling of a frontend or worker."""
        source, container = self.source, self.container
        source.take(self.type_key)
        for key in ("command", "args"):
            container.take_list(key)
        if self.command is None:
            container.at("command").note(
                "runs something else than a Dynamo module; the runtime's own is used"
            )
        else:
            head = container.peek("command")
            script = "command" if isinstance(head, list) and len(head) > SCRIPT_AT else "args"
            for text, why in self.command.left_out:
                container.at(script).note(why, text)
        if self.kind == "router":
            self.role = Role.ROUTER
        else:
            self._read_role()
            self._read_size()
        replicas, image = source.take("replicas"), container.take("image")
        if isinstance(replicas, int):
            self.service["replicas"] = replicas
        if isinstance(image, str):
            self.service["image"] = image
        self._read_scaling()

    def _read_role(self) -> None:
        word = self.source.word("subComponentType")
        if word is not None:
            self.source.take("subComponentType")
        flagged = None
        if self.command is not None:
            flagged = self.command.pop_value("--disaggregation-mode")
            for flag, mode in _MODE_FLAGS.items():
                flagged = mode if self.command.pop_flag(flag) else flagged
            self.command.pop_flag("--multimodal-worker")
        words = (word, flagged, self.source.word(self.type_key))
        self.role = next((_ROLE_WORDS[each] for each in words if each in _ROLE_WORDS), None)

    def _read_size(self) -> None:
        counts = [self.resources.take(kind, self.gpu_key) for kind in ("limits", "requests")]
        count = next((each for each in counts if each is not None), None)
        nodes = self.source.take("multinode", "nodeCount")
        self.nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
        stated = number_of(str(count))
        if isinstance(stated, int) and stated > 0:
            per_node = stated
        else:
            per_node = self._unstated_gpus()
            if count is not None:
                why = f"is not a number of whole GPUs; {per_node} is used, by the engine's own split"
                self.resources.at("limits", self.gpu_key).note(why)
        self.gpus = per_node * self.nodes
        sizes = {"gpusPerReplica": self.gpus, "nodesPerReplica": self.nodes}
        self.service |= {key: size for key, size in sizes.items() if size != 1}

    def _unstated_gpus(self) -> int:
        """Return the GPUs of a node where no resource counts them: what its claims hold, else what its engines split over."""
        listed = (self.resources.at("claims"), self.container.at("resources", "claims"))
        used = {each.word("name") for claims in listed for each in claims.elements()}
        named = {
            each.word("name"): each.word("resourceClaimTemplateName")
            for each in self.pod.elements("resourceClaims")
        }
        claimed = sum(self.claimed.get(named.get(name) or "", 0) for name in used)
        return claimed or -(-engine_gpus(self.command, self.nodes) // self.nodes)

    def _read_scaling(self) -> None:
        bounds = {key: self.source.take("autoscaling", key) for key in ("minReplicas", "maxReplicas")}
        adapter = self.source.peek("scalingAdapter")
        enabled = [self.source.take(key, "enabled") for key in ("scalingAdapter", "autoscaling")]
        if self.is_beta and isinstance(adapter, dict):  # its presence enables it
            enabled[0] = adapter.get("enabled", True)
            if not adapter:
                self.source.take("scalingAdapter")
        if any(enabled) and self.role is not Role.ROUTER:
            self.service["scaling"] = {key: each for key, each in bounds.items() if isinstance(each, int)}


def places_of(source: ManifestSource) -> tuple[ManifestSource, ManifestSource]:
    """Return where a deployment's version has its components, and the variables of all of them."""
    keys = ("components", "env") if source.peek("apiVersion") == BETA else ("services", "envs")
    listed, env = (source.at("spec", key) for key in keys)
    return listed, env


def components_of(source: ManifestSource, claimed: Mapping[str, int]) -> Iterator[Component]:
    """Yield a deployment's components; ``claimed`` has the GPUs of the ResourceClaimTemplates alongside it."""
    listed, env = places_of(source)
    if source.peek("apiVersion") == BETA:
        for index, each in enumerate(listed.elements()):
            if isinstance(each.peek(), dict):
                name = str(each.take("name") or f"component-{index}")
                yield Component(each, name, env, is_beta=True, claimed=claimed)
    else:
        for key in listed.names():
            yield Component(listed.at(key), key, env, is_beta=False, claimed=claimed)


def engine_gpus(command: Command | None, nodes: int) -> int:
    """Return the GPUs over which a replica's engines are split by their flags, over all its nodes."""
    if command is None:
        return 1
    flags = Command(None, list(command.words))
    total = 1
    local = flags.pop_value("--data-parallel-size-local", "-dpl")
    over_data = flags.pop_value("--data-parallel-size", "--data_parallel_size", "-dp")
    for text in (
        flags.pop_value("--tensor-parallel-size", "-tp", "--tp", "--tp-size"),
        flags.pop_value("--pipeline-parallel-size", "-pp", "--pp", "--pp-size"),
        over_data if local is None else str(nodes),
        local,
    ):
        size = number_of(text or "1")
        total *= size if isinstance(size, int) and size > 0 else 1
    return total


def claimed_gpus(template: Mapping[str, Any]) -> int:
    """Return the GPUs that a ResourceClaimTemplate holds: of a device class that is named after them; 0: unknown."""
    return claimed_devices(template, lambda name: "gpu" in name) or 0


def number_of(text: str) -> float | int | str:
    """Return the number that ``text`` is; else the text, which the graph's own rules refuse by its key."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


_ENTRY_POINTS = re.compile(r"\b(sglang|tensorrtllm|trtllm)-runtime\b")
"""Images of Dynamo whose worker without a command is not vLLM's."""

_REMEDY = "graphs run vLLM, SGLang, TensorRT-LLM, Dynamo's vLLM workers, or simulated ones; give such a variant of this deployment"
_OWN_WORKERS = "graphs run python3 -m dynamo.vllm, dynamo.mocker, and for dynamo.sglang and dynamo.trtllm their engines' own servers"


def refuse_what_no_graph_runs(source: ManifestSource, components: Sequence[Component]) -> None:
    """Refuse workers of other engines and programs: their image would be started with vLLM's command."""
    framework = source.at("spec", "backendFramework")
    if framework.peek() not in (None, "vllm", "sglang", "trtllm"):
        framework.refuse(f"names an engine that no graph runs, {shown(framework.peek())}; {_REMEDY}")
    for component in components:
        if component.kind == "worker":
            _refuse_worker(component)


def _refuse_worker(component: Component) -> None:
    container, command = component.container, component.command
    program = None
    image = container.at("image")
    named = _ENTRY_POINTS.search(str(image.peek()))
    if named is not None and command is not None and command.module is None:
        image.refuse(
            f"is of another engine than vLLM, {named[0]}, and no command says which worker it starts; {_OWN_WORKERS}"
        )
    elif command is None and component.words[0] in SHELLS:
        program = "is a script that starts Dynamo by no command, or by several"
    elif command is None:
        program = f"runs {component.words[0]}"
    elif command.module not in _WORKER_MODULES:
        program = f"starts {command.module}"
    if program is not None:
        place = container.at("command" if container.peek("command") is not None else "args")
        place.refuse(f"{program}; {_OWN_WORKERS}: start one of them")


def why_left_out(component: Component, every: Sequence[Component]) -> str | None:
    """Return why a component becomes no service, or None if it becomes one; ``every`` has the deployment's others."""
    named = component.source.peek(component.type_key)
    if component.kind is None and named == "epp":
        return "picks workers for a gateway; add a service with role router in its place"
    if component.kind is None:
        return f"componentType {named!r} has no role in a graph"
    is_other_router = component.kind == "router" and not component.is_frontend
    if is_other_router and any(each.is_frontend for each in every):
        return "is a frontend by its type but runs something else; deploy it by itself"
    if component.stage is not None:
        return f"is the {component.stage} stage of multimodal serving; a worker with --enable-multimodal does without it"
    return None
