"""Settings of the router that do not apply to requests that a gateway relays, and what applies instead. Pure.

`penstock validate` and the picker print them; `tests/unit/router/test_gateway_limits.py` classifies every key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.api import RouterConfig

_ONE_WORKER: Final = "holds for prefill alone: once Envoy has a request, Penstock tries no other worker"
IGNORED: Final = {
    "limits.connectTimeoutRealSeconds": "holds for prefill alone: Envoy connects to the other workers, by its own limit",
    "limits.clientIdleTimeoutRealSeconds": "does nothing: clients connect to Envoy, by its own limit",
    "keepAliveSeconds": "does nothing: Envoy has no head of an answer to send until the worker has answered",
    "retries.maxPerRequest": _ONE_WORKER,
    "retries.budgetFraction": _ONE_WORKER,
    "retries.minPerSecond": _ONE_WORKER,
    "retries.maxContinuations": "does nothing: Envoy has the stream, which ends with its worker",
    "retries.continueBy": "does nothing: Envoy has the stream, which ends with its worker",
    "retries.continuationWaitSeconds": "does nothing: Envoy has the stream, which ends with its worker",
    "drain.migrateAfterSeconds": "does nothing: Envoy has the streams, and a draining worker waits for their ends",
}
"""Explanation for each setting, by its key below ``router``."""


def ignored_keys(config: RouterConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings of a graph's router section that have no effect behind a gateway: key (``router.…``) and explanation.

    Only keys that ``config`` sets are included.
    """
    given = config.to_manifest()
    for key, words in IGNORED.items():
        section, _, name = key.rpartition(".")
        found: Any = given.get(section, {}) if section else given
        if name in found:
            yield f"router.{key}", f"behind a gateway, {words}"
