"""Finds files that a graph names but its pods do not have, because they exist only on the author's machine. Pure.

The operator and `penstock render --kubernetes` refuse them; `penstock validate`, whose graph may be a local one,
warns. A custom image may contain any file, and so may a podTemplate's volume. Files that the planner reads are
ConfigMaps on Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from penstock.api import GraphDeployment
from penstock.api.engine import PROFILE_SUFFIX
from penstock.core.errors import ManifestProblem
from penstock.kube.kinds import DEPLOYMENT
from penstock.kube.objects.names import SERVICE_LABEL
from penstock_operator.resources.node_pool import TEMPORARY
from penstock_operator.resources.overlay import MAIN

_SIMULATED: Final = "simulated"
"""Value of ``router.tokenizer`` that is not a file."""

_OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Matches the names of Kubernetes objects such as ConfigMaps; it also accepts two consecutive dots."""


class _File(NamedTuple):
    """Key of the graph that names a file or folder, its path, and a remedy to mention before that of mounting it."""

    key: str
    path: str
    remedy: str = ""


def absent_files(graph: GraphDeployment, objects: Iterable[Mapping[str, Any]]) -> Iterator[ManifestProblem]:
    """Yield a problem for each manifest key of a graph whose value is a file that a pod lacks, or an invalid name of a ConfigMap.

    Args:
        graph: A valid graph.
        objects: Child objects of the graph, whose pod templates show the mounted volumes.
    """
    found: dict[str, ManifestProblem] = {}
    for each in objects:
        if each["kind"] == DEPLOYMENT.kind:
            service = each["metadata"]["labels"][SERVICE_LABEL]
            for problem in _of_service(graph, service, each["spec"]["template"]["spec"]):
                found.setdefault(problem.path, problem)
    yield from found.values()
    planner = graph.spec.planner
    for key, name in (("memory", planner.memory), ("sla.profile", planner.sla.profile)):
        if planner.enabled and name is not None and _OBJECT_NAME.fullmatch(name) is None:
            message = f"{name} is not a ConfigMap's name, which it is on Kubernetes; make one of the file and name it"
            yield ManifestProblem(f"spec.planner.{key}", message)


def _of_service(graph: GraphDeployment, service: str, pod: Mapping[str, Any]) -> Iterator[ManifestProblem]:
    spec = graph.spec.services[service]
    (main,) = [each for each in pod["containers"] if each["name"] == MAIN]
    own_image = None if graph.spec.needs_router_image(spec) else graph.spec.image
    if spec.image is not None or own_image is not None or _patches_image(spec.pod_template):
        return
    mounts = _mounts(pod, main)
    for file in _of_worker(graph, service) if spec.role.is_worker else _of_router(graph):
        path = PurePosixPath(main.get("workingDir", TEMPORARY)) / file.path  # the image's working folder
        if not any(path.is_relative_to(each) for each in mounts):
            message = (
                f"{file.path} is not in the pods of service {service}; {file.remedy}mount it by that service's "
                "podTemplate, or name an image that holds it"
            )
            yield ManifestProblem(f"spec.{file.key}", message)


def _mounts(pod: Mapping[str, Any], main: Mapping[str, Any]) -> list[str]:
    """Return the paths at which the main container has volumes that can contain files when it starts."""
    empty = {each["name"] for each in pod.get("volumes", ()) if "emptyDir" in each}
    is_filled = bool(pod.get("initContainers"))
    return [
        each["mountPath"] for each in main.get("volumeMounts", ()) if is_filled or each["name"] not in empty
    ]


def _patches_image(pod_template: Mapping[str, Any]) -> bool:
    containers = pod_template.get("spec", {}).get("containers", ())
    return any(each["name"] == MAIN and "image" in each for each in containers)


def _of_router(graph: GraphDeployment) -> Iterator[_File]:
    """Yield the files that Penstock's router reads; a Secret takes precedence over a file with the same keys."""
    router = graph.spec.router
    if graph.spec.traits.frontend is not None:
        return
    if router.auth.api_keys_file is not None and router.auth.api_keys_secret is None:
        yield _File("router.auth.apiKeysFile", router.auth.api_keys_file, "name a Secret in apiKeysSecret, ")
    tiers = router.tiers
    if tiers.enabled and tiers.keys_file is not None and tiers.keys_secret is None:
        yield _File("router.tiers.keysFile", tiers.keys_file, "name a Secret in keysSecret, ")
    if router.tokenizer not in {None, _SIMULATED}:
        yield _File("router.tokenizer", str(router.tokenizer))


def _of_worker(graph: GraphDeployment, service: str) -> Iterator[_File]:
    """Yield the files that a worker reads. Of model and adapter names, only those that cannot be names on a hub are included."""
    spec, engine = graph.spec.services[service], graph.spec.engine
    if graph.spec.traits.is_simulated:
        for key, profile in (
            (f"services.{service}.profile", spec.profile),
            ("engine.profile", engine.profile),
        ):
            if profile is not None:
                if profile.endswith(PROFILE_SUFFIX):
                    yield _File(key, profile)
                return
    cache = "mount it by a nodePool's cacheMount, "
    if graph.spec.model.name.startswith("/"):
        yield _File("model.name", graph.spec.model.name, cache)
    for index, adapter in enumerate(graph.spec.model.adapters):
        if adapter.path.startswith("/"):
            yield _File(f"model.adapters[{index}].path", adapter.path, cache)
    if engine.python_environment is not None:
        yield _File("engine.pythonEnvironment", engine.python_environment)
