"""Reads the ConfigMaps that a graph's planner uses: ``planner.sla.profile`` in mode sla, and ``planner.memory`` with learned state.

They are read by name and not watched, so that the planner needs permission to get ConfigMaps, but not to list them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.api import GraphDeployment, GraphSpec, PlannerMode
from penstock.core.errors import ConfigError, NotFoundError, UnavailableError
from penstock.core.logs import get_logger
from penstock.kube.client import KubeClient
from penstock.kube.kinds import CONFIG_MAP
from penstock.kube.objects.names import PROFILE_KEY
from penstock.performance.profile import PerformanceProfile, read_profile
from penstock.performance.quality import check_fits
from penstock_planner.cluster.status import PlannerReason
from penstock_planner.cluster.watch import Key
from penstock_planner.decide.state import Learned
from penstock_planner.learnt import LEARNING, memory_in
from penstock_planner.options import PlannerOptions

POLL_S: Final = 15.0
"""Real seconds between two reads of a ConfigMap. Chosen: a new profile takes effect within 15 s, at four small reads a minute per graph."""

READ_S: Final = 10.0
"""Timeout for one read, real seconds. Chosen: a busy API server answers within it."""

MEMORY_KEY: Final = "memory.json"
"""Key of the learned state in the ConfigMap of ``planner.memory``."""

_HOW_TO_EXPORT: Final = (
    "create it with `kubectl create configmap NAME --from-file=memory.json`; the file holds the output "
    "of `penstock planner memory show --json`"
)

EngineProfile = Callable[[GraphSpec], PerformanceProfile]
"""Function that computes the profile of a graph with simulated engines; it raises ConfigError if there is none."""

log = get_logger(__name__)


class ProfileError(ConfigError):
    """The performance profile of a graph in mode sla is missing or invalid. The graph's replicas are not changed.

    Attributes:
        reason: Reason for the graph's condition PlannerActive.
    """

    def __init__(self, reason: PlannerReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigMapProfiles:
    """Reads the performance profiles of all graphs of one process, from ConfigMaps.

    The profile of a graph with simulated engines that names no ConfigMap is computed from these engines.
    """

    def __init__(
        self, client: KubeClient, *, overrides: Mapping[str, Any], engine_profile: EngineProfile
    ) -> None:
        """Create a reader.

        Args:
            client: Kubernetes client.
            overrides: Options of the process that replace each graph's own; only ``mode`` and ``profile`` are used.
            engine_profile: Function that computes the profile of a graph with simulated engines that names no
                ConfigMap.
        """
        self._client = client
        self._mode = overrides.get("mode")
        self._named = overrides.get("profile")
        self._engine_profile = engine_profile

    def is_read_again(self, graph: GraphDeployment) -> bool:
        """Return whether the graph's performance profile is in a ConfigMap, so that it can change without a change of the graph.

        Args:
            graph: The parsed graph.
        """
        return self._plans_by_profile(graph.spec) and self._name_of(graph.spec) is not None

    async def read(self, key: Key, graph: GraphDeployment) -> PerformanceProfile | None:
        """Return the graph's current performance profile, or None if its planner mode needs none.

        Args:
            key: Namespace and name of the graph.
            graph: The parsed graph.

        Raises:
            ProfileError: the profile is missing or invalid.
            ClusterError: the API server refused the read, failed or did not answer.
        """
        spec = graph.spec
        if not self._plans_by_profile(spec):
            return None
        name = self._name_of(spec)
        if name is not None:
            return _fitting(await self._of_config_map(key, name), spec, name)
        if not spec.traits.is_simulated:
            raise ProfileError(
                PlannerReason.PROFILE_MISSING, f"spec.planner.sla.profile: null; {_what_to_run(key[1], '')}"
            )
        try:
            return self._engine_profile(spec)
        except ConfigError as exc:
            raise ProfileError(PlannerReason.PROFILE_INVALID, str(exc)) from exc

    def _plans_by_profile(self, spec: GraphSpec) -> bool:
        mode = self._mode or spec.planner.mode
        return spec.planner.enabled and mode == PlannerMode.SLA

    def _name_of(self, spec: GraphSpec) -> str | None:
        return self._named or spec.planner.sla.profile

    async def _of_config_map(self, key: Key, name: str) -> PerformanceProfile:
        field = f"spec.planner.sla.profile: ConfigMap {name}"
        try:
            data = (await _config_map(self._client, key[0], name)).get("data") or {}
        except NotFoundError as exc:
            message = f"{field} does not exist; {_what_to_run(key[1], name)}"
            raise ProfileError(PlannerReason.PROFILE_MISSING, message) from exc
        if PROFILE_KEY not in data:
            message = (
                f"{field} does not hold {PROFILE_KEY} yet; a ProfileRequest writes it when its Job "
                f"has ended, see kubectl get gpr; otherwise {_what_to_run(key[1], name)}"
            )
            raise ProfileError(PlannerReason.PROFILE_MISSING, message)
        try:
            return read_profile(data[PROFILE_KEY], origin=f"ConfigMap {name}: {PROFILE_KEY}")
        except ConfigError as exc:
            raise ProfileError(PlannerReason.PROFILE_INVALID, f"spec.planner.sla.profile: {exc}") from exc


async def memory_of(
    client: KubeClient, namespace: str, options: PlannerOptions, graph: GraphDeployment, *, has_ledger: bool
) -> Learned:
    """Return the learned state with which a graph's planner starts if its ledger (decision log) holds none.

    The state is a mapping by key of the policy that learned it. Returns an empty state if the graph does not set
    ``planner.memory``, which names a ConfigMap.

    Args:
        client: Kubernetes client.
        namespace: Namespace of the graph.
        options: Options of the planner.
        graph: The graph.
        has_ledger: Whether a ledger exists. The planner then continues from the ledger, and a missing ConfigMap is only
            logged.

    Raises:
        ConfigError: the ConfigMap does not exist, or does not hold learned state that was exported from a graph with
            the same model and workers.
        ClusterError: the ConfigMap cannot be read.
    """
    name = options.memory
    if name is None or options.mode not in LEARNING:
        return {}
    origin = f"spec.planner.memory: ConfigMap {name}"
    try:
        data = (await _config_map(client, namespace, name)).get("data") or {}
    except NotFoundError as exc:
        if has_ledger:
            log.warning("planner.memory does not exist: only the ledger is used", config_map=name)
            return {}
        raise ConfigError(f"{origin} does not exist; {_HOW_TO_EXPORT}") from exc
    if MEMORY_KEY not in data:
        raise ConfigError(f"{origin} does not hold {MEMORY_KEY}; {_HOW_TO_EXPORT}")
    return memory_in(data[MEMORY_KEY], f"{origin}: {MEMORY_KEY}", options, graph)


async def _config_map(client: KubeClient, namespace: str, name: str) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(READ_S):
            return await client.get(CONFIG_MAP, name, namespace=namespace)
    except TimeoutError as exc:
        raise UnavailableError(f"ConfigMap {name}: no answer within {READ_S:g} s") from exc


def _fitting(profile: PerformanceProfile, spec: GraphSpec, name: str) -> PerformanceProfile:
    """Return the profile if its model and GPU sizes are those of the graph; the graph may have changed since it was measured."""
    sizes = spec.engine_gpus
    if sizes is None:
        return profile
    try:
        check_fits(profile, model=spec.model.name, prefill_gpus=sizes[0], decode_gpus=sizes[1])
    except ConfigError as exc:
        message = f"spec.planner.sla.profile: ConfigMap {name}: {PROFILE_KEY}: {exc}"
        raise ProfileError(PlannerReason.PROFILE_INVALID, message) from exc
    return profile


def _what_to_run(graph: str, name: str) -> str:
    result = f", configMap: {name}" if name else " and name its ConfigMap"
    return f"apply a ProfileRequest with graph: {graph}{result}; until then nothing is scaled"
