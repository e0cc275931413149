"""`penstock profile --config-map NAME`: keeps a result in a ConfigMap, which a graph's planner.sla.profile names.

So does the Job of a ProfileRequest, and whoever measures elsewhere and plans in a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli import interruptible
from penstock.cli.cluster import Connection, require_packages
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.flags import flag, flag_of, flags
from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, PROFILER, SUMMARY_KEY
from penstock.performance.profile import read_profile

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient

MAX_BYTES: Final = 1 << 20
"""Most bytes of a ConfigMap's data. Source: kubernetes.io/docs/concepts/configuration/configmap."""

KEYS: Final = (PROFILE_KEY, GRAPH_KEY, SUMMARY_KEY)
"""Keys of a result's ConfigMap; without a graph where a target is missed."""


@dataclass(frozen=True, slots=True)
class ConfigMapFlags:
    """Flags of `penstock profile` that say which ConfigMap keeps the result."""

    config_map: str | None = flag(
        "Keep profile, graph and recommendation in this ConfigMap, for planner.sla.profile; a missed target is then "
        "part of the result, and no failure.",
        metavar="NAME",
        unset="none",
    )
    namespace: str | None = flag("Of the ConfigMap.", short=("-n",), metavar="NAME", unset="the context's")
    connection: Connection = field(default_factory=Connection)

    def refuse_unused(self) -> None:
        """Refuse those without effect.

        Raises:
            ConfigError: one of them was given without a ConfigMap.
        """
        given = [(self, "namespace"), *((self.connection, name) for name in flags(Connection))]
        for part, name in given if self.config_map is None else ():
            if getattr(part, name) is not None:
                raise ConfigError(f"{flag_of(name)}: only with --config-map; add that or leave it out")

    def keep(self, files: Sequence[Path], summary: Sequence[str]) -> None:
        """Write what was measured here to the ConfigMap, if one is named.

        Raises:
            ConfigError: the result cannot be read or is too large, or the ConfigMap holds other things.
            ClusterError: the API server refused or failed.
        """
        if self.config_map is not None:
            interruptible.run(self._write(self.config_map, result_data(files, summary)))

    async def _write(self, name: str, data: Mapping[str, str]) -> None:
        require_packages("--config-map", "kubernetes")
        async with self.connection.open() as client:
            await write_result(client, name, self.namespace or client.namespace, data)


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
