"""How commands reach a cluster: the flags, the check for the optional packages, and the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.flags import flag

if TYPE_CHECKING:
    from penstock.kube.client import KubeClient


def require_packages(what: str, *names: str) -> None:
    """Refuse ``what``, a flag or a command, where one of the packages ``names`` is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what}: {', '.join(missing)} not installed; run pip install 'penstock[kubernetes]'"
        )


@dataclass(frozen=True, slots=True)
class Connection:
    """The flags."""

    kubeconfig: Path | None = flag(
        "Kubeconfig file for the cluster.", unset="the pod's service account, otherwise $KUBECONFIG"
    )
    context: str | None = flag("Context of the kubeconfig.", metavar="NAME", unset="its current context")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[KubeClient]:
        """Give a client; call `require_packages` before."""
        from penstock.kube.client import KubeClient  # noqa: PLC0415 - optional extra

        client = await KubeClient.connect(kubeconfig=self.kubeconfig, context=self.context)
        try:
            yield client
        finally:
            await client.close()
