"""API keys: where they come from, and whether a request carries one."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from penstock_core.errors import ConfigError
from penstock_router.proxy.completion import RequestRefused


def read_api_keys(file: Path | None, environment: str | None) -> frozenset[bytes]:
    """Return the accepted keys: one a line from ``file``, comma-separated from ``environment``.

    Of a folder every file is read but those whose name starts with a dot: so a mounted Secret looks, one file
    per key of the Secret. Empty lines and lines that start with ``#`` are skipped.

    Raises:
        ConfigError: a file cannot be read, or holds no key: then nobody could be let in, and letting
            everybody in is not what the file was given for.
    """
    keys: set[str] = set()
    if environment:
        keys.update(_stripped(environment.split(",")))
    if file is not None:
        try:
            files = _visible(file) if file.is_dir() else [file]
            lines = [line for each in files for line in each.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"--api-keys-file: {file}: {exc}; give a readable file, one key a line"
            ) from exc
        found = [line for line in _stripped(lines) if not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-keys-file: {file}: holds no key; write one a line")
        keys.update(found)
    return frozenset(key.encode() for key in keys)


def _visible(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))


def _stripped(values: Iterable[str]) -> list[str]:
    return [value.strip() for value in values if value.strip()]


class KeyCheck:
    """Checks bearer tokens; without keys everybody passes."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = tuple(keys)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._keys

    def check(self, authorization: bytes | None) -> None:
        """Let a request pass.

        Raises:
            RequestRefused: 401, no key or a wrong one.
        """
        if not self._keys:
            return
        scheme, _, token = (authorization or b"").partition(b" ")
        token = token.strip()
        is_known = False
        for key in self._keys:
            # No early end: the time tells nothing about which key came close.
            is_known |= hmac.compare_digest(key, token)
        if scheme.lower() != b"bearer" or not is_known:
            raise RequestRefused(
                401,
                "authorization: missing or unknown key; send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
