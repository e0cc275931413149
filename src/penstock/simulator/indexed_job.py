"""Makes the Kubernetes objects of a sweep: an Indexed Job, each of whose pods runs a shard, and the files that they read. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from penstock.api.base import DNS_LABEL_PATTERN
from penstock.api.runtimes import PENSTOCK_IMAGE
from penstock.core.errors import ConfigError
from penstock.core.flags import check_bounds, flag
from penstock.kube.kinds import CONFIG_MAP, JOB
from penstock.simulator.plan import RunPlan
from penstock.simulator.scenario import ProfiledModel
from penstock.simulator.shards import Shard
from penstock.workload.synthetic import parse_synthetic
from penstock.workload.traces import Trace
from penstock_operator.resources.privileges import RESTRICTED, container_security
from penstock_operator.resources.profile import USAGE_EXIT

_MAIN: Final = "simulate"
_WORK: Final = "/work"
_RESULTS: Final = "/results"
_MOST_BYTES: Final = 1_000_000
"""Of all files in the ConfigMap. Source: kubernetes.io/docs/concepts/configuration/configmap, at most 1 MiB."""
_RETRIES: Final = 3
"""Of one shard; chosen: a pod that is killed for its memory this often is killed again."""
_LONGEST_NAME: Final = 57
"""Of a Job: its pods' host names add a hyphen and the index, and have at most 63 letters. Here up to 99,999 pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a sweep is run in a cluster."""

    render_job: str | None = flag(
        "Run nothing; print a Kubernetes Job of this name, as YAML for kubectl, whose pods run the sweep.",
        metavar="NAME",
        unset="the sweep runs here",
    )
    pods: int = flag("With --render-job: pods, of which each runs a share.", default=4, ge=1, le=99_999)
    claim: str | None = flag(
        "With --render-job: PersistentVolumeClaim of the results, which are in its folder NAME. ReadWriteMany, where pods "
        "run on several nodes.",
        unset="NAME",
    )
    image: str = flag("With --render-job: Penstock's image.", default=PENSTOCK_IMAGE)
    shard: Shard | None = flag(
        "Run only every COUNT-th run, from INDEX on, to a file of its own in --output-dir; the shard that ends last writes "
        "the result there.",
        metavar="INDEX/COUNT",
        convert=Shard.parse,
        form="INDEX/COUNT, from 0/COUNT on",
        unset="all",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in filter(None, (self.render_job, self.claim)):
            if len(name) > _LONGEST_NAME or re.match(DNS_LABEL_PATTERN, name) is None:
                raise ConfigError(
                    f"--render-job, --claim: {name!r} must be at most {_LONGEST_NAME} letters of a-z, 0-9 and -, "
                    "and begin and end with none of the last"
                )


def inputs_of(plan: RunPlan) -> list[str]:
    """Return what may be files that a plan's runs read: the trace and the latency profiles."""
    names: dict[str, None] = {}
    for spec in plan.runs:
        source = spec.workload.source
        synthetic = None if isinstance(source, Trace) else parse_synthetic(source)
        if synthetic is not None:
            source = synthetic.requests
        if isinstance(source, str):
            names[source] = None
        names |= {
            pool.model.profile: None for pool in spec.scenario.pools if isinstance(pool.model, ProfiledModel)
        }
    return list(names)


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A sweep in a cluster.

    Attributes:
        name: Of the Job, its ConfigMap and the claim's folder.
        arguments: Of `penstock simulate`, without what is said of the Job, as they were given.
        files: Content of the files that the arguments name, by the relative paths there.
        runs: Of the sweep; more pods than that are not started.
        processes: Of each pod.
    """

    name: str
    claim: str
    image: str
    pods: int
    runs: int
    processes: int
    arguments: Sequence[str]
    files: Mapping[str, bytes]

    @property
    def large(self) -> list[str]:
        """Files that must be on the claim, because a ConfigMap has no room: the largest ones."""
        found, total = [], sum(map(len, self.files.values()))
        for path in sorted(self.files, key=lambda path: -len(self.files[path])):
            if total > _MOST_BYTES:
                found.append(path)
                total -= len(self.files[path])
        return found

    def objects(self) -> list[dict[str, Any]]:
        """Return the Job, and before it the ConfigMap of its files, if there are any."""
        labels = {"name": "penstock-simulate", "instance": self.name}
        metadata = {
            "name": self.name,
            "labels": {f"app.kubernetes.io/{key}": each for key, each in labels.items()},
        }
        pods = min(self.pods, self.runs)
        never_right = {"containerName": _MAIN, "operator": "In", "values": [USAGE_EXIT]}
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": never_right},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        spec = {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimitPerIndex": _RETRIES,
            # Two pods of one index would write one file.
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": metadata["labels"]}, "spec": self._pod(pods)},
        }
        data = {self._key(path): self.files[path].decode() for path in self._small()}
        return [*([CONFIG_MAP.of(metadata, data=data)] if data else []), JOB.of(metadata, spec=spec)]

    def _small(self) -> list[str]:
        large = self.large
        return [path for path in self.files if path not in large]

    def _key(self, path: str) -> str:
        """Return a file's key in the ConfigMap, which takes no slashes and not every letter."""
        return f"file-{list(self.files).index(path)}"

    def _pod(self, pods: int) -> dict[str, Any]:
        volumes: list[dict[str, Any]] = [
            {"name": "results", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "tmp", "emptyDir": {}},
        ]
        if self._small():
            volumes.append({"name": "files", "configMap": {"name": self.name}})
        return {
            "restartPolicy": "Never",
            "containers": [self._container(pods)],
            "volumes": volumes,
            "automountServiceAccountToken": False,
            **RESTRICTED,
        }

    def _container(self, pods: int) -> dict[str, Any]:
        # A variable's place is Kubernetes'; what a user gave is text.
        given = [each.replace("$(", "$$(") for each in self.arguments]
        shard = ("--shard", f"$(JOB_COMPLETION_INDEX)/{pods}", "--output-dir", f"{_RESULTS}/{self.name}")
        mounts: list[dict[str, Any]] = [
            {"name": "results", "mountPath": _RESULTS},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
        ]
        for path in self.files:
            is_large = path in self.large
            volume, place = ("results", f"{self.name}/{path}") if is_large else ("files", self._key(path))
            mounts.append(
                {
                    "name": volume,
                    "mountPath": str(PurePosixPath(_WORK, path)),
                    "subPath": place,
                    "readOnly": True,
                }
            )
        return {
            "name": _MAIN,
            "image": self.image,
            "command": ["penstock"],
            "args": ["simulate", *given, "--jobs", str(self.processes), *shard],
            "workingDir": _WORK,
            "resources": {"requests": {"cpu": str(self.processes), "memory": f"{self.processes}Gi"}},
            "securityContext": container_security(is_root_read_only=True),
            "volumeMounts": mounts,
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
