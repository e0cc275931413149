"""`penstock profile --config-map NAME`: keeps a result in a ConfigMap, which a graph's planner.sla.profile names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.core.errors import ConfigError, NotFoundError, unwritable
from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, PROFILER, SUMMARY_KEY
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
