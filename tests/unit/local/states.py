"""A statefile and an entry to begin with, for the tests of the local backend."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

from penstock.core.http.server import HttpServer
from penstock.local.statefile import ArbiterInfo, ProcessEntry, StateFile
from penstock.local.store import StateStore, UnwritableError

GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: tiny}
spec:
  model: {name: m, servedName: m}
  runtime: simulated
  services:
    frontend: {role: router}
    worker: {role: aggregated}
"""
SLEEP = "import time; time.sleep(3600)"
LEADER = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], env={{}})
print(child.pid, flush=True)
time.sleep(3600)
"""
"""A leader like vLLM's: the child's environment is blank, so it carries no mark."""


class Disk(StateStore):
    """A statefile on a disk that is full for the next few writes."""

    full_writes = 0.0

    def _replace(self, state):
        if self.full_writes:
            self.full_writes -= 1
            raise UnwritableError(f"{self.path}: cannot be written: No space left on device")
        super()._replace(state)


def make_state(namespace: str = "dynamo", *, gpus: int = 8, budget: int | None = None, **fields) -> StateFile:
    """Return a statefile without entries."""
    arbiter = ArbiterInfo(
        namespace=namespace,
        graph="graph.yaml",
        model="llama",
        gpus=gpus,
        budget=gpus if budget is None else budget,
        router_url="http://127.0.0.1:9",
    )
    return StateFile(replace(arbiter, **fields), {})


def make_entry(service: str = "VllmWorker", role: str = "decode", **fields) -> ProcessEntry:
    """Return an entry of a one-GPU decode worker, with changes."""
    defaults = {"cmd": ("worker", "--port", "{port}"), "gpus_per_replica": 1, "order": 1}
    return ProcessEntry(service=service, role=role, **{**defaults, **fields})


@asynccontextmanager
async def serving(answer):
    """Serve a function of request and responder on a free port; yield the port."""

    async def handle(request, responder):
        answer(request, responder)

    server = HttpServer(handle)
    await server.start("127.0.0.1", 0)
    try:
        yield server.port
    finally:
        await server.close(grace_s=0)
