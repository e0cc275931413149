"""The Kubernetes API as calls: objects in, objects out, every failure a `ClusterError`."""

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
"""Objects per page of a list; kubectl's default."""

RELISTS: Final = 3
"""Chosen: how often a list whose next page has expired starts again before that is an error."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A consistent view of a collection: objects with apiVersion and kind, and where a watch continues."""

    items: list[dict[str, Any]]
    resource_version: str


class KubeClient:
    """One process's way to one API server; safe for many concurrent tasks of one event loop.

    Every call raises `ClusterError`, or the subclass that fits, where the server refused or failed.
    Calls that failed for the moment (429, 5xx, no answer) are tried again for up to 30 s where repeating
    them is harmless. A call takes at most about twice that; bound it with `asyncio.timeout` where less will do.
    A ``namespace`` of None is the client's own, and all of them where objects are listed or watched.

    Attributes:
        transport: Sends the calls, lends credentials and the generator of jitter.
        namespace: Of the service account or the context; ``default`` otherwise.
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
        """Read the credentials and prepare a session; nothing is sent yet.

        Args:
            kubeconfig: None takes ``$KUBECONFIG``, then ``~/.kube/config``, then the pod's service account.
            context: Of the kubeconfig; None takes its current one.
            rng: Draws the jitter of pauses; None seeds one from the system.

        Raises:
            ConfigError: there are no credentials, or they cannot be used.
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
        """Generator of all jitter."""
        return self.transport.rng

    def fenced(self, may_write: Callable[[], bool]) -> KubeClient:
        """Return a view of this client that writes only while ``may_write()`` is true.

        With `Election.is_leading` it keeps a process that was frozen past its term from writing when it wakes up.
        """
        view = copy.copy(self)
        view._may_write = may_write  # noqa: SLF001 - of the same class
        return view

    def urgent(self) -> KubeClient:
        """Return a view of this client whose calls do not wait for others to end, and are sent once.

        For what must be in time: its caller has a deadline and repeats by itself.
        """
        view = copy.copy(self)
        view._is_urgent = True  # noqa: SLF001 - of the same class
        return view

    async def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        """Return one object.

        Raises:
            NotFoundError: there is none.
        """
        return await self.raw_get(kind.path(namespace or self.namespace, name))

    async def list(
        self, kind: Kind, *, namespace: str | None, labels: Mapping[str, str] | None = None
    ) -> Listing:
        """Return all objects of a kind that carry the labels, read page by page as one consistent view."""
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
        """Hand every object that a selector (empty: all) takes to ``take`` as its page arrives; return the view's version.

        ``restart`` is called when a page has expired: all objects will come once more.
        """
        params = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        page_params = params
        left = RELISTS
        while True:
            try:
                page = await self._send(KubeCall("GET", kind.path(namespace), page_params))
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
        self, obj: Mapping[str, Any], *, field_manager: str, subresource: str | None = None
    ) -> dict[str, Any]:
        """Make the fields of ``obj`` so, by server-side apply, taking them from other owners; others stay as they are.

        Raises:
            InvalidObjectError: the object breaks the server's rules.
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
        """Create an object; a lost answer is not tried again, because that could create a second one.

        Raises:
            ConflictError: it exists already.
            InvalidObjectError: the object breaks the server's rules.
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
        """Change an object: a merge patch for a mapping, a JSON patch for a sequence of operations.

        With ``metadata.resourceVersion`` in a merge patch it succeeds only if no other write was first.

        Raises:
            ConflictError: another writer changed it first.
            NotFoundError: it does not exist.
            InvalidObjectError: the result breaks the server's rules, or a JSON patch's test failed.
        """
        is_merge = isinstance(patch, Mapping)
        path = kind.path(namespace or self.namespace, name, subresource=subresource)
        content_type = "application/merge-patch+json" if is_merge else "application/json-patch+json"
        # Repeating "append to the list" appends twice; a merge patch says the same thing again.
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
        """Ask for an object's deletion; its finalizers and grace period may keep it for a while.

        With a uid only that incarnation goes; a pod is given ``grace_s``, None leaves its own.

        Raises:
            NotFoundError: there is none (any more).
            ConflictError: the name belongs to another incarnation now.
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
        """Return the JSON object at a path of the server, ``/version`` for example."""
        return await self._send(KubeCall("GET", path, {}))

    async def raw_text(self, path: str) -> str:
        """Return the text at a path of the server, such as a pod's /metrics through its proxy; asked once."""
        response = await self.transport.send(KubeCall("GET", path, {}, is_repeatable=False))
        return (await response.read()).decode(errors="replace")

    async def server_time_s(self) -> float:
        """Return the server's clock, whole seconds since the epoch."""
        call = KubeCall("GET", "/version", {})
        said = (await self.transport.send(call)).headers.get("date", "")
        try:
            return parsedate_to_datetime(said).timestamp()
        except ValueError as exc:
            raise ClusterError(f"{call}: no Date header that can be read, but {said!r}") from exc

    @asynccontextmanager
    async def watch(
        self, kind: Kind, *, namespace: str | None, params: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterable[bytes]]:
        """Open a watch and give its body line by line.

        Raises:
            ClusterError: it was refused, broke off or went silent.
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
        """Return why this view may not write now; None: it may."""
        if self._may_write is None or self._may_write():
            return None
        return "this process is not the leader any more"

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
    """Return the selector of objects that carry all labels; empty for none, a selector's own text as it is."""
    if isinstance(labels, str):
        return labels
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items()))
