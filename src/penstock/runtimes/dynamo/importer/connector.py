"""A worker's KV connector: the plain NIXL one is the runtime's own, another replaces it.

Source: ai-dynamo 1.6.0, dynamo/vllm/args.py (``--connector`` is refused there and names its equivalents), and
docs.vllm.ai, ``KVTransferConfig``.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.api.enums import KvBufferDevice
from penstock.api.rule import KeyPath
from penstock.runtimes.dynamo.importer.command import Command
from penstock.runtimes.dynamo.importer.shell import CONNECTOR_FLAG
from penstock.runtimes.dynamo.importer.source import ManifestSource

_NIXL = "NixlConnector"
_ROLES = frozenset({"kv_both", "kv_producer", "kv_consumer"})
_DYNAMO_MODULE = "kvbm.vllm_integration.connector"
_LEGACY: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector": _NIXL, "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "flexkv": {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"},
    "kvbm": {
        "kv_connector": "DynamoConnector",
        "kv_connector_module_path": _DYNAMO_MODULE,
        "kv_role": "kv_both",
    },
}
"""What the names of ``--connector`` stand for."""

_NONE = frozenset({"none", "null"})
_OVERRIDES = (
    "stands after the runtime's own connector and replaces it: spec.lease does not reach it; write kv_lease_duration into"
    " its kv_connector_extra_config"
)


def read_connector(
    source: ManifestSource, args_path: KeyPath, command: Command, *, has_own: bool
) -> KvBufferDevice | None:
    """Leave out the plain NIXL connector, which the runtime adds with the graph's lease; any other stays an argument.

    Args:
        source: Where losses are reported.
        args_path: Of the worker's arguments.
        command: The worker's.
        has_own: Whether the runtime gives the worker a connector: it transfers KV.

    Returns:
        Where the plain connector keeps its buffer, which a graph states for all workers; None: it does not say.
    """
    text = command.pop_value(CONNECTOR_FLAG)
    names = [each.lower() for each in command.pop_values("--connector")]
    if text is None and names and not set(names) <= _NONE:
        text = _from_names(source, args_path, names)
    if text is None:
        return None
    device = _own_device(text)
    if device is not None:
        return KvBufferDevice(device) if device else None
    command.words += [CONNECTOR_FLAG, text]
    if has_own:
        source.note(args_path, _OVERRIDES, text)
    return None


def _from_names(source: ManifestSource, args_path: KeyPath, names: list[str]) -> str | None:
    unknown = [each for each in names if each not in _LEGACY]
    if unknown:
        source.note(args_path, f"--connector knows {', '.join(_LEGACY)}; it is left out", " ".join(names))
        return None
    found = [_LEGACY[each] for each in names]
    if len(found) == 1:
        return json.dumps(found[0])
    return json.dumps(
        {
            "kv_connector": "PdConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": found},
            "kv_connector_module_path": _DYNAMO_MODULE,
        }
    )


def _own_device(text: str) -> str | None:
    """Return the buffer's device of a plain NIXL connector, empty if it names none; None for any other connector."""
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict) or config.pop("kv_connector", None) != _NIXL:
        return None
    if config.pop("kv_role", None) not in _ROLES:
        return None
    device = config.pop("kv_buffer_device", "")
    return device if not config and device in {"", *KvBufferDevice} else None
