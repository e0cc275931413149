"""What a runtime says of itself, so that no other code knows one by name.

A runtime is a class with a method of each name below; to inherit from `Runtime` gives it those that it does not need.
Its distribution registers the class as an entry point of group ``penstock.runtimes``, under the name that manifests
use: docs/runtimes.md shows one. Its workers answer like vLLM: OpenAI's API, ``/health`` and vLLM's metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Protocol, cast

from penstock.api.enums import Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import GROUP, RuntimeTraits
from penstock.api.service import ServiceSpec
from penstock.core.plugins import load
from penstock.kube.kinds import Kind
from penstock.runtimes.process import RuntimeContext, WorkerCommand


@dataclass(frozen=True, slots=True)
class ClusterNeeds:
    """What a graph's processes need of a Kubernetes cluster beside what every graph gets.

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
        traits: What manifests and policies depend on.
        cluster: What it needs of Kubernetes.
        has_discovery_folder: On one machine its processes find each other in `RuntimeContext.discovery_folder`.
    """

    traits: ClassVar[RuntimeTraits]
    cluster: ClassVar[ClusterNeeds] = ClusterNeeds()
    has_discovery_folder: ClassVar[bool] = False

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one worker, without what the user adds.

        Args:
            spec: Of the graph.
            service: The worker's.
            context: Where and how fast it runs.
        """
        ...

    def frontend(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of what takes the router's place; asked only where `RuntimeTraits.frontend` is given."""
        raise NotImplementedError

    def pod_environment(self, role: Role) -> Mapping[str, str]:
        """Return variables that pods of a role need; ``$(POD_IP)`` is the pod's own address."""
        del role
        return {}

    def node_args(self, spec: GraphSpec, nodes: int, rank: str) -> list[str]:
        """Return arguments by which the nodes of one replica find each other; none: its leader serves alone.

        Args:
            spec: Of the graph.
            nodes: Of the replica, > 1.
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
