"""Client of the Kubernetes API: methods take and return objects as dictionaries, and every failure is a `ClusterError`."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.core.errors import ClusterError, ExpiredError, InvalidObjectError
from penstock.kube.kinds import Kind, kind_of
from penstock.kube.transport import KubeCall, Transport, read_credentials

PAGE: Final = 500
"""Number of objects per page of a list; kubectl's default."""

RELISTS: Final = 3
"""How often a list starts again because its next page has expired, before that is an error. Chosen."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A consistent list of a collection.

    Attributes:
        items: The objects, each with apiVersion and kind.
        resource_version: Resource version of the list, at which a watch can start.
    """

    items: list[dict[str, Any]]
    resource_version: str


class KubeClient:
    """A process's client of one API server; many concurrent tasks of one event loop can share it.

    Every call raises `ClusterError`, or the subclass that fits, if the server refuses or fails. Calls that failed
    temporarily (429, 5xx, no answer) are retried for up to 30 s if repeating them is harmless. A call takes at most
    about a minute; use `asyncio.timeout` for a shorter limit. A ``namespace`` of None means the client's own namespace,
    or all namespaces in methods that list or watch.

    Attributes:
        transport: Sends the calls; it has the credentials and the random generator for jitter.
        namespace: Namespace of the service account or of the kubeconfig's context; ``default`` if neither names one.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.namespace = transport.credentials.namespace
        self._may_write: Callable[[], bool] | None = None
        self._is_urgent = False

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        rng: random.Random | None = None,
    ) -> KubeClient:
        """Read the credentials and return a client; no request is sent yet.

        Args:
            kubeconfig: Path of the kubeconfig. None means ``$KUBECONFIG``, then ``~/.kube/config``, then the pod's
                service account.
            context: Context of the kubeconfig; None means its current one.
            rng: Random generator for jitter; None creates one seeded by the system.

        Raises:
            ConfigError: There are no credentials, or they are unusable.
        """
        rng = rng or random.Random()  # noqa: S311 - jitter
        credentials = await read_credentials(kubeconfig=kubeconfig, context=context)
        return cls(Transport(credentials, rng, kubeconfig, context))

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self.transport.credentials.configuration.host)

    @property
    def rng(self) -> random.Random:
        """Random generator for jitter."""
        return self.transport.rng

    def fenced(self, may_write: Callable[[], bool]) -> KubeClient:
        """Return a view of this client that writes only while ``may_write()`` returns True; otherwise writes raise ClusterError.

        With `Election.is_leading` this prevents a process that was suspended beyond its lease from writing when it
        resumes.
        """
        view = copy.copy(self)
        view._may_write = may_write  # noqa: SLF001 - of the same class
        return view

    def urgent(self) -> KubeClient:
        """Return a view of this client whose calls do not wait for a free slot and are not retried.

        It is for calls with a deadline, whose caller retries by itself.
        """
        view = copy.copy(self)
        view._is_urgent = True  # noqa: SLF001 - of the same class
        return view

    async def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        """Return the object of this kind and name.

        Raises:
            NotFoundError: The object does not exist.
        """
        return await self.raw_get(kind.path(namespace or self.namespace, name))

    async def list(
        self, kind: Kind, *, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> Listing:
        """Return all objects of a kind that have the labels, read in pages as one consistent list.

        Args:
            kind: Kind to list.
            namespace: Namespace to list; None means all.
            labels: Labels that the objects must have; None means any objects.
        """
        items: list[dict[str, Any]] = []
        version = await self.read_pages(
            kind,
            namespace=namespace,
            selector=selector_of(labels),
            take=items.append,
            restart=items.clear,
        )
        return Listing(items, version)

    async def read_pages(
        self,
        kind: Kind,
        *,
        namespace: str | None,
        selector: str,
        take: Callable[[dict[str, Any]], None],
        restart: Callable[[], None],
    ) -> str:
        """Call ``take`` for each object of a kind as its page arrives; return the list's resource version, at which a watch can start.

        Args:
            kind: Kind to list.
            namespace: Namespace to list; None means all.
            selector: Label selector; empty selects all objects.
            take: Called with each object.
            restart: Called if a page has expired; all objects are then passed to ``take`` again.
        """
        params = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        page_params = params
        retries = RELISTS
        while True:
            try:
                page = await self._send(KubeCall("GET", kind.path(namespace), page_params))
            except ExpiredError:
                if not retries:
                    raise
                retries -= 1
                restart()
                page_params = params
                continue
            for item in page.get("items") or ():
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.kind)
                take(item)
            metadata = page.get("metadata", {})
            if not metadata.get("continue"):
                return str(metadata.get("resourceVersion", ""))
            page_params = {**params, "continue": metadata["continue"]}

    async def apply(
        self, obj: Mapping[str, Any], *, field_manager: str, subresource: str | None = None
    ) -> dict[str, Any]:
        """Set the fields in ``obj`` by server-side apply and return the result; other fields remain unchanged.

        Fields that other field managers own (``metadata.managedFields``) are overwritten and owned by ``field_manager``
        from then on.

        Args:
            obj: Object with apiVersion, kind, name and the fields to set.
            field_manager: Name of the field manager.
            subresource: Subresource to apply, such as ``status``; None means the object itself.

        Raises:
            InvalidObjectError: The object violates the API's rules.
        """
        metadata = obj.get("metadata", {})
        if not metadata.get("name"):
            raise InvalidObjectError(f"{obj.get('kind')}: metadata.name: needed to apply an object")
        namespace = metadata.get("namespace") or self.namespace
        path = kind_of(obj).path(namespace, metadata["name"], subresource=subresource)
        params = {"fieldManager": field_manager, "force": "true"}
        return await self._write(KubeCall("PATCH", path, params, obj, "application/apply-patch+yaml"))

    async def create(
        self, obj: Mapping[str, Any], *, field_manager: str, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object and return it. It is not retried if the answer is lost, since that could create a second object.

        Args:
            obj: The object.
            field_manager: Name of the field manager.
            dry_run: Whether the server only checks the object and stores nothing.

        Raises:
            ConflictError: The object exists already.
            InvalidObjectError: The object violates the API's rules.
        """
        path = kind_of(obj).path(obj.get("metadata", {}).get("namespace") or self.namespace)
        params = {"fieldManager": field_manager, **({"dryRun": "All"} if dry_run else {})}
        return await self._write(KubeCall("POST", path, params, obj, is_repeatable=False))

    async def patch(
        self,
        kind: Kind,
        name: str,
        patch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        namespace: str | None,
        subresource: str | None = None,
        field_manager: str,
    ) -> dict[str, Any]:
        """Patch an object and return the result: a mapping is a merge patch, a sequence of operations a JSON patch.

        A merge patch with ``metadata.resourceVersion`` fails if the object has been changed since that version.

        Args:
            kind: Kind of the object.
            name: Name of the object.
            patch: The patch.
            namespace: Namespace of the object; None means the client's own.
            subresource: Subresource to patch, such as ``status``; None means the object itself.
            field_manager: Name of the field manager.

        Raises:
            ConflictError: Another writer changed the object first.
            NotFoundError: The object does not exist.
            InvalidObjectError: The result violates the API's rules, or a test in a JSON patch failed.
        """
        is_merge = isinstance(patch, Mapping)
        path = kind.path(namespace or self.namespace, name, subresource=subresource)
        content_type = "application/merge-patch+json" if is_merge else "application/json-patch+json"
        # Repeating a JSON patch may append to a list twice; repeating a merge patch is harmless.
        body = patch if is_merge else list(patch)
        params = {"fieldManager": field_manager}
        return await self._write(KubeCall("PATCH", path, params, body, content_type, is_repeatable=is_merge))

    async def delete(
        self,
        kind: Kind,
        name: str,
        *,
        namespace: str | None,
        uid: str | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Request an object's deletion; finalizers and the grace period may delay it.

        Args:
            kind: Kind of the object.
            name: Name of the object.
            namespace: Namespace of the object; None means the client's own.
            uid: UID that the object must have; None deletes any object of that name.
            grace_s: Termination grace period of a pod in seconds; None means the pod's own.

        Raises:
            NotFoundError: The object does not exist.
            ConflictError: The object of that name has another UID.
        """
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        await self._write(KubeCall("DELETE", kind.path(namespace or self.namespace, name), {}, body))

    async def raw_get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path of the API server, for example ``/version``."""
        return await self._send(KubeCall("GET", path, {}))

    async def raw_text(self, path: str) -> str:
        """Return the text at a path of the API server, such as a pod's /metrics through its proxy; it is not retried."""
        response = await self.transport.send(KubeCall("GET", path, {}, is_repeatable=False))
        return (await response.read()).decode(errors="replace")

    async def server_time_s(self) -> float:
        """Return the API server's time as Unix time in whole seconds, from the Date header of an answer."""
        call = KubeCall("GET", "/version", {})
        date = (await self.transport.send(call)).headers.get("date", "")
        try:
            return parsedate_to_datetime(date).timestamp()
        except ValueError as exc:
            raise ClusterError(f"{call}: no valid Date header, but {date!r}") from exc

    @asynccontextmanager
    async def watch(
        self, kind: Kind, *, namespace: str | None, params: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterable[bytes]]:
        """Async context manager that opens a watch and yields its body, line by line.

        Args:
            kind: Kind to watch.
            namespace: Namespace to watch; None means all.
            params: Query parameters of the watch, such as ``resourceVersion`` and ``labelSelector``.

        Raises:
            ClusterError: The watch was refused, was interrupted, or sent nothing for too long.
        """
        call = KubeCall("GET", kind.path(namespace), {**params, "watch": "true"})
        async with self.transport.stream(call) as lines:
            yield lines

    async def close(self) -> None:
        """Close all connections."""
        await self.transport.close()

    async def _write(self, call: KubeCall) -> dict[str, Any]:
        fenced = replace(call, refusal=self._refusal)
        fenced.check()
        return await self._send(fenced)

    def _refusal(self) -> str | None:
        """Return why this view must not write now; None if it can."""
        if self._may_write is None or self._may_write():
            return None
        return "this process is no longer the leader"

    async def _send(self, call: KubeCall) -> dict[str, Any]:
        response = await self.transport.send(call, is_urgent=self._is_urgent)
        try:
            answer = orjson.loads(await response.read())
        except orjson.JSONDecodeError as exc:
            raise ClusterError(f"{call}: the answer is not JSON: {exc}") from exc
        if not isinstance(answer, dict):
            raise ClusterError(f"{call}: expected a JSON object, found {type(answer).__name__}")
        return answer


def selector_of(labels: Mapping[str, str] | str | None) -> str:
    """Return a label selector for objects with all ``labels``; empty for None, and a selector text unchanged."""
    if isinstance(labels, str):
        return labels
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items()))
