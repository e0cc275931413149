"""A router and simulated workers in this process, for the official clients' suites."""

import asyncio
from contextlib import asynccontextmanager

from penstock.api import Role
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.router.core.worker import WorkerSpec
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

KEY = "sk-test"


@asynccontextmanager
async def simulated_graph(*roles, **settings):
    """Serve one model by a worker of each role; yields the router."""
    async with asyncio.TaskGroup() as group:
        servers = []
        for role in roles:
            flags = ServeFlags(
                "m",
                "h200-llama-3.1-8b-tp1",
                role=EngineRole(role),
                served_names=("llama",),
                port=0,
                speed=50.0,
            )
            servers.append(EngineServer(resolve(flags), group))
            await servers[-1].start()
        specs = tuple(
            WorkerSpec(f"{role}-0", Role(role), server.url, supervised=True)
            for role, server in zip(roles, servers, strict=True)
        )
        router = RouterServer(
            RouterSettings(
                model="llama",
                disaggregated=len(roles) > 1,
                workers=specs,
                speed=50.0,
                lease_s=600.0,
                api_keys=frozenset({KEY.encode()}),
                **settings,
            )
        )
        await router.start()
        yield router
        await router.close()
        for server in servers:
            await server.close(grace_s=0)
