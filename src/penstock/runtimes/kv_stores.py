"""vLLM's connectors for KV that its GPUs have no room for, alone or alongside the one from prefill to decode. Pure.

The router sees none of them: what a prefill worker answers is that of NIXL or Mooncake, which come first, so that a decode
worker fetches a prompt's KV from prefill before it looks into its own store.
Source: vLLM 0.32, ``kv_connector/v1/multi_connector.py`` (all connectors save, the first that has a prompt's tokens loads),
``v1/kv_offload/cpu/spec.py`` and ``lmcache_connector.py``; LMCache's configuration by variables. Not run here: the former
copies between a GPU and its host alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from penstock.api.engine import KvOffloadConfig
from penstock.api.enums import KvStore

_BYTES: Final = 10**9
_GIB: Final = 2**30
_BOTH: Final = "kv_both"


def with_store(config: Mapping[str, Any] | None, offload: KvOffloadConfig | None) -> Mapping[str, Any] | None:
    """Return the transfer configuration of a worker that also keeps KV in a store.

    Args:
        config: From prefill to decode; None: the worker does both.
        offload: None: it keeps none.
    """
    if offload is None:
        return config
    store = _connector(offload)
    if config is None:
        return store
    extra = {"connectors": [config, store]}
    return {"kv_connector": "MultiConnector", "kv_role": _BOTH, "kv_connector_extra_config": extra}


def _connector(offload: KvOffloadConfig) -> dict[str, Any]:
    if offload.store is KvStore.LMCACHE:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": _BOTH}
    extra = {"cpu_bytes_to_use": round(offload.gigabytes * _BYTES)}
    return {"kv_connector": "OffloadingConnector", "kv_role": _BOTH, "kv_connector_extra_config": extra}


def store_variables(offload: KvOffloadConfig | None, gpus: int) -> dict[str, str]:
    """Return the environment variables of LMCache: its share of host memory, in each of a replica's ``gpus`` processes."""
    if offload is None or offload.store is not KvStore.LMCACHE:
        return {}
    share = offload.gigabytes * _BYTES / _GIB / max(1, gpus)
    return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{share:.6g}"}


def store_gib(offload: KvOffloadConfig | None) -> int:
    """Return the host memory that a pod requests for it, GiB."""
    return 0 if offload is None else math.ceil(offload.gigabytes * _BYTES / _GIB)
