"""A proxy before an API server that answers wrongly, late or not at all, as told or at random.

It speaks plain HTTP to the client and TLS to the server, and hands tokens and watches through.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import httpx
import orjson
import yaml

from penstock.core.errors import ClientDisconnected
from penstock.core.http.server import HttpServer

READS = frozenset({"GET"})
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_REASONS = {401: "Unauthorized", 409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}


class Fault(StrEnum):
    """What the proxy does in place of an answer."""

    UNAUTHORIZED = "401"
    CONFLICT = "409"
    BUSY = "429"
    INTERNAL = "500"
    UNAVAILABLE = "503"
    HANG = "hang"
    RESET = "reset"
    DROP = "drop"
    """Resets the connection after the server has carried the call out."""
    DELAY = "delay"
    CUT = "cut"
    """Ends a watch in the middle of a line after a while; does nothing to other calls."""


EVERY_FAULT = tuple(each for each in Fault if each is not Fault.UNAUTHORIZED)


@dataclass
class Rule:
    """Calls that fail.

    Attributes:
        faults: One is drawn for each call.
        path: Matches anywhere in the path.
        rate: Part of the calls, 0 to 1.
        times: Calls that are left to fail; None: no end.
        seconds: That a delay lasts, a hang at most, and a watch before it is cut at most.
        retry_after_s: With 429 and 503.
    """

    faults: tuple[Fault, ...]
    path: str = ""
    methods: frozenset[str] = READS | WRITES
    rate: float = 1.0
    times: int | None = None
    message: str = "as told by the test"
    seconds: float = 2.0
    retry_after_s: int = 1


@dataclass
class FaultyProxy:
    """One proxy.

    Attributes:
        rules: First match wins; none match: the call goes through.
        done: How often each fault was played.
        carried: Writes that the server answered: method, path, name of a created object, status.
    """

    server: object
    rng: object
    rules: list[Rule] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)
    carried: list[tuple[str, str, str, int]] = field(default_factory=list)

    async def __aenter__(self):
        context = ssl.create_default_context(cafile=str(self.server.folder / "ca.crt"))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        # Not one shared client: this one must not repeat, follow or time out on its own account.
        self._upstream = httpx.AsyncClient(verify=context, timeout=None, limits=limits)
        self._front = HttpServer(self._handle)
        self._handlers = set()
        await self._front.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self.rules.clear()
        for task in tuple(self._handlers):
            task.cancel()
        await self._front.close(grace_s=0)
        await self._upstream.aclose()

    def kubeconfig(self, path, *, like=None):
        """Write the kubeconfig of another (None: the administrator's) with this proxy as the server."""
        config = yaml.safe_load((like or self.server.kubeconfig).read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._front.port}"}
        path.write_text(yaml.safe_dump(config))
        return path

    def play(self, *faults, **rule):
        """Fail calls from now on; see `Rule`."""
        self.rules.append(Rule(faults, **rule))

    def heal(self):
        """Let everything through from now on; what hangs is reset."""
        self.rules.clear()
        for task in tuple(self._handlers):
            if task.get_name() == Fault.HANG:
                task.cancel()

    async def _handle(self, request, responder):
        task = asyncio.current_task()
        self._handlers.add(task)
        responder.on_disconnect(task.cancel)
        try:
            await self._answer(request, responder)
        except (httpx.HTTPError, OSError, ClientDisconnected, asyncio.CancelledError):
            responder.abort()
        finally:
            self._handlers.discard(task)
            # The server complains of a handler that returns before the end of its connection is known.
            await asyncio.sleep(0)

    async def _answer(self, request, responder):
        fault, rule = self._drawn(request)
        if fault is None:
            await self._forward(request, responder)
            return
        is_watch = "watch" in request.query
        if fault is Fault.CUT and not is_watch:
            await self._forward(request, responder)
            return
        self.done[fault] += 1
        if fault.isdigit():
            self._refuse(int(fault), rule, responder)
        elif fault is Fault.RESET:
            responder.abort()
        elif fault is Fault.HANG:
            asyncio.current_task().set_name(Fault.HANG)
            await asyncio.sleep(rule.seconds)
            responder.abort()
        elif fault is Fault.DELAY:
            await asyncio.sleep(rule.seconds * self.rng.random())
            await self._forward(request, responder)
        elif fault is Fault.CUT or is_watch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rule.seconds * self.rng.random()):
                    await self._forward(request, responder)
            responder.write(b'{"type":"MODIF')
            responder.abort()
        else:
            async with self._sent(request) as answer:
                await answer.aread()
            responder.abort()

    def _drawn(self, request):
        for rule in self.rules:
            if request.method not in rule.methods or not re.search(rule.path, request.path):
                continue
            if rule.times == 0 or self.rng.random() >= rule.rate:
                return None, None
            if rule.times is not None:
                rule.times -= 1
            return self.rng.choice(rule.faults), rule
        return None, None

    def _refuse(self, code, rule, responder):
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": rule.message,
            "reason": _REASONS.get(code, "ServiceUnavailable"),
            "code": code,
        }
        headers = [(b"retry-after", b"%d" % rule.retry_after_s)] if code in {429, 503} else []
        responder.send(code, orjson.dumps(status), headers=headers)

    @contextlib.asynccontextmanager
    async def _sent(self, request):
        headers = {k: v for k, v in request.headers.items() if k.decode() not in _HOP_BY_HOP}
        url = self.server.url + request.target.decode()
        made = self._upstream.build_request(request.method, url, headers=headers, content=request.body)
        answer = await self._upstream.send(made, stream=True)
        if request.method in WRITES:
            name = orjson.loads(request.body)["metadata"].get("name", "") if request.method == "POST" else ""
            self.carried.append((request.method, request.path, name, answer.status_code))
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _forward(self, request, responder):
        async with self._sent(request) as answer:
            kind = answer.headers.get("content-type", "application/json")
            kept = [
                (name.lower(), value)
                for name, value in answer.headers.raw
                if name.lower() in {b"retry-after", b"warning", b"content-encoding"}
            ]
            responder.start(answer.status_code, content_type=kind, headers=kept)
            async for piece in answer.aiter_raw():
                responder.write(piece)
            responder.end()
