"""`penstock profile` on Kubernetes: `--kubernetes` applies a ProfileRequest and follows it, `--config-map` keeps a result.

The Job of a request runs `penstock profile … --config-map NAME`; so does whoever measures elsewhere and plans in a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.api import GraphDeployment, ObjectMeta, ProfilePhase, ProfileRequest, ProfileRequestSpec
from penstock.cli import interruptible
from penstock.cli.cluster import Connection, require_packages
from penstock.core.errors import ClusterError, ConfigError, ConflictError, NotFoundError
from penstock.core.flags import flag, flag_of, flags
from penstock.kube.objects.names import PROFILER
from penstock.performance.recommend import Targets

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from penstock.core.errors import unwritable
from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, SUMMARY_KEY
from penstock.performance.reading import read_profile

if TYPE_CHECKING:
    from penstock.kube.kinds import Kind

MAX_BYTES: Final = 1 << 20
"""Most bytes of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

KEYS: Final = (PROFILE_KEY, GRAPH_KEY, SUMMARY_KEY)
"""Keys of a result's ConfigMap; without a graph where a target is missed."""


class ConfigMapClient(Protocol):
    """What keeping a result needs of a client."""

    async def get(self, kind: Kind, name: str, *, namespace: str | None) -> dict[str, Any]:
        """Return one object."""
        ...

    async def apply(self, obj: Mapping[str, Any], *, field_manager: str) -> dict[str, Any]:
        """Make the fields so."""
        ...


def result_data(files: Sequence[Path], summary: Sequence[str]) -> dict[str, str]:
    """Return the data of a result's ConfigMap.

    Args:
        files: That `penstock profile` wrote; arrays and plots among them are left out.
        summary: What it recommends, one line each.

    Raises:
        ConfigError: a file cannot be read, the profile is none, or all together are too large.
    """
    data = {each.name: _text(each) for each in files if each.name in KEYS}
    if PROFILE_KEY not in data:
        raise ConfigError(f"--config-map: no {PROFILE_KEY} was written; give --output-dir")
    read_profile(data[PROFILE_KEY], origin=PROFILE_KEY)
    data[SUMMARY_KEY] = "".join(f"{line}\n" for line in summary)
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > MAX_BYTES:
        raise ConfigError(
            f"--config-map: the result has {size:,} bytes, and a ConfigMap holds {MAX_BYTES:,}; measure fewer sizes"
        )
    return data


async def write_result(client: ConfigMapClient, name: str, namespace: str, data: Mapping[str, str]) -> None:
    """Write a result's ConfigMap by server-side apply; keys of an earlier result that this one lacks go.

    Raises:
        ConfigError: a ConfigMap of that name holds other keys.
        ClusterError: the API server refused or failed.
    """
    from penstock.kube.kinds import CONFIG_MAP  # noqa: PLC0415 - optional extra

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


async def read_result(client: ConfigMapClient, name: str, namespace: str) -> dict[str, str]:
    """Return the data of a result's ConfigMap.

    Raises:
        ClusterError: the API server refused or failed.
    """
    from penstock.kube.kinds import CONFIG_MAP  # noqa: PLC0415 - optional extra

    live = await client.get(CONFIG_MAP, name, namespace=namespace)
    return {key: text for key, text in (live.get("data") or {}).items() if key in KEYS}


def write_files(data: Mapping[str, str], folder: Path) -> list[Path]:
    """Write a result's data to a folder; return the files.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for key, text in data.items():
            (folder / key).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {folder}", exc)) from exc
    return [folder / key for key in data]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"--config-map: {file} cannot be read: {why}; profile once more") from exc


POLL_S: Final = 2.0
"""Real seconds between two looks at a request. Chosen: a profile takes minutes."""

UNSEEN_S: Final = 60.0
"""Real seconds after which a request without a status has no operator. Chosen: one takes over within 45 s."""

SLACK_S: Final = 120.0
"""Real seconds beyond a request's own timeout for scheduling and clearing up. Chosen."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Flags of `penstock profile` that have to do with a cluster."""

    kubernetes: bool = flag(
        "Measure on a cluster: apply a ProfileRequest for the graph of --config, wait for its Job, and print what it "
        "recommends; --output-dir gets the result's files, --dry-run prints the manifest.",
        default=False,
    )
    request_name: str | None = flag("With --kubernetes: the request's.", metavar="NAME", unset="the graph's")
    image: str | None = flag(
        "With --kubernetes: image with Penstock and the graph's runtime.",
        metavar="NAME",
        unset="the release's, for simulated workers",
    )
    config_map: str | None = flag(
        "Keep profile, graph and recommendation in this ConfigMap, for planner.sla.profile; a missed target is then "
        "part of the result, and no failure.",
        metavar="NAME",
        unset="with --kubernetes the request's name",
    )
    namespace: str | None = flag(
        "Of request and ConfigMap.", short=("-n",), metavar="NAME", unset="the context's"
    )
    connection: Connection = field(default_factory=Connection)

    def refuse_unused(self) -> None:
        """Refuse those without effect where it is measured here.

        Raises:
            ConfigError: one of them was given.
        """
        given: list[tuple[str, ClusterFlags | Connection, str]] = [
            ("--kubernetes", self, "request_name"),
            ("--kubernetes", self, "image"),
        ]
        if self.config_map is None:
            both = "--kubernetes or --config-map"
            given += [
                (both, self, "namespace"),
                *((both, self.connection, name) for name in flags(Connection)),
            ]
        for needs, part, name in given:
            if getattr(part, name) is not None:
                raise ConfigError(f"{flag_of(name)}: only with {needs}; add that or leave it out")


HERE_ALONE: Final = (
    "endpoint", "gpus", "max_context", "max_concurrency", "kv_tokens", "speed", "model", "api_key", "timeout_s",
)  # fmt: skip
"""Options that decide how this machine measures; a request has no such key."""


def request_of(
    graph: GraphDeployment,
    targets: Targets,
    flags: ClusterFlags,
    *,
    sizes: Sequence[int],
    max_gpus: int | None,
) -> ProfileRequest:
    """Return the request that measures a graph.

    Args:
        graph: Valid; it need not be deployed.
        targets: Lengths and targets.
        flags: Name, image and ConfigMap.
        sizes: Tensor-parallel sizes; empty: powers of two up to ``max_gpus``.
        max_gpus: None: the largest of ``sizes``, or of the graph's workers.
    """
    largest = max(sizes, default=0) or max(each.gpus_per_replica for each in graph.spec.workers.values())
    return ProfileRequest(
        metadata=ObjectMeta(name=flags.request_name or graph.name),
        spec=ProfileRequestSpec(
            template=graph.spec.to_manifest(),
            isl=targets.isl,
            osl=targets.osl,
            ttft_seconds=targets.ttft_s,
            itl_seconds=targets.itl_s,
            tensor_parallel=tuple(sizes),
            max_gpus=max_gpus or largest,
            config_map=flags.config_map,
            image=flags.image,
        ),
    )


def keep_result(files: Sequence[Path], summary: Sequence[str], flags: ClusterFlags) -> None:
    """Write what was measured here to the ConfigMap of the flags.

    Raises:
        ConfigError: the result cannot be read or is too large, or the ConfigMap holds other things.
        ClusterError: the API server refused or failed.
    """
    name, data = flags.config_map, result_data(files, summary)
    if name is not None:
        interruptible.run(
            _with_client(flags, lambda client, namespace: write_result(client, name, namespace, data))
        )


def profile_on_cluster(
    request: ProfileRequest, flags: ClusterFlags, directory: Path | None, *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Apply a request and wait for its end; return its status.

    A signal ends the wait and leaves the request at work.

    Args:
        request: What to measure.
        flags: Where.
        directory: Gets the result's files; None: they stay in the ConfigMap.
        tell: Called with each step in words.

    Raises:
        ConfigError: the request exists already, or no operator takes it up.
        ClusterError: it failed, or the API server did.
    """

    async def work(client: KubeClient, namespace: str) -> tuple[dict[str, Any], dict[str, str]]:
        status = await follow(client, request, namespace, tell=tell)
        data = {} if directory is None else await read_result(client, request.config_map, namespace)
        return status, data

    status, data = interruptible.run(_with_client(flags, work))
    for path in write_files(data, directory) if directory is not None else ():
        tell(f"wrote {path}")
    return status


async def follow(
    client: KubeClient,
    request: ProfileRequest,
    namespace: str,
    *,
    tell: Callable[[str], None],
    poll_s: float = POLL_S,
    unseen_s: float = UNSEEN_S,
) -> dict[str, Any]:
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
    where = f"ProfileRequest {namespace}/{request.name}"
    try:
        await client.create(manifest, field_manager=PROFILER)
    except ConflictError as exc:
        remedy = f"kubectl delete gpr {request.name}, or choose another --request-name"
        raise ConfigError(f"{where}: exists already; {remedy}") from exc
    tell(f"{where}: applied; kubectl delete gpr {request.name} ends it")
    limit_s = request.spec.timeout_seconds + SLACK_S
    try:
        async with asyncio.timeout(limit_s):
            return await _ended(client, request, namespace, tell, poll_s=poll_s, unseen_s=unseen_s)
    except TimeoutError as exc:
        raise ClusterError(f"{where}: not ended after {limit_s:g} s; see kubectl describe gpr") from exc


async def _ended(
    client: KubeClient,
    request: ProfileRequest,
    namespace: str,
    tell: Callable[[str], None],
    *,
    poll_s: float,
    unseen_s: float,
) -> dict[str, Any]:
    where, said, loop = f"ProfileRequest {namespace}/{request.name}", "", asyncio.get_running_loop()
    unseen_until_s = loop.time() + unseen_s
    while True:
        status = await _status(client, request.name, namespace)
        if not status and loop.time() >= unseen_until_s:
            raise ConfigError(
                f"{where}: no operator has looked at it for {unseen_s:g} s; see penstock doctor"
            )
        message = "; ".join(each["message"] for each in status.get("conditions", ()))
        if message != said:
            said = message
            tell(f"{status['phase']}: {message}")
        if status.get("phase") == ProfilePhase.SUCCEEDED:
            return status
        if status.get("phase") == ProfilePhase.FAILED:
            raise ClusterError(f"{where}: {message}")
        await asyncio.sleep(poll_s)


async def _status(client: KubeClient, name: str, namespace: str) -> dict[str, Any]:
    from penstock.kube.kinds import PROFILE_REQUEST  # noqa: PLC0415 - optional extra

    try:
        live = await client.get(PROFILE_REQUEST, name, namespace=namespace)
    except NotFoundError as exc:
        raise ClusterError(f"ProfileRequest {namespace}/{name}: was deleted; apply it again") from exc
    status: dict[str, Any] = live.get("status") or {}
    return status


async def _with_client(flags: ClusterFlags, work: Callable[[KubeClient, str], Awaitable[_T]]) -> _T:
    require_packages("--kubernetes, --config-map", "kubernetes")
    async with flags.connection.open() as client:
        return await work(client, flags.namespace or client.namespace)
