"""Clients that stream from whatever routers are ready, as a Service would lead them, until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

from penstock.core.errors import PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.kube.informer import Informer
from penstock.kube.kinds import ENDPOINT_SLICE

_HEADERS = ((b"content-type", b"application/json"),)
_PATIENCE_S = 120.0


class ClientLoad:
    """Clients of a graph, each with one stream at a time and a connection for each.

    Attributes:
        model: The name that they ask for.
        answered: Streams that came complete.
        lost: What came of the others.
    """

    def __init__(self, client, namespace, service, *, model, clients=6, tokens=40):
        self.model, self.answered, self.lost = model, 0, []
        self._clients, self._tokens = clients, tokens
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        labels = {"kubernetes.io/service-name": service}
        self._slices = Informer(client, ENDPOINT_SLICE, namespace=namespace, labels=labels)
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def on(self):
        """Load the graph while the body runs; then let the streams under way end."""
        watch = asyncio.create_task(self._slices.run())
        await self._slices.synced.wait()
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = {group.create_task(self._ask_on(number)) for number in range(self._clients)}
                try:
                    yield self
                finally:
                    self._stop.set()
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def end(self):
        """Start no further stream, and wait until those under way have ended."""
        self._stop.set()
        await asyncio.wait(self._tasks)

    def routers(self):
        """Return the addresses that a Service would lead to."""
        return [
            f"http://{each['addresses'][0]}:{port['port']}"
            for found in self._slices.objects.values()
            for port in found["ports"] or ()
            for each in found.get("endpoints") or ()
            if each["conditions"].get("ready")
        ]

    async def _ask_on(self, number):
        for turn in itertools.count():
            if self._stop.is_set():
                return
            problem = await self._ask(f"{number} {turn} " + "word " * 200)
            if problem is None:
                self.answered += 1
            else:
                self.lost.append(problem)
                await asyncio.sleep(0.2)

    async def _ask(self, prompt):
        """Stream one completion; return its problem, None: it came complete."""
        routers = self.routers()
        if not routers:
            return "no router is ready"
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{routers[next(self._turns) % len(routers)]}/v1/completions"
        pool, timeouts = ConnectionPool(), Timeouts(total_s=_PATIENCE_S)
        content = json.dumps(body).encode()
        try:
            answer = await pool.request("POST", url, body=content, headers=_HEADERS, timeouts=timeouts)
        except PenstockError as exc:
            return f"{type(exc).__name__}: {exc}"
        finally:
            await pool.close()
        text = answer.body.decode()
        if answer.status != 200 or '"error"' in text or not text.rstrip().endswith("data: [DONE]"):
            return f"status {answer.status}: {text[-300:]}"
        return None
