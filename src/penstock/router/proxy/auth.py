"""Authentication and authorization: keys of clients, tiers and admins, the graph's secret, and web pages of listed origins (CORS).

CORS is only allowed for paths below ``/v1``, not for health, metrics and workers. Credentials (cookies) are never allowed;
pages send their key in ``Authorization``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.core.http.messages import Headers, Request
from penstock.router.proxy.completion import RequestRefused


class KeySource(NamedTuple):
    """The command-line option and the environment variable from which the keys of one kind are read.

    Attributes:
        flag: Name of the option, for a file or folder with keys.
        variable: Name of the environment variable, for comma-separated keys.
    """

    flag: str
    variable: str


_BEARER: Final = ((b"www-authenticate", b"Bearer"),)
API_KEYS: Final = KeySource("--api-keys-file", "PENSTOCK_API_KEYS")
ADMIN_KEYS: Final = KeySource("--admin-keys-file", "PENSTOCK_ADMIN_KEYS")
TIER_KEYS: Final = KeySource("--tier-keys-file", "PENSTOCK_TIER_KEYS")


def read_keys(source: KeySource, file: Path | None, environment: str | None) -> frozenset[bytes]:
    """Return the accepted keys: one per line of a file or of all files in a folder, and comma-separated from the variable's value.

    In a folder, files whose names start with a dot are skipped: this is the layout of a mounted Secret, with one file per key
    of the Secret. Empty lines and lines that start with ``#`` are skipped. Returns an empty set if both sources are None.

    Args:
        source: Names of the option and the variable, for error messages.
        file: File or folder with keys; None if the option is not set.
        environment: Value of the variable; None if it is not set.

    Raises:
        ConfigError: a file cannot be read, or a source is set but contains no key. No client could then be accepted, and
            accepting all clients would be the opposite of the intention.
    """
    keys: set[str] = set()
    if environment is not None:
        keys.update(_without_blanks(environment.split(",")))
        if not keys:
            raise ConfigError(
                f"{source.variable}: set, but holds no key; write keys, comma-separated, or unset it to ask for none"
            )
    if file is not None:
        try:
            files = _visible_files(file) if file.is_dir() else [file]
            lines = [line for each in files for line in each.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{source.flag}: {file}: {exc}; give a readable file, one key a line") from exc
        found = [line for line in _without_blanks(lines) if not line.startswith("#")]
        if not found:
            raise ConfigError(f"{source.flag}: {file}: holds no key; write one a line")
        keys.update(found)
    return frozenset(key.encode() for key in keys)


def _visible_files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))


def _without_blanks(values: Iterable[str]) -> list[str]:
    return [value.strip() for value in values if value.strip()]


class TierIdentity(NamedTuple):
    """Tier and tenant of a request, or of all requests with a certain key.

    Attributes:
        tier: Tier of the request. For an API key, the highest tier that requests with the key may have, and the tier of
            those that name no tier.
        tenant: Name of the tenant; empty if there is none.
    """

    tier: Tier
    tenant: str = ""


class TierKeys:
    """API keys that select a tier (priority class), looked up by their digests.

    Comparing digests keeps the time of a look-up from revealing anything about a key.

    Attributes:
        keys: All API keys that select a tier.
    """

    def __init__(self, keys: Mapping[bytes, TierIdentity]) -> None:
        self.keys: Final = frozenset(keys)
        self._by_digest = {_digest(key): value for key, value in keys.items()}

    def of(self, authorization: bytes | None) -> TierIdentity | None:
        """Return the tier (priority class) and tenant of the API key in an Authorization header.

        ``authorization`` is the header's value, None if there is no such header. Returns None then, or if the key selects no
        tier.
        """
        token = _bearer_token(authorization)
        return None if token is None or not self._by_digest else self._by_digest.get(_digest(token))


def read_tier_keys(file: Path | None, environment: str | None) -> TierKeys:
    """Return the API keys that select a tier (priority class): one per line, each ``KEY TIER`` or ``KEY TIER TENANT``.

    They are read from a file or folder, and from the value of an environment variable, as by `read_keys`. A key without a
    tenant is a tenant of its own.

    Args:
        file: File or folder with keys; None if the option is not set.
        environment: Value of the variable, with keys separated by commas; None if it is not set.

    Raises:
        ConfigError: a file cannot be read, there is no key, a line does not have this form, or a key occurs twice; the
            message contains no key.
    """
    keys: dict[bytes, TierIdentity] = {}
    for line in sorted(read_keys(TIER_KEYS, file, environment)):
        words = line.decode().split()
        if len(words) not in {2, 3} or words[1] not in set(Tier):
            shown = " ".join(("KEY", *words[1:]))[:80]
            raise ConfigError(
                f"{TIER_KEYS.flag}: {shown!r}: must be KEY TIER, or KEY TIER TENANT; tiers are {', '.join(Tier)}"
            )
        key = words[0].encode()
        if key in keys:
            raise ConfigError(
                f"{TIER_KEYS.flag}: a key is given twice, as {keys[key].tier} and {words[1]}; keep one"
            )
        keys[key] = TierIdentity(Tier(words[1]), words[2] if len(words) == 3 else f"key-{_digest(key)[:8]}")
    return TierKeys(keys)


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def credentials(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the value of the Authorization header in ``headers`` (values by lower-case name); None if it is missing.

    Anthropic's clients send a key as ``x-api-key``, which is returned as ``Bearer KEY``.
    """
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", None if key is None else b"Bearer " + key)


def _bearer_token(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


class KeyCheck:
    """Checks the keys in Authorization headers (bearer tokens) against a set of accepted keys.

    Digests of the keys are compared, so that the time of a check reveals nothing about an accepted key.
    """

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._digests = frozenset(map(_digest, keys))

    def check(self, authorization: bytes | None) -> None:
        """Check that ``authorization``, the value of an Authorization header, contains one of the accepted keys.

        None is a request without this header, which is rejected.

        Raises:
            RequestRefused: 401, there is no key or a wrong one.
        """
        if not self.holds(authorization):
            raise RequestRefused(
                401,
                "authorization: missing or unknown key; send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=_BEARER,
            )

    def holds(self, authorization: bytes | None) -> bool:
        """Return whether ``authorization``, the value of an Authorization header, contains an accepted key; False if it is None."""
        token = _bearer_token(authorization)
        return token is not None and _digest(token) in self._digests


GRAPH_SECRET: Final = b"x-penstock-graph-secret"
"""Header by which the routers of a graph authenticate to each other; it is not passed on to workers or clients."""


class GraphSecret:
    """The secret of a graph, which its routers send with requests to each other, so that the receiver recognizes them.

    Without a secret (empty bytes), no request counts as a router's.

    Attributes:
        headers: Headers that a request to another router must contain; empty without a secret.
    """

    def __init__(self, secret: bytes) -> None:
        self.headers = ((GRAPH_SECRET, secret),) if secret else ()

    def holds(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the ``headers`` of a request contain the graph's secret, so that it comes from a router of the graph."""
        sent = headers.get(GRAPH_SECRET, b"")
        return any(hmac.compare_digest(sent, secret) for _, secret in self.headers)


class AdminCheck:
    """Decides who may drain workers, see their addresses and change thresholds.

    With admin keys, this is allowed to clients that send one of them. ``keys`` are the admin keys. Without admin keys, it
    is allowed to programs on this machine, while the router listens on loopback only and requires no client keys
    (``is_local``). It is never allowed to a web page, because a browser can send requests from this machine on a page's
    behalf.

    Attributes:
        is_keyed: Whether there are admin keys.
        is_off: Whether administration is disabled for all clients.
    """

    def __init__(self, keys: frozenset[bytes], *, is_local: bool) -> None:
        """Store the admin keys, one of which a request must contain; if ``keys`` is empty, no key can be required.

        ``is_local`` says that only programs on this machine can reach the router, and that all of them are trusted.
        """
        self._keys = KeyCheck(keys)
        self._is_local = is_local
        self.is_keyed = bool(keys)
        self.is_off = not self.is_keyed and not is_local

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check that a request with these headers may administer the router (drain workers, change thresholds).

        Raises:
            RequestRefused: 403, the request comes from a web page or a proxy, or administration is off; 401, it has no admin
                key or a wrong one.
        """
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none":
            raise RequestRefused(403, "origin: web pages may not administer workers", code="cross_site")
        if self.is_keyed:
            if not self._keys.holds(headers.get(b"authorization")):
                raise RequestRefused(
                    401,
                    "authorization: missing or unknown admin key; send 'Authorization: Bearer ADMIN_KEY'",
                    code="invalid_admin_key",
                    headers=_BEARER,
                )
            return
        if not self._is_local:
            raise RequestRefused(
                403,
                f"admin: off, because the router has no admin key and does not serve this machine alone; set"
                f" {ADMIN_KEYS.variable} or {ADMIN_KEYS.flag}",
                code="admin_off",
            )
        if not _names_this_machine(headers.get(b"host", b"")) or not _PROXIED.isdisjoint(headers):
            # A page whose host name resolves to loopback (DNS rebinding) is same-origin with the router, so it sends no
            # Origin header.
            raise RequestRefused(
                403,
                f"host: administer from this machine, by 127.0.0.1 or localhost, or set {ADMIN_KEYS.variable}",
                code="cross_site",
            )

    def allows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request with these headers may administer the router (drain workers, change thresholds).

        The conditions are those for which `check` raises no exception.
        """
        try:
            self.check(headers)
        except RequestRefused:
            return False
        return True


_PROXIED: Final = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})


def is_from_this_machine(request: Request) -> bool:
    """Return whether a request comes from a program on this machine and was not forwarded by a proxy."""
    return is_loopback(request.peer.rpartition(":")[0]) and _PROXIED.isdisjoint(request.headers)


def _names_this_machine(host: bytes) -> bool:
    name = host.decode("latin-1").strip()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address, without a port, is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_EXPOSED: Final = b"x-request-id, retry-after"
_MAX_AGE_S: Final = b"600"
"""Seconds for which a browser may cache the response to a preflight. Chosen: Chrome's maximum is two hours."""
_MAX_ASKED_BYTES: Final = 1024
"""Maximum size of the list of headers that a page asks to send. Chosen: the official SDKs use about 300 bytes."""


class Cors:
    """CORS headers for web pages of allowed origins.

    ``origins`` are the allowed origins; ``*`` allows all.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, path: str, sent: Mapping[bytes, bytes]) -> Headers:
        """Return the CORS headers to add to the response to a request for ``path`` with the headers ``sent``.

        Each is a pair of name and value. They allow a web page of the request's origin to read the response. If the origin is
        not allowed, or the request has none, the result contains only Vary; for a path outside of ``/v1``, or if no origins
        are allowed, it is empty.
        """
        if not self._origins or not path.startswith("/v1/"):
            return ()
        origin = sent.get(b"origin")
        vary = (b"vary", b"Origin")
        if origin is None or not self._allows(origin):
            # With Vary, a cache does not return this response to a page of an allowed origin.
            return (vary,)
        return (vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED))

    def preflight(self, method: str, path: str, sent: Mapping[bytes, bytes]) -> Headers | None:
        """Return the headers of the response to a preflight (by which a browser asks which requests a web page may send).

        They allow the page's origin to send requests with the headers that it asks for. Returns None if the request is not a
        preflight, or not from an allowed origin; the request is then treated like any other.

        Args:
            method: HTTP method of the request; that of a preflight is OPTIONS.
            path: Path of the request.
            sent: Headers of the request, values by lower-case name.
        """
        if method != "OPTIONS":
            return None
        origin = sent.get(b"origin")
        is_asked = b"access-control-request-method" in sent
        if not is_asked or not path.startswith("/v1/") or origin is None or not self._allows(origin):
            return None
        asked = sent.get(b"access-control-request-headers", b"")[:_MAX_ASKED_BYTES]
        return (
            (b"vary", b"Origin, Access-Control-Request-Headers"),
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", _MAX_AGE_S),
        )

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins
