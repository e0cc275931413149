"""`penstock profile` on Kubernetes: `--kubernetes` prints a ProfileRequest, `--config-map` keeps a result.

The Job of a request runs `penstock profile … --config-map NAME`; so does whoever measures elsewhere and plans in a cluster.
A result lies in a ConfigMap, which a graph's planner.sla.profile names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.api import GraphDeployment, ObjectMeta, ProfileRequest, ProfileRequestSpec
from penstock.cli import interruptible
from penstock.cli.cluster import Connection, require_packages
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.flags import flag, flag_of, flags
from penstock.kube.objects.names import PROFILER
from penstock.performance.recommend import Targets

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, SUMMARY_KEY
from penstock.performance.reading import read_profile

if TYPE_CHECKING:
    pass

MAX_BYTES: Final = 1 << 20
"""Most bytes of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

KEYS: Final = (PROFILE_KEY, GRAPH_KEY, SUMMARY_KEY)
"""Keys of a result's ConfigMap; without a graph where a target is missed."""


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


async def write_result(client: KubeClient, name: str, namespace: str, data: Mapping[str, str]) -> None:
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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigError(f"--config-map: {file} cannot be read: {why}; profile once more") from exc


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Flags of `penstock profile` that have to do with a cluster."""

    kubernetes: bool = flag(
        "Measure nothing here: print a ProfileRequest that measures the graph of --config on a cluster, for kubectl apply.",
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
        """Refuse those without effect: a request is printed, and only a ConfigMap needs a cluster.

        Raises:
            ConfigError: one of them was given.
        """
        keeps = self.config_map is not None
        printed = [("request_name", self.request_name), ("image", self.image)]
        reached = [(name, getattr(self.connection, name)) for name in flags(Connection)]
        rules = (
            (self.kubernetes, "--kubernetes", printed),
            (self.kubernetes or keeps, "--kubernetes or --config-map", [("namespace", self.namespace)]),
            (keeps and not self.kubernetes, "--config-map, without --kubernetes", reached),
        )
        for has_effect, needs, given in rules:
            for name, value in given:
                if not has_effect and value is not None:
                    raise ConfigError(f"{flag_of(name)}: only with {needs}; add that or leave it out")


HERE_ALONE: Final = (
    "output_dir", "endpoint", "gpus", "max_context", "max_concurrency", "kv_tokens", "speed", "model", "api_key", "timeout_s",
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
        metadata=ObjectMeta(name=flags.request_name or graph.name, namespace=flags.namespace),
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

    async def write() -> None:
        async with flags.connection.open() as client:
            await write_result(client, name or "", flags.namespace or client.namespace, data)

    require_packages("--config-map", "kubernetes")
    interruptible.run(write())
