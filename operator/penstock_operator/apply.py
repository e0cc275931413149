"""Writes children: creates absent ones, applies drifted ones, and skips correct ones.

An absent child is created by POST, which fails if another owner's object has its name, and is taken over by
server-side apply at its first change; so no foreign object is ever overwritten, not even between two reads.
Called by `penstock_operator.reconcile` alone.
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
"""Writes of one graph at once. Chosen: a new graph's children take five round trips, and a thousand graphs that are
worked on at once do not flood the server."""

_IN_TURN: Final = WORKLOADS | {ROLE_BINDING.kind}
"""Written last and one by one. The API server compares a RoleBinding's Role with the writer's own rights in a copy
that lags behind its writes; right after the Role it would answer 404."""

_NUMBER: Final[Mapping[str, Any]] = {"f:spec": {"f:replicas": {}}}

_SAID_BESIDE: Final = frozenset({f"metadata.annotations.[{GENERATION_ANNOTATION}]"})
"""Paths that are written with what they are about, and make no difference by themselves."""

COMPARED: Final = 4000
"""Children whose last comparison is remembered, until they change. Chosen: those of some 200 graphs, a megabyte."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The object whose children are applied, and the number that a ScalingAdapter is created with, by its name."""

    uid: str
    name: str
    kind: str = GRAPH_DEPLOYMENT.kind
    first_replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Applied:
    """What came of applying a graph's children.

    Attributes:
        repaired: ``Kind name: what differed`` of those changed by another writer.
        conflicts: Names taken by objects of others, as text.
        leaving: ``Kind name`` of children of the same name that are being deleted; they come back afterwards.
        refusals: Those that the API server did not take.
    """

    wrote: bool = False
    repaired: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    refusals: Refusals = field(default_factory=Refusals)

    @property
    def failure(self) -> Failure | None:
        """Return what keeps the children from their desired state; None: nothing."""
        return failure_of(self.conflicts, self.refusals)


def failure_of(conflicts: Sequence[str], refusals: Refusals) -> Failure | None:
    """Return what names taken by others, as text, and refused writes keep from being done; None: nothing."""
    if conflicts:
        return Failure("NameConflict", "; ".join(sorted(conflicts)))
    if lasting := refusals.lasting:
        return Failure(lasting[0].kind.value, "; ".join(map(str, lasting)))
    return None


class Applier:
    """Applies the desired objects to the cluster; remembers only what the server insists on.

    Its methods raise ClusterError where the server refuses or fails.
    """

    def __init__(
        self, client: KubeClient, metrics: OperatorMetrics, *, on_written: Callable[[Object], None]
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._on_written = on_written
        self._tolerated: dict[tuple[str, str, str], tuple[str, frozenset[str]]] = {}
        self._right: LruCache[tuple[str, str, str], tuple[str, int]] = LruCache(COMPARED)

    async def apply(
        self,
        desired: Iterable[Object],
        live: Mapping[tuple[str, str], Object],
        owner: Owner,
        *,
        refusals: Refusals | None = None,
    ) -> Applied:
        """Create or apply absent or drifted objects: all others first, then the RoleBinding and workloads in turn.

        The desired objects are `stamped`. Children of another owner than the given one are left alone.

        Raises:
            ClusterError: the server does not answer; an object that it does not take is among the refusals, so that
                the others are written.
        """
        found = Applied(refusals=refusals or Refusals())
        stages: tuple[list[Object], list[Object]] = ([], [])
        for each in desired:
            stages[each["kind"] in _IN_TURN].append(each)
        slots = asyncio.Semaphore(PARALLEL)

        async def one(want: Object) -> None:
            async with slots:
                await self._one(want, live.get((want["kind"], want["metadata"]["name"])), owner, found)

        todo = [each for each in stages[0] if self._differs(each, live, owner)]
        if todo:
            await _all([one(each) for each in todo])
        for each in stages[1]:
            await one(each)
        return found

    async def status(self, obj: Object, status: Mapping[str, Any]) -> bool:
        """Apply an object's status unless it says that already; return whether it said something new."""
        if is_current(status, obj.get("status") or None):
            return False
        head = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
        said = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": head, "status": status}
        call = self._client.apply(said, field_manager=OPERATOR, subresource="status")
        await self._written("status", call, obj)
        return True

    async def create_once(self, obj: Object) -> bool:
        """Create an object that no watch shows; return False if there is one, which stays as it is."""
        call = self._client.create(obj, field_manager=OPERATOR)
        return await self._counted("create", call, obj["kind"], ConflictError) is not None

    async def patch(self, obj: Object, patch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Object:
        """Patch an object that has kind and metadata: JSON patch for a list, else merge patch."""
        metadata = obj["metadata"]
        call = self._client.patch(
            kind_of(obj), metadata["name"], patch, namespace=metadata["namespace"], field_manager=OPERATOR
        )
        return await self._written("patch", call, obj)

    async def delete(self, obj: Object, *, grace_s: int | None = None) -> None:
        """Delete an object if it is still this one; a pod is given ``grace_s``, None leaves its own."""
        metadata = obj["metadata"]
        self._right.forget(_key(obj))
        call = self._client.delete(
            kind_of(obj),
            metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata.get("uid"),
            grace_s=grace_s,
        )
        await self._counted("delete", call, obj["kind"], NotFoundError, ConflictError)

    def forget(self, namespace: str, names: Iterable[tuple[str, str]]) -> None:
        """Forget children, given by kind and name."""
        for kind, name in names:
            self._tolerated.pop((namespace, kind, name), None)
            self._right.forget((namespace, kind, name))

    def _differs(self, want: Object, live: Mapping[tuple[str, str], Object], owner: Owner) -> bool:
        """Return whether an object is not simply right; cheap, for the usual case that nothing changed."""
        there = live.get((want["kind"], want["metadata"]["name"]))
        return (
            there is None
            or _ownership_problem(there, owner) is not None
            or bool(self.differences(want, there))
        )

    def differences(self, want: Object, there: Object) -> list[FieldDifference]:
        """Return where an object differs from the desired one, `stamped`, except what the cluster insists on."""
        key, compared = _key(want), (_digest(want), int(there.get(VERSION, 0)))
        if compared[1] and self._right.get(key) == compared:
            return []
        digest, paths = self._tolerated.get(key, ("", frozenset()))
        # Where the desired object changed since, what was insisted on in the live one is no reason for a rollout.
        tolerated = _SAID_BESIDE | (paths if digest in {_digest(want), _digest(there)} else frozenset())
        found = [each for each in differences(want, there) if each.path not in tolerated]
        if not found:
            self._right.put(key, compared)
        return found

    async def _one(self, want: Object, there: Object | None, owner: Owner, found: Applied) -> None:
        name = name_of(want)
        with found.refusals.of(name, "Apply"):
            if there is None:
                known = self._right.get(_key(want))
                there = await self._create(want, owner)
                if there is None:
                    found.wrote = True
                    if known is not None and known[0] == _digest(want):
                        found.repaired.append(f"{name}: was deleted")
                    return
            problem = _ownership_problem(there, owner)
            if problem == _LEAVING:
                found.leaving.append(name)
            elif problem is not None:
                found.conflicts.append(f"{name} {problem}")
            else:
                await self._bring_up(want, there, name, found)

    async def _create(self, want: Object, owner: Owner) -> Object | None:
        """Create an object; return the one in its place, None if it was really absent."""
        body, manager = want, OPERATOR
        if want["kind"] == SCALING_ADAPTER.kind:
            number = owner.first_replicas.get(want["metadata"]["name"], 1)
            body, manager = {**want, "spec": {**want["spec"], "replicas": number}}, INITIAL
        metadata = want["metadata"]
        try:
            answer = await self._written("create", self._client.create(body, field_manager=manager), want)
        except ConflictError:
            with suppress(NotFoundError):
                return await self._client.get(
                    kind_of(want), metadata["name"], namespace=metadata["namespace"]
                )
            # What had the name has gone since; a name that is taken again is a conflict, which passes.
            answer = await self._written("create", self._client.create(body, field_manager=manager), want)
        except NotFoundError as exc:
            # Of a child's kind the cluster does not know; the others can be made all the same.
            raise InvalidObjectError(f"{exc}; is its CustomResourceDefinition installed?") from exc
        self._remember_insistence(want, answer)
        return None

    async def _bring_up(self, want: Object, there: Object, name: str, found: Applied) -> None:
        drift = next(map(str, self.differences(want, there)), None)
        if drift is None:
            return
        if there.get(POSTED, "managedFields" in there["metadata"]):
            await self._take_over(want)
        known = self._right.get(_key(want))
        is_kept = known is not None and known[0] == _digest(want)
        answer = await self._apply(want)
        self._remember_insistence(want, answer)
        found.wrote = True
        # A second operator, and `kubectl rollout undo`, write a digest of their own.
        if is_kept or _digest(there) == _digest(want):
            found.repaired.append(f"{name}: {drift}")
        log.info("child applied", child=name, namespace=want["metadata"]["namespace"], drift=drift)

    async def _apply(self, want: Object) -> Object:
        """Apply an object; where another writer changed the key of a list's entry, set the lists right before.

        An apply adds the entry under its own key alongside the changed one, and a Service with two ports of one
        name is refused.
        """
        try:
            return await self._written("apply", self._client.apply(want, field_manager=OPERATOR), want)
        except InvalidObjectError:
            content = {key: each for key, each in want.items() if key not in _HEAD}
            if not _has_lists(content):
                raise
            await self.patch(want, content)
            await self._take_over(want)
            return await self._written("apply", self._client.apply(want, field_manager=OPERATOR), want)

    async def _take_over(self, want: Object) -> None:
        """Make the fields of a POST those of an apply, so that fields no longer wanted go away.

        As client-go's csaupgrade does for objects made by client-side apply. Of an adapter's first manager only the
        number stays.
        """
        kind, metadata = kind_of(want), want["metadata"]
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
                changed.append({**each, "fieldsV1": _NUMBER})
                fields["f:spec"] = {key: one for key, one in fields["f:spec"].items() if key != "f:replicas"}
            if not has_applied:
                posted_as = {"manager": OPERATOR, "operation": "Apply"}
                changed.append({**each, **posted_as, "fieldsV1": fields})
        replaced = {"managedFields": changed, "resourceVersion": live["metadata"]["resourceVersion"]}
        patch = [
            {"op": "replace", "path": f"/metadata/{key}", "value": value} for key, value in replaced.items()
        ]
        await self.patch(want, patch)

    def _remember_insistence(self, want: Object, answer: Object) -> None:
        """Remember paths that differ right after an apply: a webhook insists on another value there."""
        key = _key(want)
        paths = frozenset(each.path for each in differences(want, answer))
        if paths:
            self._tolerated[key] = (_digest(want), paths)
            log.warning("the cluster keeps other values", child="/".join(key), paths=sorted(paths))
        else:
            self._tolerated.pop(key, None)
            self._right.put(key, (_digest(want), version_of(answer["metadata"])))

    async def _written(self, verb: str, call: Any, obj: Object) -> Object:
        answer: Object = await self._counted(verb, call, obj["kind"])
        self._on_written(answer)
        return answer

    async def _counted(self, verb: str, call: Any, kind: str, *fine: type[ClusterError]) -> Any:
        """Await a write and count it, unless it fails in a way that is fine."""
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

_LEAVING: Final = "is being deleted"


def _ownership_problem(there: Object, owner: Owner) -> str | None:
    """Return why an object may not be written now; None if it is the owner's own, or a lost child of it."""
    metadata = there["metadata"]
    if metadata.get("deletionTimestamp"):
        return _LEAVING
    held_by = next((each for each in metadata.get("ownerReferences", ()) if each.get("controller")), None)
    if held_by is None:
        is_lost = APPLIED_ANNOTATION in metadata.get("annotations", {})
        return None if is_lost else f"exists and belongs to no {owner.kind}; delete or rename it"
    if held_by.get("uid") == owner.uid:
        return None
    if (held_by.get("kind"), held_by.get("name")) == (owner.kind, owner.name):
        return _LEAVING  # an earlier owner of this name; the garbage collector takes it
    return f"belongs to {held_by.get('kind')} {held_by.get('name')}; delete or rename it"


def name_of(obj: Object) -> str:
    """Return an object's kind and name, as messages have them."""
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
    """Await all calls, cancel the rest when one fails, and raise that one's error.

    Not by a TaskGroup: one that fails leaves, before Python 3.11.3, its cancellation on the task that continues.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
