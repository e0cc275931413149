"""`penstock profile` on Kubernetes: `--kubernetes` applies a ProfileRequest and follows it, `--config-map` keeps a result.

The Job of a request runs `penstock profile … --config-map NAME`; so does whoever measures elsewhere and plans in a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock_api import ProfilePhase, ProfileRequest
from penstock_cli import interruptible
from penstock_core.errors import ClusterError, ConfigError, ConflictError, NotFoundError
from penstock_objects.names import GRAPH_KEY, PROFILE_KEY, PROFILER, SUMMARY_KEY
from penstock_performance.reading import read_profile

if TYPE_CHECKING:
    from penstock_kube.client import KubeClient
    from penstock_kube.kinds import Kind

MAX_BYTES: Final = 1 << 20
"""Most bytes of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

KEYS: Final = (PROFILE_KEY, GRAPH_KEY, SUMMARY_KEY)
"""Keys of a result's ConfigMap."""

POLL_S: Final = 2.0
"""Real seconds between two looks at a request. Chosen: a profile takes minutes."""

UNSEEN_S: Final = 60.0
"""Real seconds after which a request without a status has no operator. Chosen: one takes over within 45 s."""

SLACK_S: Final = 120.0
"""Real seconds beyond a request's own timeout for scheduling and clearing up. Chosen."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Which cluster, and which namespace of it.

    Attributes:
        kubeconfig: File; None: in the cluster its service account, else KUBECONFIG.
        context: Of the kubeconfig; None: its current one.
        namespace: None: the context's or the service account's.
    """

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


class ConfigMapClient(Protocol):
    """What keeping a result needs of a client."""

    async def get(self, kind: Kind, name: str, *, namespace: str | None) -> dict[str, Any]:
        """Return one object."""
        ...

    async def apply(self, obj: Mapping[str, Any], *, field_manager: str) -> dict[str, Any]:
        """Make the fields so."""
        ...


def keep_result(folder: Path, summary: Sequence[str], name: str, access: ClusterAccess) -> None:
    """Write what `penstock profile` left in a folder to a ConfigMap.

    Args:
        folder: Its output folder, with profile.json and graph.yaml.
        summary: What it recommends, one line each.
        name: The ConfigMap's.
        access: Where.

    Raises:
        ConfigError: a file is missing or no profile, the result is too large, or the ConfigMap holds other things.
        ClusterError: the API server refused or failed.
    """
    data = result_data(folder, summary)
    interruptible.run(_with_client(access, lambda client, place: write_result(client, name, place, data)))


def result_data(folder: Path, summary: Sequence[str]) -> dict[str, str]:
    """Return the data of a result's ConfigMap.

    Raises:
        ConfigError: a file is missing, is no profile, or all together are too large.
    """
    data = {key: _text(folder / key) for key in (PROFILE_KEY, GRAPH_KEY)}
    read_profile(data[PROFILE_KEY], origin=str(folder / PROFILE_KEY))
    data[SUMMARY_KEY] = "".join(f"{line}\n" for line in summary)
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > MAX_BYTES:
        raise ConfigError(
            f"--config-map: the result has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; measure fewer points"
        )
    return data


async def write_result(client: ConfigMapClient, name: str, namespace: str, data: Mapping[str, str]) -> None:
    """Write a result's ConfigMap by server-side apply.

    Raises:
        ConfigError: a ConfigMap of that name holds other keys.
        ClusterError: the API server refused or failed.
    """
    from penstock_kube.kinds import CONFIG_MAP  # noqa: PLC0415 - optional extra

    try:
        live = await client.get(CONFIG_MAP, name, namespace=namespace)
    except NotFoundError:
        live = {}
    others = sorted({*(live.get("data") or {}), *(live.get("binaryData") or {})} - set(KEYS))
    if others:
        raise ConfigError(
            f"--config-map: ConfigMap {namespace}/{name} holds {', '.join(others)}; choose another name, or delete it"
        )
    obj = {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": {"name": name, "namespace": namespace},
        "data": dict(data),
    }
    await client.apply(obj, field_manager=PROFILER)


def profile_on_cluster(
    request: ProfileRequest, access: ClusterAccess, *, tell: Callable[[str], None]
) -> tuple[str, ...]:
    """Apply a request and wait for its end; return what it recommends, one line each.

    A signal ends the wait and leaves the request at work.

    Args:
        request: What to measure.
        access: Where.
        tell: Called with each step in words.

    Raises:
        ConfigError: the request exists already, or no operator takes it up.
        ClusterError: it failed, or the API server did.
    """
    return interruptible.run(
        _with_client(access, lambda client, place: follow(client, request, place, tell=tell))
    )


async def follow(
    client: KubeClient,
    request: ProfileRequest,
    namespace: str,
    *,
    tell: Callable[[str], None],
    poll_s: float = POLL_S,
    unseen_s: float = UNSEEN_S,
) -> tuple[str, ...]:
    """Create a request and look at it until it has ended; see `profile_on_cluster`.

    Args:
        client: Of the cluster.
        request: What to measure.
        namespace: Where.
        tell: Called with each step in words.
        poll_s: Real seconds between two looks.
        unseen_s: Real seconds that the first status may take.
    """
    manifest = request.to_manifest()
    manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    try:
        await client.create(manifest, field_manager=PROFILER)
    except ConflictError as exc:
        raise ConfigError(
            f"ProfileRequest {namespace}/{request.name} exists; kubectl delete gpr {request.name}, or choose another --name"
        ) from exc
    tell(f"ProfileRequest {namespace}/{request.name}: applied; kubectl delete gpr {request.name} ends it")
    watched = _Watched(client, request, namespace, tell, poll_s=poll_s, unseen_s=unseen_s)
    limit_s = request.spec.timeout_seconds + SLACK_S
    try:
        async with asyncio.timeout(limit_s):
            return await watched.until_ended()
    except TimeoutError as exc:
        raise ClusterError(
            f"ProfileRequest {namespace}/{request.name}: not ended after {limit_s:g} s; see kubectl describe gpr"
        ) from exc


@dataclass(frozen=True, slots=True)
class _Watched:
    client: KubeClient
    request: ProfileRequest
    namespace: str
    tell: Callable[[str], None]
    poll_s: float
    unseen_s: float

    async def until_ended(self) -> tuple[str, ...]:
        said, loop = "", asyncio.get_running_loop()
        unseen_until_s = loop.time() + self.unseen_s
        while True:
            status = await self._status()
            if not status and loop.time() >= unseen_until_s:
                raise ConfigError(
                    f"ProfileRequest {self.namespace}/{self.request.name}: no operator has looked at it for "
                    f"{self.unseen_s:g} s; see penstock doctor"
                )
            message = "; ".join(each["message"] for each in status.get("conditions", ()))
            if message != said:
                said = message
                self.tell(f"{status['phase']}: {message}")
            if status.get("phase") == ProfilePhase.SUCCEEDED:
                return tuple((status.get("recommendation") or {}).get("summary") or ())
            if status.get("phase") == ProfilePhase.FAILED:
                raise ClusterError(f"ProfileRequest {self.namespace}/{self.request.name}: {message}")
            await asyncio.sleep(self.poll_s)

    async def _status(self) -> dict[str, Any]:
        from penstock_kube.kinds import PROFILE_REQUEST  # noqa: PLC0415 - optional extra

        try:
            live = await self.client.get(PROFILE_REQUEST, self.request.name, namespace=self.namespace)
        except NotFoundError as exc:
            raise ClusterError(
                f"ProfileRequest {self.namespace}/{self.request.name}: was deleted; apply it again"
            ) from exc
        status: dict[str, Any] = live.get("status") or {}
        return status


async def _with_client(access: ClusterAccess, work: Callable[[KubeClient, str], Awaitable[Any]]) -> Any:
    try:
        from penstock_kube.client import KubeClient  # noqa: PLC0415 - optional extra
    except ImportError as exc:
        raise ConfigError(
            "--kubernetes, --config-map: their packages are not installed; run pip install 'penstock[kubernetes]'"
        ) from exc
    client = await KubeClient.connect(kubeconfig=access.kubeconfig, context=access.context)
    try:
        return await work(client, access.namespace or client.namespace)
    finally:
        await client.close()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"--config-map: {file} cannot be read: {why}; profile once more") from exc
