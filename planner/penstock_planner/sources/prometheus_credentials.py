"""Credentials that the planner sends to a Prometheus server, and the CA by which it verifies the server.

A graph names its Prometheus server, and could name one that must not receive a token. Therefore a file of the planner process lists the
credentials by origin. Credential files are read again at each request, since Kubernetes rotates them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from requests import PreparedRequest, Session

_FLAG = "--prometheus-credentials"


class OriginCredentials(BaseModel):
    """Files with the credentials for one origin (scheme, host and port); relative paths start at the planner's working directory.

    Attributes:
        token_file: File with a bearer token; None sends no token.
        ca_file: PEM file of the CAs that verify the server; None uses the system's.
        certificate_file, key_file: PEM files of the client certificate and its key; None sends no certificate. Either
            both are set or neither is.
    """

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)

    token_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    @model_validator(mode="after")
    def _is_pair(self) -> Self:
        if (self.certificate_file is None) is not (self.key_file is None):
            raise ValueError("certificateFile and keyFile belong together; give both or neither")
        return self

    def give_to(self, session: Session) -> None:
        """Configure an HTTP session so that its requests use these credentials: token, CA and client certificate."""
        if self.ca_file is not None:
            session.verify = str(self.ca_file)
        if self.certificate_file is not None and self.key_file is not None:
            session.cert = (str(self.certificate_file), str(self.key_file))
        if self.token_file is not None:
            session.auth = _BearerToken(self.token_file)


class _BearerToken:
    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._file.read_text(encoding='utf-8').strip()}"
        return request


def credentials_for(url: str, file: str | None) -> OriginCredentials | None:
    """Return the credentials for the server of a URL; None if there is no file, or it does not list the server.

    Args:
        url: Address of the Prometheus server.
        file: YAML file that maps origins, such as ``https://HOST:PORT``, to `OriginCredentials`; None for none.

    Raises:
        ConfigError: the file is invalid, or would send a token without TLS.
    """
    if file is None:
        return None
    found = _read(file).get(_origin(url))
    if found is not None and found.token_file is not None and urlsplit(url).scheme != "https":
        raise ConfigError(f"{_FLAG}: {file}: a token for {url} would travel in clear text; use https")
    return found


def _read(file: str) -> dict[str, OriginCredentials]:
    try:
        given: Any = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ConfigError(f"{_FLAG}: {file}: must map origins, such as https://HOST:PORT, to files")
        return {
            _origin(str(url)): OriginCredentials.model_validate(each or {}) for url, each in given.items()
        }
    except (OSError, ValueError, yaml.YAMLError) as exc:
        shown = exc.errors()[0]["msg"] if isinstance(exc, ValidationError) else exc
        raise ConfigError(f"{_FLAG}: {file}: {shown}; see docs/planner.md") from exc


def _origin(url: str) -> str:
    """Return scheme, host and port of a URL; the port is always included."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"
