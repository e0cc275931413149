"""Decides what podTemplates in a namespace are allowed to use: the installation's allowances and those of the namespace's profile.

A label of the namespace names the profile. The namespace is read by GET, which a Role in the namespace can grant. If
the installation defines no profiles, nothing is read. Called by the reconcilers of graphs and of ProfileRequests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from penstock.core.errors import ClusterError
from penstock.core.logs import get_logger
from penstock.core.lru_cache import LruCache
from penstock.kube.client import KubeClient
from penstock.kube.kinds import NAMESPACE
from penstock.kube.objects.names import POD_TEMPLATES_LABEL
from penstock_operator.resources.allowances import Allowances

FRESH_S: Final = 60.0
"""Wall-clock seconds for which a namespace's label is cached. Chosen: people change labels by hand, but a graph is
reconciled in bursts."""

NAMESPACES: Final = 4096
"""Maximum number of cached namespaces. Chosen: some 100 bytes each."""

log = get_logger(__name__)


class NamespaceAllowances:
    """Returns the privileges that podTemplates in a namespace are allowed to use.

    A namespace can name a profile of additional privileges by its label ``penstock.dev/pod-templates``. The label is
    cached for 60 wall-clock seconds (`FRESH_S`).
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        everywhere: Allowances,
        profiles: Mapping[str, Allowances],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._everywhere = everywhere
        self._profiles = profiles
        self._now_s = now_s
        self._read: LruCache[str, tuple[float, Allowances]] = LruCache(NAMESPACES)

    async def of(self, namespace: str) -> Allowances:
        """Return the privileges that podTemplates in ``namespace`` are allowed to use: the installation's and those of a profile.

        The profile is named by the namespace's label ``penstock.dev/pod-templates``; without the label there are no
        additional privileges.

        If the namespace's label cannot be read, returns what applied last, or else what the installation allows
        everywhere. A label that names an unknown profile is logged and ignored.
        """
        if not self._profiles:
            return self._everywhere
        known = self._read.get(namespace)
        if known is not None and self._now_s() - known[0] < FRESH_S:
            return known[1]
        found = self._everywhere if known is None else known[1]
        try:
            labels = (await self._client.get(NAMESPACE, namespace))["metadata"].get("labels") or {}
        except ClusterError as exc:
            log.warning("namespace not read", namespace=namespace, error=str(exc))
        else:
            found = self._allowed(namespace, labels.get(POD_TEMPLATES_LABEL, ""))
        self._read.put(namespace, (self._now_s(), found))
        return found

    def _allowed(self, namespace: str, name: str) -> Allowances:
        if not name:
            return self._everywhere
        if name not in self._profiles:
            known = ", ".join(sorted(self._profiles))
            log.warning("unknown profile of podTemplates", namespace=namespace, profile=name, known=known)
            return self._everywhere
        return self._everywhere.with_profile(self._profiles[name])
