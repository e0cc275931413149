"""Checks a server before a replay: nothing is sent to an address that does not serve."""

from __future__ import annotations

import orjson

from penstock.core.errors import (
    ConfigError,
    NoEndpointsError,
    UpstreamConnectError,
    UpstreamError,
)
from penstock.core.http.client import ConnectionPool, Response, Timeouts, parse_http_url
from penstock.core.metric_names import TIME_SCALE
from penstock.workload.server_pages import ServerPages

_TIMEOUTS = Timeouts(connect_s=5.0, first_byte_s=10.0, idle_s=10.0, total_s=15.0)
"""Chosen: real seconds; a server that lists its models slower than this serves nothing."""


async def check_speed(pool: ConnectionPool, url: str, *, speed: float, admin_key: str | None = None) -> None:
    """Refuse to measure a Penstock graph or worker by another time than its own.

    Asks the router, every worker whose address it lists, or the simulated worker that answers at ``url``
    itself. Other servers run in real time and do not say so: they are not checked.

    Args:
        pool: Kept by the caller, who closes it.
        url: Server's address without a path.
        speed: Time scale: simulated seconds per real second that the caller counts by.
        admin_key: Sent to a router, which shows the workers' addresses to admins only, and the rest to clients, too.

    Raises:
        ConfigError: one of them runs at another speed than ``speed``.
    """
    pages = ServerPages(pool, url, _TIMEOUTS, admin_key=admin_key)
    listed = await pages.workers()
    router_speed = listed.speed if listed is not None else None
    workers = {each.name: each.url for each in listed.workers} if listed is not None else {}
    if listed is None:
        workers = {"the server": pages.url}
    speeds = {name: await _time_scale(pages, worker_url) for name, worker_url in workers.items()}
    for name, served in (("the graph", router_speed), *speeds.items()):
        if served is not None and served != speed:
            raise ConfigError(
                f"--speed: {speed:g}, but {name} at {workers.get(name, url)} runs at {served:g}, so every time"
                f" measured would be wrong; give --speed {served:g}, or start what runs at another speed again"
            )


async def _time_scale(pages: ServerPages, url: str) -> float | None:
    samples = await pages.samples(url, TIME_SCALE)
    return samples[0].value if samples else None


async def find_model(
    pool: ConnectionPool, url: str, *, model: str | None = None, api_key: str | None = None
) -> str:
    """Return the model to ask for, once the server has shown that it can serve it.

    Args:
        pool: Kept by the caller, who closes it.
        url: Server's address without a path.
        model: Name to ask for; None takes the first that the server lists.
        api_key: Sent as a bearer token.

    Raises:
        ConfigError: not a URL, or the server does not list ``model``.
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
    if model is None:
        return names[0]
    if model not in names:
        raise ConfigError(f"--model {model!r}: {url} serves {', '.join(names)}")
    return model


def _names(url: str, listed: Response) -> list[str]:
    if listed.status in {401, 403}:
        raise ConfigError(
            f"--api-key-file, PENSTOCK_API_KEY: {url} refuses the key (status {listed.status}); give the right one"
        )
    try:
        names = [str(model["id"]) for model in orjson.loads(listed.body)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError) as exc:
        raise UpstreamConnectError(
            f"--url {url}: GET /v1/models answers {listed.status}, not a list of models; is it an OpenAI server?"
        ) from exc
    if not names:
        raise NoEndpointsError(f"--url {url}: the server lists no model; wait until a worker is ready")
    return names
