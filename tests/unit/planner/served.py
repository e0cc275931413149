"""Metrics pages behind real HTTP servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from penstock.api import Role
from penstock.core.http.server import HttpServer
from penstock_planner.sources.base import Query
from penstock_planner.targets.base import Endpoint

HANG = "hang"
"""In place of a page: no answer ever comes."""


@asynccontextmanager
async def served(page, status=200):
    """Serve a page, or what a function makes of each request, on a free port; None is an error of the server."""

    async def handle(request, responder):
        body = page(request) if callable(page) else page
        if body is HANG:
            await asyncio.Event().wait()
        if body is None:
            responder.send(500, b"broken")
        else:
            responder.send(status, body.encode(), content_type="text/plain")

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close(grace_s=0)


def decode(index, url="http://127.0.0.1:9"):
    """A decode worker."""
    return Endpoint(f"llama_decode_{index}", Role.DECODE, url)


def prefill(index, url="http://127.0.0.1:9"):
    """A prefill worker."""
    return Endpoint(f"llama_prefill_{index}", Role.PREFILL, url)


QUERY = Query((decode(0), prefill(0)), 10.0)
