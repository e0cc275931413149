"""What a runtime declares, so that no other code depends on its name.

A runtime is a class with a method of each name below; to inherit from `Runtime` gives it those that it does not need.
Its distribution registers the class as an entry point of group ``penstock.runtimes``, under the name that manifests
use: docs/runtimes.md shows one. Its workers answer like vLLM: OpenAI's API, ``/health`` and vLLM's metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import ClassVar, Final, Protocol, cast

from penstock.api.enums import Environment, Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import GROUP, RuntimeTraits
from penstock.api.service import EnvFrom, EnvVar, ServiceSpec
from penstock.core.plugins import load
from penstock.core.worker_metrics import METRICS_PATH, STALL_REAL_S
from penstock.kube.kinds import Kind
from penstock.runtimes.kv_transfer import NIXL, KvTransferProtocol

PORT = "port"
SIDE_CHANNEL_PORT = "side_channel_port"
KV_EVENTS_PORT = "kv_events_port"
KV_REPLAY_PORT = "kv_replay_port"
CACHE_FOLDER = "cache_folder"
"""Placeholder in the environment of a process on one machine: a folder that is its own, for what it compiles."""
KV_EVENTS_SUFFIX = ".kv"
"""Suffix of the sockets next to the statefile on which vLLM publishes KV events; before it the graph's name and a number."""
KV_REPLAY_SUFFIX = ".kr"
"""Suffix of the sockets on which it serves earlier ones."""
DISCOVERY_SUFFIX = ".discovery"
"""Suffix of the folder next to the statefile in which a runtime's own processes may find each other."""
PLANNER_ROLE = "planner"
"""Role of the planner's process, which is not a service of the graph."""

LIVENESS_S = 60.0
"""Chosen: far above any step of Penstock's own processes, which answer health checks during their work."""

ENGINE_LIVENESS_S = 600.0
"""Chosen: twice the 300 s after which vLLM 0.32 itself gives up a step. A real engine is silent for minutes where
processors are short, and to kill it then loses all its requests; one that hangs for good is still replaced."""

OWN_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi"}
"""Chosen for Penstock's own processes: an idle one's need, so that a laptop's cluster holds the samples."""

MASK = "***"

_SECRET_WORDS = frozenset(
    {"key", "keys", "token", "secret", "password", "passwd", "credential", "credentials"}
)


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What a graph does not define: where and how its processes run.

    Attributes:
        python: Interpreter that has Penstock installed.
        graph_file: Manifest that router and planner read at each start.
        followed_file: Manifest whose changes a running router follows; None: the same.
        discovery: Where the router finds workers: the statefile's path, or ``kubernetes``.
        namespace: Namespace on this backend.
        speed: Time scale: simulated seconds per real second.
        host: Address on which engines listen.
        own_host: Address on which Penstock's own processes listen; ``::`` is every address, of IPv6 and of IPv4, which
            not every engine understands so.
        peer_host: Address at which other workers reach this one.
        environment: Backend that the planner scales.
        log_dir: The planner's folder; None leaves it to the graph and the planner's default.
        planner_args: Flags of `penstock planner run` that win over the graph.
    """

    python: str
    graph_file: str
    discovery: str
    namespace: str
    speed: float = 1.0
    host: str = "127.0.0.1"
    own_host: str = "127.0.0.1"
    peer_host: str = "127.0.0.1"
    environment: Environment = Environment.LOCAL
    log_dir: str | None = None
    followed_file: str | None = None
    planner_args: tuple[str, ...] = ()

    @property
    def discovery_folder(self) -> PurePath:
        """Folder in which the processes of a local graph may find each other, next to its statefile."""
        return PurePath(self.discovery).parent / f"{self.namespace}{DISCOVERY_SUFFIX}"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One kind of process of a graph; its replicas are equal except for ports and GPUs.

    Attributes:
        name: ``NAMESPACE_SERVICE``, unique on the backend.
        service: Service's name in the graph; ``planner`` for the planner.
        argv: Command with placeholders.
        env: Variables on top of the starter's own, with placeholders.
        env_sources: Variables whose values Kubernetes supplies.
        ports: Placeholders that need a free TCP port each; empty for a process that does not listen.
        gpus: Of one replica, over all its nodes.
        bounds: Fewest and most replicas.
        metrics_path: Has a worker's metrics.
        scheme: By which it is reached: http or https.
        health_path: Answers 200 once the process serves; None for a process that does not listen.
        startup_s: Longest time to the first healthy answer, seconds (simulated).
        grace_s: Longest time to finish requests on the way out, seconds (simulated).
        liveness_s: A process that served and gives no healthy answer for this long, real seconds, hangs.
        stall_s: A worker that has requests and makes no token for this long, real seconds, hangs.
        takes_socket: It accepts connections at a socket that it is given, in the way of systemd.
    """

    name: str
    service: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    env_sources: tuple[EnvVar, ...] = ()
    env_from: tuple[EnvFrom, ...] = ()
    ports: tuple[str, ...] = (PORT,)
    gpus: int = 0
    nodes: int = 1
    replicas: int = 1
    bounds: tuple[int, int] = (1, 1)
    health_path: str | None = "/health"
    image: str = ""
    startup_s: float = 600.0
    grace_s: float = 900.0
    liveness_s: float = LIVENESS_S
    stall_s: float = STALL_REAL_S
    metrics_path: str = METRICS_PATH
    scheme: str = "http"
    takes_socket: bool = False


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """Command, variables and ports of one process, before the user's own are added; see `ProcessSpec`."""

    argv: tuple[str, ...]
    ports: tuple[str, ...] = (PORT,)
    env: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    takes_socket: bool = False


def fill(text: str, values: Mapping[str, str | int]) -> str:
    """Return ``text`` with each ``{name}`` of ``values`` replaced; other braces stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def filled_argv(spec: ProcessSpec, values: Mapping[str, str | int]) -> tuple[str, ...]:
    """Return the command with its placeholders replaced."""
    return tuple(fill(each, values) for each in spec.argv)


def filled_env(spec: ProcessSpec, values: Mapping[str, str | int]) -> dict[str, str]:
    """Return the variables with their placeholders replaced."""
    return {name: fill(value, values) for name, value in spec.env.items()}


def is_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret, by its words."""
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the values of secrets hidden."""
    return {name: MASK if is_secret(name) else value for name, value in env.items()}


def masked_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``argv`` with the values of secret flags hidden, in both spellings of a flag."""
    masked: list[str] = []
    hide_next = False
    for word in argv:
        flag, separator, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            masked.append(MASK)
            hide_next = False
            continue
        secret = flag.startswith("--") and is_secret(flag)
        hide_next = secret and not separator
        masked.append(f"{flag}={MASK}" if secret and separator else word)
    return tuple(masked)


@dataclass(frozen=True, slots=True)
class ClusterNeeds:
    """What a graph's processes need of a Kubernetes cluster in addition to what every graph gets.

    Attributes:
        fields: Variables of every pod by name, and the pod's field that each takes.
        service_labels: Labels of every Service, and so of its EndpointSlices.
        verbs: What every process may do with a resource, by (API group, resource); the operator must hold it too.
        kind: What the cluster must know; None: nothing more.
        kind_source: For whom it is and where it comes from, as the end of a sentence.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    service_labels: Mapping[str, str] = field(default_factory=dict)
    verbs: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    kind: Kind | None = None
    kind_source: str = ""


class Runtime(Protocol):
    """One runtime.

    Attributes:
        kv_transfer: How its prefill workers hand KV to decode workers behind Penstock's router.
        has_discovery_folder: On one machine its processes find each other in `RuntimeContext.discovery_folder`.
    """

    traits: ClassVar[RuntimeTraits]
    cluster: ClassVar[ClusterNeeds] = ClusterNeeds()
    has_discovery_folder: ClassVar[bool] = False
    kv_transfer: ClassVar[KvTransferProtocol] = NIXL

    def kv_transfer_of(self, spec: GraphSpec) -> KvTransferProtocol:
        """Return how the prefill workers of a graph hand KV to decode workers."""
        del spec
        return self.kv_transfer

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one worker, without what the user adds."""
        ...

    def frontend(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of the router's replacement; called only where `RuntimeTraits.frontend` is given."""
        raise NotImplementedError

    def pod_environment(self, role: Role) -> Mapping[str, str]:
        """Return variables that pods of a role need; ``$(POD_IP)`` is the pod's own address."""
        del role
        return {}

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> Mapping[str, str]:
        """Return CPU and memory that one pod requests alongside its GPUs; none: the pod is the first to be evicted.

        Args:
            spec: Of the graph.
            role: A worker's, or the router's where `RuntimeTraits.frontend` is given.
            gpus: That the pod counts.
        """
        del spec, role, gpus
        return {}

    def node_args(self, spec: GraphSpec, nodes: int, rank: str) -> list[str]:
        """Return arguments by which the nodes of one replica find each other; none: its leader serves alone.

        Args:
            spec: Of the graph.
            nodes: > 1.
            rank: This node's, 0 the leader's; may be ``$(LWS_WORKER_INDEX)``.
        """
        del spec, nodes, rank
        return []

    def check_installed(self, spec: GraphSpec, context: RuntimeContext) -> None:
        """Refuse a graph whose programs are not on this machine; nothing to refuse is the default.

        Raises:
            InvalidSpecError: they are not; the message says how to install them.
        """
        del spec, context


@cache
def runtime_of(name: str) -> Runtime:
    """Return the runtime of a name.

    Raises:
        ConfigError: no distribution registered it, or it cannot be imported.
    """
    return cast(Runtime, load(GROUP, name, kind="runtime")())
