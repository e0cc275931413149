"""Writes a graph's child objects: creates absent ones, applies those that differ, and skips those that are right.

An absent child is created by POST, which fails if an object of another owner already has its name. The child's first
change converts it to server-side apply. Therefore no object of another owner is ever overwritten, even if that object
appears between two reads. Called only by `penstock_operator.reconcile`, `penstock_operator.profiles` and the modules
that they use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.errors import ClusterError, ConflictError, InvalidObjectError, NotFoundError
from penstock.core.logs import get_logger
from penstock.core.lru_cache import LruCache
from penstock.kube.client import KubeClient
from penstock.kube.kinds import GRAPH_DEPLOYMENT, ROLE_BINDING, SCALING_ADAPTER, kind_of
from penstock.kube.objects.names import APPLIED_ANNOTATION, INITIAL, OPERATOR
from penstock.kube.objects.refusals import Refusals
from penstock_operator.metrics import OperatorMetrics
from penstock_operator.plan.drift import FieldDifference, differences
from penstock_operator.plan.status import is_current
from penstock_operator.plan.status_input import Failure
from penstock_operator.trim import POSTED, VERSION, Object, is_posted, version_of
from penstock_operator.workloads import GENERATION_ANNOTATION, WORKLOADS

PARALLEL: Final = 4
"""Maximum number of concurrent writes for one graph. Chosen: a new graph's children take five round trips, and a
thousand graphs that are reconciled at the same time do not overload the API server."""

_SEQUENTIAL: Final = WORKLOADS | {ROLE_BINDING.kind}
"""Kinds that are written last and one after another. The API server compares a RoleBinding's Role with the writer's
own rights in a cache that lags behind its writes; directly after the Role is written it would answer 404."""

_REPLICAS: Final[Mapping[str, Any]] = {"f:spec": {"f:replicas": {}}}

_WRITTEN_TOGETHER: Final = frozenset({f"metadata.annotations.[{GENERATION_ANNOTATION}]"})
"""Paths that are written together with the fields that they describe. A difference in these paths alone causes no
write."""

COMPARED: Final = 4000
"""Maximum number of children whose last comparison is cached until they change. Chosen: the children of about 200
graphs, one megabyte."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The object that owns the children that an `Applier` writes: a GraphDeployment, or another kind such as ProfileRequest.

    Attributes:
        uid: UID of the owner; a child belongs to it if its controller reference has this UID.
        name: Name of the owner.
        kind: Kind of the owner.
        first_replicas: Initial ``spec.replicas`` of ScalingAdapters that do not exist yet, by the adapter's name; 1 for
            an adapter that is not listed.
    """

    uid: str
    name: str
    kind: str = GRAPH_DEPLOYMENT.kind
    first_replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Applied:
    """Result of writing the children (objects that the operator creates) of one owner.

    Attributes:
        wrote: Whether any child was created or changed.
        repaired: ``Kind name: difference`` of children that another writer had changed or deleted and that were
            restored.
        conflicts: Messages about children that were not written because an object of another owner has their name.
        terminating: ``Kind name`` of children that were not written because an object of that name is being deleted; a
            later reconcile creates them.
        refusals: Writes that the API server rejected.
    """

    wrote: bool = False
    repaired: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    terminating: list[str] = field(default_factory=list)
    refusals: Refusals = field(default_factory=Refusals)

    @property
    def failure(self) -> Failure | None:
        """Return the failure for the owner's status: the name conflicts or, without any, the rejected writes that a retry cannot mend.

        Returns None if there are neither.
        """
        return failure_of(self.conflicts, self.refusals)


def failure_of(conflicts: Sequence[str], refusals: Refusals) -> Failure | None:
    """Return the failure for a status: the name conflicts or, without any, the rejected writes that a retry cannot mend; else None.

    Args:
        conflicts: Messages about names that objects of other owners have.
        refusals: Rejected writes; those that a retry can mend, such as version conflicts, are ignored.
    """
    if conflicts:
        return Failure("NameConflict", "; ".join(sorted(conflicts)))
    if permanent := refusals.permanent:
        return Failure(permanent[0].kind.value, "; ".join(map(str, permanent)))
    return None


class Applier:
    """Writes desired objects to the cluster.

    It caches the last comparison of each object with its desired state, so that an unchanged pair is not compared
    again. It also caches the field values that an admission webhook sets after every write, so that they do not count
    as differences. The methods of the class raise ClusterError if the API server refuses or fails, unless stated
    otherwise.
    """

    def __init__(
        self, client: KubeClient, metrics: OperatorMetrics, *, on_written: Callable[[Object], None]
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._on_written = on_written
        self._tolerated: dict[tuple[str, str, str], tuple[str, frozenset[str]]] = {}
        self._unchanged: LruCache[tuple[str, str, str], tuple[str, int]] = LruCache(COMPARED)

    async def apply(
        self,
        desired: Iterable[Object],
        live: Mapping[tuple[str, str], Object],
        owner: Owner,
        *,
        refusals: Refusals | None = None,
    ) -> Applied:
        """Create the desired objects that are absent, and apply those that differ from the cluster.

        RoleBindings and workloads are written last and one by one, all other kinds before them and in parallel.

        Children of another owner are not changed; they are reported in `Applied.conflicts`.

        Args:
            desired: Desired objects, each with a digest of its content in the annotation ``penstock.dev/applied``,
                which `drift.with_content_digest` sets.
            live: Existing objects by (kind, name).
            owner: Object that owns the children.
            refusals: Collects the writes that the API server rejects, so that the other objects are still written. If
                None, a new collection is created; it is in `Applied.refusals`.

        Returns:
            What was written, and which objects could not be written.

        Raises:
            ClusterError: The API server does not answer.
        """
        found = Applied(refusals=refusals or Refusals())
        stages: tuple[list[Object], list[Object]] = ([], [])
        for each in desired:
            stages[each["kind"] in _SEQUENTIAL].append(each)
        slots = asyncio.Semaphore(PARALLEL)

        async def one(child: Object) -> None:
            async with slots:
                await self._one(child, live.get((child["kind"], child["metadata"]["name"])), owner, found)

        todo = [each for each in stages[0] if self._differs(each, live, owner)]
        if todo:
            await _all([one(each) for each in todo])
        for each in stages[1]:
            await one(each)
        return found

    async def status(self, obj: Object, status: Mapping[str, Any]) -> bool:
        """Write ``status`` as the status of ``obj`` by server-side apply, unless ``obj`` already has it; return whether it was written."""
        if is_current(status, obj.get("status") or None):
            return False
        head = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
        body = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": head, "status": status}
        call = self._client.apply(body, field_manager=OPERATOR, subresource="status")
        await self._written("status", call, obj)
        return True

    async def create_once(self, obj: Object) -> bool:
        """Create an object of a kind that the operator does not watch, such as a Secret; return whether it was created.

        If an object of this name already exists, leave it unchanged and return False.
        """
        call = self._client.create(obj, field_manager=OPERATOR)
        return await self._counted("create", call, obj["kind"], ConflictError) is not None

    async def patch(self, obj: Object, patch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Object:
        """Patch the object that has the kind, name and namespace of ``obj``, and return the result.

        If ``patch`` is a list, it is sent as a JSON patch (RFC 6902), else as a merge patch (RFC 7386).
        """
        metadata = obj["metadata"]
        call = self._client.patch(
            kind_of(obj), metadata["name"], patch, namespace=metadata["namespace"], field_manager=OPERATOR
        )
        return await self._written("patch", call, obj)

    async def delete(self, obj: Object, *, grace_s: int | None = None) -> None:
        """Delete an object if it still has the UID of ``obj``; do nothing if it is absent or has been replaced.

        Args:
            obj: Object to delete.
            grace_s: Termination grace period of a pod in seconds; None uses the pod's own.
        """
        metadata = obj["metadata"]
        self._unchanged.forget(_key(obj))
        call = self._client.delete(
            kind_of(obj),
            metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata.get("uid"),
            grace_s=grace_s,
        )
        await self._counted("delete", call, obj["kind"], NotFoundError, ConflictError)

    def forget(self, namespace: str, names: Iterable[tuple[str, str]]) -> None:
        """Drop the cached comparisons of deleted objects in ``namespace`` with their desired state.

        ``names`` are pairs of kind and name; objects without a cached comparison are ignored.
        """
        for kind, name in names:
            self._tolerated.pop((namespace, kind, name), None)
            self._unchanged.forget((namespace, kind, name))

    def _differs(self, desired: Object, live: Mapping[tuple[str, str], Object], owner: Owner) -> bool:
        """Return whether an object is absent, not owned by ``owner``, or different; cheap in the usual case that nothing changed."""
        existing = live.get((desired["kind"], desired["metadata"]["name"]))
        return (
            existing is None
            or _ownership_problem(existing, owner) is not None
            or bool(self.differences(desired, existing))
        )

    def differences(self, desired: Object, existing: Object) -> list[FieldDifference]:
        """Return the fields in which ``existing``, an object in the cluster, differs from the desired object ``desired``.

        Returns an empty list if there are none. ``desired`` must have a digest of its content in the annotation
        ``penstock.dev/applied``. Fields that an admission webhook set to another value after the last write are not
        reported, until the desired object changes.
        """
        key, compared = _key(desired), (_digest(desired), int(existing.get(VERSION, 0)))
        if compared[1] and self._unchanged.get(key) == compared:
            return []
        digest, paths = self._tolerated.get(key, ("", frozenset()))
        # The desired object may have changed since the last apply; fields that a webhook sets differ in the live
        # object as well, and must not start a rollout.
        tolerated = _WRITTEN_TOGETHER | (
            paths if digest in {_digest(desired), _digest(existing)} else frozenset()
        )
        found = [each for each in differences(desired, existing) if each.path not in tolerated]
        if not found:
            self._unchanged.put(key, compared)
        return found

    async def _one(self, desired: Object, existing: Object | None, owner: Owner, found: Applied) -> None:
        name = name_of(desired)
        with found.refusals.of(name, "Apply"):
            if existing is None:
                known = self._unchanged.get(_key(desired))
                existing = await self._create(desired, owner)
                if existing is None:
                    found.wrote = True
                    if known is not None and known[0] == _digest(desired):
                        found.repaired.append(f"{name}: was deleted")
                    return
            problem = _ownership_problem(existing, owner)
            if problem == _TERMINATING:
                found.terminating.append(name)
            elif problem is not None:
                found.conflicts.append(f"{name} {problem}")
            else:
                await self._update(desired, existing, name, found)

    async def _create(self, desired: Object, owner: Owner) -> Object | None:
        """Create an object; return the existing object of that name, or None if there was none and the object was created."""
        body, manager = desired, OPERATOR
        if desired["kind"] == SCALING_ADAPTER.kind:
            number = owner.first_replicas.get(desired["metadata"]["name"], 1)
            body, manager = {**desired, "spec": {**desired["spec"], "replicas": number}}, INITIAL
        metadata = desired["metadata"]
        try:
            answer = await self._written("create", self._client.create(body, field_manager=manager), desired)
        except ConflictError:
            with suppress(NotFoundError):
                return await self._client.get(
                    kind_of(desired), metadata["name"], namespace=metadata["namespace"]
                )
            # The object that had the name is gone; if another one takes the name, the error is a conflict, which is retried.
            answer = await self._written("create", self._client.create(body, field_manager=manager), desired)
        except NotFoundError as exc:
            # The cluster does not know the kind of this child; the other children can still be created.
            raise InvalidObjectError(f"{exc}; is its CustomResourceDefinition installed?") from exc
        self._record_webhook_changes(desired, answer)
        return None

    async def _update(self, desired: Object, existing: Object, name: str, found: Applied) -> None:
        drift = next(map(str, self.differences(desired, existing)), None)
        if drift is None:
            return
        if existing.get(POSTED, "managedFields" in existing["metadata"]):
            await self._take_over(desired)
        known = self._unchanged.get(_key(desired))
        is_kept = known is not None and known[0] == _digest(desired)
        answer = await self._apply(desired)
        self._record_webhook_changes(desired, answer)
        found.wrote = True
        # A second operator or `kubectl rollout undo` also changes the digest; `is_kept` shows that the object was right.
        if is_kept or _digest(existing) == _digest(desired):
            found.repaired.append(f"{name}: {drift}")
        log.info("child applied", child=name, namespace=desired["metadata"]["namespace"], drift=drift)

    async def _apply(self, desired: Object) -> Object:
        """Apply an object; if that is rejected because another writer changed the key of a list entry, replace the lists first.

        Server-side apply adds the entry under its own key next to the changed one, and the API server rejects, for
        example, a Service with two ports of one name.
        """
        try:
            return await self._written("apply", self._client.apply(desired, field_manager=OPERATOR), desired)
        except InvalidObjectError:
            content = {key: each for key, each in desired.items() if key not in _HEAD}
            if not _has_lists(content):
                raise
            await self.patch(desired, content)
            await self._take_over(desired)
            return await self._written("apply", self._client.apply(desired, field_manager=OPERATOR), desired)

    async def _take_over(self, desired: Object) -> None:
        """Transfer the fields that a POST owns to server-side apply, so that a later apply removes fields that are no longer desired.

        The csaupgrade package of client-go does the same for objects created by client-side apply. The field manager
        that created a ScalingAdapter keeps only ``spec.replicas``.
        """
        kind, metadata = kind_of(desired), desired["metadata"]
        live = await self._client.get(kind, metadata["name"], namespace=metadata["namespace"])
        entries = live["metadata"].get("managedFields", [])
        posted = [each for each in entries if is_posted(each)]
        if not posted:
            return
        changed = [each for each in entries if each not in posted]
        has_applied = any(
            (each.get("manager"), each.get("operation"), each.get("subresource")) == (OPERATOR, "Apply", None)
            for each in entries
        )
        for each in posted:
            fields = dict(each.get("fieldsV1", {}))
            if each["manager"] == INITIAL and "f:replicas" in fields.get("f:spec", {}):
                changed.append({**each, "fieldsV1": _REPLICAS})
                fields["f:spec"] = {key: one for key, one in fields["f:spec"].items() if key != "f:replicas"}
            if not has_applied:
                posted_as = {"manager": OPERATOR, "operation": "Apply"}
                changed.append({**each, **posted_as, "fieldsV1": fields})
        replaced = {"managedFields": changed, "resourceVersion": live["metadata"]["resourceVersion"]}
        patch = [
            {"op": "replace", "path": f"/metadata/{key}", "value": value} for key, value in replaced.items()
        ]
        await self.patch(desired, patch)

    def _record_webhook_changes(self, desired: Object, answer: Object) -> None:
        """Store the paths that differ directly after an apply: an admission webhook sets another value there."""
        key = _key(desired)
        paths = frozenset(each.path for each in differences(desired, answer))
        if paths:
            self._tolerated[key] = (_digest(desired), paths)
            log.warning("the cluster keeps other values", child="/".join(key), paths=sorted(paths))
        else:
            self._tolerated.pop(key, None)
            self._unchanged.put(key, (_digest(desired), version_of(answer["metadata"])))

    async def _written(self, verb: str, call: Any, obj: Object) -> Object:
        answer: Object = await self._counted(verb, call, obj["kind"])
        self._on_written(answer)
        return answer

    async def _counted(self, verb: str, call: Any, kind: str, *fine: type[ClusterError]) -> Any:
        """Await a write and count it; return None without counting if it raises one of the exceptions in ``fine``."""
        try:
            answer = await call
        except fine:
            return None
        except ClusterError as exc:
            self._metrics.write_errors.labels(kind, type(exc).__name__).inc()
            raise
        self._metrics.writes.labels(kind, verb).inc()
        return answer


_HEAD: Final = frozenset({"apiVersion", "kind", "metadata", "status"})

_TERMINATING: Final = "is being deleted"


def _ownership_problem(existing: Object, owner: Owner) -> str | None:
    """Return why an object must not be written now; None if ``owner`` controls it, or if it is an orphaned child of the operator."""
    metadata = existing["metadata"]
    if metadata.get("deletionTimestamp"):
        return _TERMINATING
    held_by = next((each for each in metadata.get("ownerReferences", ()) if each.get("controller")), None)
    if held_by is None:
        is_lost = APPLIED_ANNOTATION in metadata.get("annotations", {})
        return None if is_lost else f"exists and is not owned by a {owner.kind}; delete or rename it"
    if held_by.get("uid") == owner.uid:
        return None
    if (held_by.get("kind"), held_by.get("name")) == (owner.kind, owner.name):
        return _TERMINATING  # it belongs to an earlier owner of this name; the garbage collector deletes it
    return f"belongs to {held_by.get('kind')} {held_by.get('name')}; delete or rename it"


def name_of(obj: Object) -> str:
    """Return an object's kind and name as messages show them, such as ``Deployment chat-decode``."""
    return f"{obj['kind']} {obj['metadata']['name']}"


def _has_lists(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_lists, value.values()))
    return isinstance(value, list)


def _key(obj: Object) -> tuple[str, str, str]:
    metadata = obj["metadata"]
    return metadata["namespace"], obj["kind"], metadata["name"]


def _digest(obj: Object) -> str:
    return str(obj["metadata"].get("annotations", {}).get(APPLIED_ANNOTATION, ""))


async def _all(calls: Sequence[Any]) -> None:
    """Await all calls; if one fails, cancel the others and raise its error.

    A TaskGroup is not used: before Python 3.11.3, a TaskGroup that fails leaves its cancellation on the task that
    continues.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
