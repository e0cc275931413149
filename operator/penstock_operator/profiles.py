"""Reconciles ProfileRequests: validates, builds, applies, watches the Job and reports. Has its own queue, apart from the graphs'.

Each request is measured only once: its objects are applied until its Job exists, then the Job is only watched, and
after the request has ended its objects are not changed any more. The decisions are in `plan.profile`, the objects in
`resources.profile`. All objects have owner references, so Kubernetes deletes them together with the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.api import GraphDeployment, ProfilePhase, ProfileRequest, dotted
from penstock.api.manifests.validation import template_of, validated
from penstock.core.errors import InvalidSpecError, ManifestProblem, NotFoundError, one_line
from penstock.core.logs import get_logger
from penstock.core.stamps import stamp
from penstock.kube.events import EventMessage
from penstock.kube.informer import Informer, key_of
from penstock.kube.kinds import CONFIG_MAP, JOB, POD
from penstock.kube.objects.names import PROFILE_LABEL, profile_name
from penstock_operator.apply import Applied, Owner
from penstock_operator.plan.drift import with_content_digest
from penstock_operator.plan.pods import pod_view
from penstock_operator.plan.profile import Outcome, ended, outcome, request_status
from penstock_operator.queue import Key, RateLimits, WorkQueue, serve
from penstock_operator.reconcile import Dependencies
from penstock_operator.resources.profile import profile_objects
from penstock_operator.trim import Object, trim_child
from penstock_operator.workloads import is_own

WAIT_S: Final = 5.0
"""Seconds between two reconciles of a request that waits for its graph or for the deletion of an earlier request's
objects. Chosen."""

WATCH_S: Final = 15.0
"""Seconds between two reconciles while the Job runs, because some problems show only by their duration. Chosen."""

WORKERS: Final = 2
"""Number of requests reconciled at the same time. Chosen: requests are few, and each needs only a handful of writes."""

log = get_logger(__name__)


class Profiles:
    """Watches and reconciles all ProfileRequests in a namespace or in the cluster.

    A ProfileRequest asks for a measurement of a graph's engine; the operator runs it as a Job and reports its result
    in the request's status.
    """

    def __init__(self, parts: Dependencies, *, namespace: str | None, limits: RateLimits) -> None:
        self._parts = parts
        self.queue = WorkQueue(limits)
        self._requests: dict[Key, Object] = {}
        self._jobs = self._informer(JOB, namespace)
        self._pods = self._informer(POD, namespace)

    async def run(self) -> None:
        """Watch Jobs and pods, and reconcile ProfileRequests, until cancelled; the requests come through `report` and `remove`."""
        async with asyncio.TaskGroup() as group:
            for informer in (self._jobs, self._pods):
                group.create_task(informer.run())
            await self._jobs.synced.wait()  # otherwise an existing Job would be created again
            group.create_task(serve(self.queue, self.reconcile, workers=WORKERS), name="profile requests")

    def report(self, request: Object) -> None:
        """Store a ProfileRequest, as received from the API server, in the in-memory view, and enqueue it for a reconcile."""
        key = key_of(request)
        self._requests[key] = _trimmed(request)
        self._enqueue(key)

    def remove(self, request: Object) -> None:
        """Remove a deleted ProfileRequest from the in-memory view; a newer one that has its name but another UID remains."""
        key = key_of(request)
        held = self._requests.get(key)
        if held is not None and held["metadata"]["uid"] == request["metadata"]["uid"]:
            del self._requests[key]

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one ProfileRequest; return the wall-clock seconds until the next reconcile, or None if only a change requires one."""
        raw = self._requests.get(key)
        if raw is None or raw["metadata"].get("deletionTimestamp"):
            return None
        status = raw.get("status") or {}
        if status.get("phase") in {ProfilePhase.SUCCEEDED, ProfilePhase.FAILED}:
            return None
        job = self._jobs.objects.get((key[0], profile_name(key[1])))
        if job is not None and not is_own(job, raw["metadata"]["uid"]):
            job = None  # it belongs to an earlier request of this name; the garbage collector deletes it
        found = await (self._prepare(key, raw) if job is None else self._observe(key, raw, job))
        try:
            await self._report(raw, found, job)
        except NotFoundError:  # deleted while kopf's watch was broken; Kubernetes deletes its objects
            self._requests.pop(key, None)
            return None
        if found.phase.is_final:
            return None
        return WAIT_S if found.phase is ProfilePhase.PENDING else WATCH_S

    async def _prepare(self, key: Key, raw: Object) -> Outcome:
        """Apply the request's other objects, and after them its Job."""
        request, problems = validated(ProfileRequest, raw)
        if request is None:
            return Outcome(ProfilePhase.FAILED, "InvalidSpec", one_line(problems))
        graph, waiting = self._graph(key[0], request)
        if graph is None:
            return waiting
        owner = Owner(raw["metadata"]["uid"], request.name, kind=request.kind)
        allowed = await self._parts.allowances.of(key[0])
        context = replace(self._parts.context, owner_uid=owner.uid, namespace=key[0], allowed=allowed)
        try:
            *before, job = map(with_content_digest, profile_objects(request, graph, context))
        except InvalidSpecError as exc:
            return Outcome(ProfilePhase.FAILED, "InvalidSpec", one_line(exc.problems))
        for stage in (before, [job]):
            applied = await self._parts.applier.apply(stage, {}, owner)
            if (problem := _problem(applied)) is not None:
                return problem
        return Outcome(
            ProfilePhase.PROFILING, "Starting", f"Job {job['metadata']['name']} is starting its pod"
        )

    def _graph(self, namespace: str, request: ProfileRequest) -> tuple[GraphDeployment | None, Outcome]:
        """Return the graph to measure, or None, and the outcome to report if it is None."""
        name = request.spec.graph
        if name is None:
            found, model = template_of(request)
            message = one_line(ManifestProblem(path=dotted(path), message=message) for path, message in found)
            return model, Outcome(ProfilePhase.FAILED, "InvalidSpec", message)
        raw = self._parts.cluster.snapshot((namespace, name)).graph
        if raw is None:
            message = f"GraphDeployment {name} does not exist; create it, or use template instead of graph"
            return None, Outcome(ProfilePhase.PENDING, "GraphMissing", message)
        graph, problems = validated(GraphDeployment, raw)
        return graph, Outcome(ProfilePhase.PENDING, "GraphInvalid", one_line(problems))

    async def _observe(self, key: Key, raw: Object, job: Object) -> Outcome:
        name = _config_map(raw)
        pods = [
            pod_view(each)
            for each in self._pods.objects.values()
            if (each["metadata"]["namespace"], each["metadata"]["labels"][PROFILE_LABEL]) == key
        ]
        result = await self._result(key[0], name) if ended(job) is not None else None
        return outcome(job, pods, result, name, now_s=self._parts.now_s())

    async def _result(self, namespace: str, name: str) -> Mapping[str, str] | None:
        try:
            found = await self._parts.client.get(CONFIG_MAP, name, namespace=namespace)
        except NotFoundError:
            return None
        data: Mapping[str, str] = found.get("data") or {}
        return data

    async def _report(self, raw: Object, found: Outcome, job: Object | None) -> None:
        old = raw.get("status") or {}
        metadata = raw["metadata"]
        status = request_status(
            found,
            generation=metadata.get("generation", 0),
            job=job,
            config_map=_config_map(raw),
            old=old,
            now=stamp(self._parts.now_s()),
        )
        if await self._parts.applier.status(raw, status) and old.get("phase") != found.phase.value:
            namespace, name = key_of(raw)
            log.info("profile request", namespace=namespace, name=name, phase=found.phase.value)
            is_bad = found.phase is ProfilePhase.FAILED
            message = EventMessage(f"Profile{found.phase.value}", found.message, "Profile", is_warning=is_bad)
            await self._parts.recorder.emit(raw, message)

    def _informer(self, kind: Any, namespace: str | None) -> Informer:
        return Informer(
            self._parts.client,
            kind,
            namespace=namespace,
            labels=PROFILE_LABEL,
            on_change=lambda _change, obj: self._enqueue(
                (obj["metadata"]["namespace"], obj["metadata"]["labels"][PROFILE_LABEL])
            ),
        )

    def _enqueue(self, key: Key) -> None:
        if key in self._requests:
            self.queue.enqueue(key)


def _trimmed(obj: Object) -> Object:
    trimmed = trim_child(obj)
    return {**trimmed, "status": obj["status"]} if "status" in obj else trimmed


def _config_map(raw: Object) -> str:
    """Return the name of the ConfigMap that receives a request's result."""
    return str(raw["spec"].get("configMap") or raw["metadata"]["name"])


def _problem(applied: Applied) -> Outcome | None:
    """Return the outcome that says what blocks a request; None if nothing does."""
    if applied.terminating:
        message = f"objects of an earlier request of this name are being deleted: {', '.join(sorted(applied.terminating))}"
        return Outcome(ProfilePhase.PENDING, "Replacing", message)
    if applied.failure is not None:
        return Outcome(ProfilePhase.PENDING, *applied.failure)
    # The Job is applied only once, so everything that its pod needs must exist before.
    passing = applied.refusals.found
    return Outcome(ProfilePhase.PENDING, passing[0].kind.value, str(passing[0])) if passing else None
