"""Asks a server who it is before a replay: nothing is sent to an address that does not serve."""

from __future__ import annotations

import orjson

from penstock_core.errors import ConfigError, NoEndpointsError, UpstreamConnectError, UpstreamError
from penstock_wire.client import ConnectionPool, Response, Timeouts, parse_http_url

_TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=10.0, idle_s=10.0, total_s=15.0)
"""Chosen: real seconds; a server that lists its models slower than this serves nothing."""


async def check_speed(pool: ConnectionPool, url: str, *, speed: float) -> None:
    """Refuse to measure a Penstock graph by another time than its own; other servers do not tell theirs.

    Raises:
        ConfigError: the router's speed is not ``speed``.
    """
    try:
        answer = await pool.request("GET", f"{url.rstrip('/')}/workers", timeouts=_TIMEOUTS)
        served = orjson.loads(answer.body)["speed"] if answer.status == 200 else speed
    except (UpstreamError, orjson.JSONDecodeError, KeyError, TypeError):
        return
    if served != speed:
        raise ConfigError(
            f"--speed: {speed:g}, but the graph at {url} runs at {served:g}, so every time measured would be"
            f" wrong; give --speed {served:g}"
        )


async def find_model(
    pool: ConnectionPool, url: str, *, wanted: str | None = None, api_key: str | None = None
) -> str:
    """Return the model to ask for, once the server has shown that it can serve it.

    Args:
        pool: Kept by the caller, who closes it.
        url: Server's address without a path.
        wanted: Name to ask for; None takes the first that the server lists.
        api_key: Sent as a bearer token.

    Raises:
        ConfigError: not a URL, or the server does not list ``wanted``.
        UpstreamError: nothing answers there, or not as an OpenAI server does.
        NoEndpointsError: a Penstock router that has no worker to send to.
    """
    base = url.rstrip("/")
    parse_http_url(base)
    headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
    try:
        listed = await pool.request("GET", f"{base}/v1/models", headers=headers, timeouts=_TIMEOUTS)
        ready = await pool.request("GET", f"{base}/ready", headers=headers, timeouts=_TIMEOUTS)
    except UpstreamError as exc:
        raise UpstreamConnectError(
            f"--url {url}: no answer ({exc}); start a graph with `penstock up`, or give the address it printed"
        ) from exc
    names = _names(url, listed)
    if ready.status == 503:
        reasons = ready.body[:500].decode("utf-8", "replace")
        raise NoEndpointsError(f"--url {url}: the router is not ready to serve: {reasons}")
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise ConfigError(f"--model {wanted!r}: {url} serves {', '.join(names)}")
    return wanted


def _names(url: str, listed: Response) -> list[str]:
    if listed.status in {401, 403}:
        raise ConfigError(f"--api-key: {url} refuses it (status {listed.status}); give the right one")
    try:
        names = [str(model["id"]) for model in orjson.loads(listed.body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as exc:
        raise UpstreamConnectError(
            f"--url {url}: GET /v1/models answers {listed.status}, not a list of models; is it an OpenAI server?"
        ) from exc
    if not names:
        raise NoEndpointsError(f"--url {url}: the server lists no model; wait until a worker is ready")
    return names
