"""Where the API server is and how to be let in, as the official client reads it: kubeconfig or a pod's service account.

Its configuration presents a pod's own token, which it reads again every minute. A kubeconfig's token, plugin or
certificate is read again when the server refuses what was read before.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from penstock.core.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet mounts a pod's own credentials."""

KUBECONFIG: Final = "~/.kube/config"
"""kubectl's own file."""

PLUGIN_TIMEOUT_S: Final = 60.0
"""Chosen: longest wait for a kubeconfig's credential plugin; some ask a cloud."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one client presents.

    Attributes:
        configuration: The official client's: server, token, certificates, proxy.
        namespace: Of the service account or the context; ``default`` otherwise.
    """

    configuration: Configuration
    namespace: str


async def read_credentials(*, kubeconfig: Path | None, context: str | None) -> Credentials:
    """Read the credentials.

    Args:
        kubeconfig: None takes ``$KUBECONFIG``, then ``~/.kube/config``, then the pod's service account.
        context: Of the kubeconfig; None takes its current one.

    Raises:
        ConfigError: there are none, or they cannot be used.
    """
    if kubeconfig is not None and not os.path.isfile(kubeconfig):  # noqa: ASYNC240, PTH113 - rarely, and local
        raise ConfigError(f"--kubeconfig: {kubeconfig}: no such file")
    paths = str(kubeconfig or os.environ.get("KUBECONFIG") or KUBECONFIG)
    try:
        async with asyncio.timeout(PLUGIN_TIMEOUT_S):
            found = await _read(paths, context)
    except TimeoutError as exc:
        raise ConfigError(f"kubeconfig: the credential plugin took more than {PLUGIN_TIMEOUT_S:g} s") from exc
    except Exception as exc:
        # The package hands on whatever a malformed kubeconfig provokes: KeyError, TypeError, YAML errors...
        raise ConfigError(
            f"Kubernetes credentials: {paths}: {type(exc).__name__}: {exc}; give --kubeconfig or KUBECONFIG, "
            "or run in a pod with a service account"
        ) from exc
    if not found.configuration.host:
        raise ConfigError("kubeconfig: clusters: server: missing; name the API server's URL")
    proxy = found.configuration.proxy
    if proxy is not None and not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"kubeconfig: proxy-url {proxy!r}: expected http://HOST:PORT or https://HOST:PORT")
    return found


def remove_key_files() -> None:
    """Remove the files into which the package copied inline keys; it would keep them until the process ends."""
    kube_config._cleanup_temp_files()  # noqa: SLF001 - there is no public way


async def _read(paths: str, context: str | None) -> Credentials:
    configuration = Configuration(host="")
    files = [os.path.expanduser(each) for each in paths.split(os.pathsep)]  # noqa: ASYNC240, PTH111 - as above
    if not any(os.path.exists(each) for each in files) and SERVICE_ACCOUNT.is_dir():  # noqa: ASYNC240, PTH110
        token, authority = SERVICE_ACCOUNT / "token", SERVICE_ACCOUNT / "ca.crt"
        InClusterConfigLoader(str(token), str(authority)).load_and_set(configuration)
        return Credentials(configuration, _own_namespace())
    plugin_errors = _RaisedErrors(logging.ERROR)
    kube_config.logger.addHandler(plugin_errors)
    try:
        loader = await kube_config.load_kube_config(paths, context, configuration, persist_config=False)
    finally:
        kube_config.logger.removeHandler(plugin_errors)
    if token := configuration.api_key.get("BearerToken"):
        configuration.api_key["BearerToken"] = token.strip()  # a tokenFile ends with a newline
    return Credentials(configuration, loader.current_context["context"].get("namespace") or "default")


def _own_namespace() -> str:
    with suppress(OSError, UnicodeDecodeError):
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip() or "default"
    return "default"


class _RaisedErrors(logging.Handler):
    """Raises what the package only logs: why a credential plugin gave nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        raise kube_config.ConfigException(record.getMessage())
