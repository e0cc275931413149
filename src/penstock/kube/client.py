"""The Kubernetes API as calls: objects in, objects out, every failure a `ClusterError`."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import orjson

from penstock.core.errors import ClusterError, ExpiredError, InvalidObjectError
from penstock.kube.kinds import Kind, kind_of
from penstock.kube.transport import KubeCall, Transport

PAGE: Final = 500
"""Objects per page of a list; kubectl's default."""

RELISTS: Final = 3
"""Chosen: how often a list whose next page has expired starts again before that is an error."""

Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True, slots=True)
class Listing:
    """A consistent view of a collection.

    Attributes:
        items: Its objects, each with apiVersion and kind.
        resource_version: Where a watch continues.
    """

    items: list[dict[str, Any]]
    resource_version: str


class KubeClient:
    """One process's way to one API server; safe for many concurrent tasks of one event loop.

    Every call raises `ClusterError`, or the subclass that fits, where the server refused or failed.
    Calls that failed for the moment (429, 5xx, no answer) are tried again for up to 30 s where repeating
    them is harmless. A call takes at most about twice that; bound it with `asyncio.timeout` where less will do.

    Attributes:
        namespace: Of the service account or the context; ``default`` otherwise.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._may_write: Callable[[], bool] | None = None
        self._is_urgent = False
        self.namespace = transport.credentials.namespace

    @classmethod
    async def connect(
        cls,
        *,
        kubeconfig: Path | None = None,
        context: str | None = None,
        rng: random.Random | None = None,
    ) -> KubeClient:
        """Read the credentials and prepare a session; nothing is sent yet.

        Args:
            kubeconfig: None takes ``$KUBECONFIG``, then ``~/.kube/config``, then the pod's service account.
            context: Of the kubeconfig; None takes its current one.
            rng: Draws the jitter of pauses; None seeds one from the system.

        Raises:
            ConfigError: there are no credentials, or they cannot be used.
        """
        rng = rng or random.Random()  # noqa: S311 - jitter
        return cls(await Transport.open(rng, kubeconfig=kubeconfig, context=context))

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._transport.credentials.configuration.host)

    @property
    def rng(self) -> random.Random:
        """Generator of all jitter."""
        return self._transport.rng

    @property
    def credentials_version(self) -> int:
        """Grows whenever the credentials are read again."""
        return self._transport.version

    async def renew_credentials(self, seen: int) -> None:
        """Read the credentials again unless that happened since version ``seen``.

        Raises:
            ConfigError: what is there now cannot be used.
        """
        await self._transport.renew(seen)

    def session(self) -> aiohttp.ClientSession:
        """Return an authenticated session for a library that makes its own calls; the caller closes it."""
        return self._transport.session()

    def fenced(self, may_write: Callable[[], bool]) -> KubeClient:
        """Return a view of this client that writes only while ``may_write()`` is true.

        With `Election.is_leading` it keeps a process that was frozen past its term from writing when it wakes up.
        """
        view = copy.copy(self)
        view._may_write = may_write  # noqa: SLF001 - of the same class
        return view

    def urgent(self) -> KubeClient:
        """Return a view of this client whose calls do not wait for others to end; for what must be in time."""
        view = copy.copy(self)
        view._is_urgent = True  # noqa: SLF001 - of the same class
        return view

    async def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        """Return one object.

        Args:
            kind: Its kind.
            name: Its name.
            namespace: None takes the client's own, for kinds that live in namespaces.

        Raises:
            NotFoundError: there is none.
        """
        return await self._call("GET", kind.path(namespace or self.namespace, name))

    async def list(
        self, kind: Kind, *, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> Listing:
        """Return all objects of a kind, read page by page as one consistent view.

        Args:
            kind: Their kind.
            namespace: None reads all namespaces.
            labels: That the objects must carry.
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
        """Hand every object to ``take`` as its page arrives; return the view's resource version.

        Args:
            kind: Kind of the objects.
            namespace: None reads all namespaces.
            selector: Label selector in Kubernetes' own syntax; empty selects all.
            take: Called with each object.
            restart: Called when a page has expired: all objects will come once more.
        """
        params = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        page_params = params
        left = RELISTS
        while True:
            try:
                page = await self._call("GET", kind.path(namespace), page_params)
            except ExpiredError:
                if not left:
                    raise
                left -= 1
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
        self,
        obj: Mapping[str, Any],
        *,
        field_manager: str,
        force: bool = True,
        subresource: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Make the fields of ``obj`` so, by server-side apply; fields it does not name stay as they are.

        Args:
            obj: apiVersion, kind, metadata.name and the fields to own.
            field_manager: Owner of the fields.
            force: Take fields from other owners; else that is a conflict.
            subresource: ``status``, to write only that.
            dry_run: Check and answer, but store nothing.

        Raises:
            ConflictError: another manager owns a field and ``force`` is off.
            InvalidObjectError: the object breaks the server's rules.
        """
        params = _write_params(field_manager, dry_run=dry_run)
        params["force"] = "true" if force else "false"
        path = self._path_of(obj, subresource)
        return await self._write(KubeCall("PATCH", path, params, obj, "application/apply-patch+yaml"))

    async def create(
        self, obj: Mapping[str, Any], *, field_manager: str, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object; a lost answer is not tried again, because that could create a second one.

        Raises:
            ConflictError: it exists already.
            InvalidObjectError: the object breaks the server's rules.
        """
        kind = kind_of(obj)
        path = kind.path(obj.get("metadata", {}).get("namespace") or self.namespace)
        params = _write_params(field_manager, dry_run=dry_run)
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
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Change an object: a merge patch for a mapping, a JSON patch for a sequence of operations.

        With ``metadata.resourceVersion`` in a merge patch it succeeds only if no other write was first.

        Args:
            kind: Kind of the object.
            name: Its name.
            patch: What to change.
            namespace: None takes the client's own, for kinds that live in namespaces.
            subresource: ``status``, ``scale`` and the like.
            field_manager: Becomes the owner of the changed fields.
            dry_run: Check and answer, but store nothing.

        Raises:
            ConflictError: somebody else changed it first.
            NotFoundError: it does not exist.
            InvalidObjectError: the result breaks the server's rules, or a JSON patch's test failed.
        """
        is_merge = isinstance(patch, Mapping)
        path = kind.path(namespace or self.namespace, name, subresource=subresource)
        params = _write_params(field_manager, dry_run=dry_run)
        content_type = "application/merge-patch+json" if is_merge else "application/json-patch+json"
        # Repeating "append to the list" appends twice; a merge patch says the same thing again.
        body = patch if is_merge else list(patch)
        return await self._write(KubeCall("PATCH", path, params, body, content_type, is_repeatable=is_merge))

    async def delete(
        self,
        kind: Kind,
        name: str,
        *,
        namespace: str | None,
        uid: str | None = None,
        grace_s: int | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        """Ask for an object's deletion; its finalizers and grace period may keep it for a while.

        Args:
            kind: Kind of the object.
            name: Its name.
            namespace: None takes the client's own, for kinds that live in namespaces.
            uid: Only this incarnation; another one is a conflict.
            grace_s: Seconds that a pod is given; None leaves its own.
            propagation: What becomes of objects that it owns.

        Raises:
            NotFoundError: there is none (any more).
            ConflictError: the name belongs to another incarnation now.
        """
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
        }
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        path = kind.path(namespace or self.namespace, name)
        await self._write(KubeCall("DELETE", path, {}, options))

    async def raw_get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path of the server, ``/version`` for example."""
        return await self._call("GET", path)

    async def raw_text(self, path: str) -> str:
        """Return the text at a path of the server, such as a pod's /metrics through its proxy; asked once."""
        call = KubeCall("GET", path, {}, is_repeatable=False)
        response = await self._transport.send(call)
        return (await response.read()).decode(errors="replace")

    async def server_time_s(self) -> float:
        """Return the server's clock, whole seconds since the epoch."""
        call = KubeCall("GET", "/version", {})
        said = (await self._transport.send(call)).headers.get("date", "")
        try:
            return parsedate_to_datetime(said).timestamp()
        except ValueError as exc:
            raise ClusterError(f"{call}: no Date header that can be read, but {said!r}") from exc

    @asynccontextmanager
    async def watch(
        self, kind: Kind, *, namespace: str | None, params: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterable[bytes]]:
        """Open a watch and give its body line by line; `Informer` is its caller.

        Raises:
            ClusterError: it was refused, broke off or went silent.
        """
        call = KubeCall("GET", kind.path(namespace), {**params, "watch": "true"})
        async with self._transport.stream(call) as lines:
            yield lines

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    def _path_of(self, obj: Mapping[str, Any], subresource: str | None) -> str:
        metadata = obj.get("metadata", {})
        if not metadata.get("name"):
            raise InvalidObjectError(f"{obj.get('kind')}: metadata.name: needed to apply an object")
        namespace = metadata.get("namespace") or self.namespace
        return kind_of(obj).path(namespace, metadata["name"], subresource=subresource)

    async def _write(self, call: KubeCall) -> dict[str, Any]:
        fenced = replace(call, refusal=self._refusal)
        fenced.check()
        return await self._send(fenced)

    def _refusal(self) -> str | None:
        """Return why this view may not write now; None: it may."""
        if self._may_write is None or self._may_write():
            return None
        return "this process is not the leader any more"

    async def _call(self, method: str, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        return await self._send(KubeCall(method, path, params or {}))

    async def _send(self, call: KubeCall) -> dict[str, Any]:
        response = await self._transport.send(call, is_urgent=self._is_urgent)
        try:
            answer = orjson.loads(await response.read())
        except orjson.JSONDecodeError as exc:
            raise ClusterError(f"{call}: the answer is no JSON: {exc}") from exc
        if not isinstance(answer, dict):
            raise ClusterError(f"{call}: expected a JSON object, found {type(answer).__name__}")
        return answer


def _write_params(field_manager: str, *, dry_run: bool) -> dict[str, str]:
    params = {"fieldManager": field_manager}
    if dry_run:
        params["dryRun"] = "All"
    return params


def selector_of(labels: Mapping[str, str] | None) -> str:
    """Return the selector of objects that carry all labels; empty for none."""
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items()))
