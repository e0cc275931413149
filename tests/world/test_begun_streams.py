"""What may happen to a graph while streams speak, in pairs: no begun stream is lost, whatever else is switched on.

The promises about begun streams were right alone and wrong together, so that each pair of values of the factors below meets in
one case of real processes. In each case every stream is complete and says what it says undisturbed, the same requests are served
afterwards, and nothing is left in the books: no request in flight, none waiting, no KV block held.
"""

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field

import pytest
from allpairspy import AllPairs
from patience import LIMIT_S, SLOWNESS, until

from penstock.api import Role
from penstock.local.ports import unused_port
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget

FACTORS = {
    "decode": [1, 2, 3],
    "fault": ["one dies", "all die", "two die in turn", "drain", "role switch", "scale-down", "freeze"],
    "tiers": ["off", "on", "rejection", "shedding"],
    "routers": [1, 3],
    "streams": [12, 60, 200],
    "api": ["completions", "chat/completions", "responses", "messages"],
    "router": ["new", "restarted"],
}
TIERS = {
    "off": "",
    "on": ", tiers: {enabled: true, shedding: {enabled: false}}",
    "rejection": ", tiers: {enabled: true, shedding: {enabled: false}}, admission: {mode: token-capacity}",
    "shedding": ", tiers: {enabled: true}, admission: {mode: token-capacity}",
}
PROMPTS = 6
"""Each is sent by many streams: what one of them says undisturbed, all have to say."""
BEGUN_CHARACTERS = 40


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    decode: int
    fault: str
    tiers: str
    routers: int
    streams: int
    api: str
    router: str

    def __str__(self) -> str:
        """Return its name as a test's parameter."""
        return f"{self.decode} decode, {self.fault}, tiers {self.tiers}, {self.routers} routers, {self.streams} {self.api}, {self.router}"

    @property
    def is_continued(self) -> bool:
        """Whether another worker can continue its streams; see `penstock.router.proxy.not_resumable`."""
        return self.api != "messages"

    @property
    def tokens(self) -> int:
        """Return the tokens of each stream: none may end before the last has begun."""
        return int((150 + 1.5 * self.streams) * SLOWNESS)


def _is_possible(row):
    """Return whether the only decode worker keeps its role: no graph gives it away."""
    values = dict(zip(FACTORS, row, strict=False))
    return not (values.get("decode") == 1 and values.get("fault") in {"role switch", "scale-down"})


CASES = [Case(*row) for row in AllPairs(list(FACTORS.values()), filter_func=_is_possible)]
SOON = [
    Case(1, "all die", "on", 1, 60, "chat/completions", "new"),
    Case(3, "two die in turn", "rejection", 1, 24, "completions", "restarted"),
]
"""The part that runs with the slow tests."""


def _body(api, prompt, tokens):
    body = {"model": "m", "stream": True, "temperature": 0, "max_tokens": tokens}
    if api == "completions":
        return body | {"prompt": prompt, "ignore_eos": True}
    if api == "responses":
        del body["max_tokens"]
        return body | {"input": prompt, "max_output_tokens": tokens}
    body["messages"] = [{"role": "user", "content": prompt}]
    return body if api == "messages" else body | {"ignore_eos": True}


@dataclass(eq=False)
class ApiStream:
    """One stream of any API, read without any of the product's code.

    Attributes:
        problem: Why it is not complete; None: it is.
        is_broken: It ended in an error event, after its beginning.
    """

    port: int
    api: str
    body: dict
    tier: str = ""
    text: str = ""
    problem: str | None = "not sent"
    is_broken: bool = False
    is_over: bool = field(default=False, init=False)

    async def read(self):
        """Send the request and read to the end."""
        content = json.dumps(self.body).encode()
        tier = f"x-penstock-tier: {self.tier}\r\n" if self.tier else ""
        head = f"POST /v1/{self.api} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{tier}content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        try:
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(head.encode() + content)
                status = (await reader.readline()).decode().strip()
                self.problem = f"no end after {status!r}"
                while line := await reader.readline():
                    self._take(line.strip())
                writer.close()
        except (OSError, TimeoutError, ValueError) as exc:
            self.problem = repr(exc)
        self.is_over = True

    def _take(self, line):
        if line == b"data: [DONE]":
            self.problem = None
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            kind = event.get("type")
            if event.get("error") or kind in {"error", "response.failed"}:
                self.problem, self.is_broken = str(event)[:200], bool(self.text)
                return
            if kind in {"response.completed", "response.incomplete", "message_stop"}:
                self.problem = None
            self.text += _text_of(event)
        elif line.startswith(b"{"):
            self.problem = line.decode()[:200]


def _text_of(event):
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    choices = event.get("choices") or []
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)


class Graph:
    """The processes of one case."""

    def __init__(self, world, case):
        self.world, self.case = world, case
        self.ports = [world.port]

    async def up(self):
        """Start the graph and its further routers; restart the first one where the case says so."""
        world, case = self.world, self.case
        router = (
            "{health: {unreachableRealSeconds: 5}, drain: {migrateAfterSeconds: 1}" + TIERS[case.tiers] + "}"
        )
        manifest = world.manifest(decode=case.decode, router=router, switchable="true", stream_interval=1)
        await asyncio.to_thread(world.up, manifest, speed=1, flags=("--no-planner",))
        for number in range(1, case.routers):
            port = unused_port()
            self.ports.append(port)
            flags = ("--graph", manifest, "--port", port, "--discovery", world.statefile)
            world.start("router", "serve", *flags, name=f"router-{number}")
        if case.router == "restarted":
            (name,) = world.entries("router")
            pid = world.entries("router")[name]["pid"]
            os.kill(pid, signal.SIGKILL)
            await until(
                lambda: (
                    [each["pid"] for each in world.entries("router", "ready").values()] not in ([], [pid])
                ),
                "the router is a new process",
            )
        for port in self.ports:
            await until(lambda port=port: _serves(port), f"router at {port} serves", blocks=True)

    def streams(self, count):
        """Return streams that have not begun, over all routers and tiers."""
        case, tiers = self.case, ("premium", "standard", "background")
        return [
            ApiStream(
                self.ports[number % len(self.ports)],
                case.api,
                _body(case.api, f"{number % PROMPTS:08d}" + "word" * 30, case.tokens),
                tiers[number % 3] if case.tiers != "off" else "",
            )
            for number in range(count)
        ]

    async def disturb(self, streams):
        """Let the case's fault happen, and return once it is over."""
        world, fault = self.world, self.case.fault
        decode = list(world.entries("decode", "ready"))
        if fault in {"one dies", "all die"}:
            for name in decode if fault == "all die" else decode[:1]:
                world.kill(name)
        elif fault == "two die in turn":
            world.kill(decode[0])
            said = {each: len(each.text) for each in streams}
            await until(
                lambda: all(each.is_over or len(each.text) > said[each] for each in streams),
                "every stream has continued",
            )
            await until(lambda: decode[-1] in world.entries("decode", "ready"), "the next victim serves")
            world.kill(decode[-1])
        elif fault == "drain":
            for port in self.ports:
                await asyncio.to_thread(world.post, f"http://127.0.0.1:{port}/workers/{decode[0]}/drain")
            await asyncio.sleep(3)
            for port in self.ports:
                await asyncio.to_thread(world.post, f"http://127.0.0.1:{port}/workers/{decode[0]}/undrain")
        elif fault == "freeze":
            pid = world.entries("decode")[decode[0]]["pid"]
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(8)
            os.kill(pid, signal.SIGCONT)
        else:
            target, left = LocalTarget(StateStore(world.statefile)), len(decode) - 1
            if fault == "scale-down":
                await target.scale(Role.DECODE, left, decision_id="d000001")
            else:
                replicas = {Role.DECODE: left, Role.PREFILL: 2}
                await target.switch(Role.DECODE, Role.PREFILL, replicas=replicas, decision_id="d000001")
            await target.close()

    async def check_books(self):
        """Nothing is in flight or waits at any router, and no worker holds a request or a KV block."""
        world = self.world
        for port in self.ports:
            url = f"http://127.0.0.1:{port}"
            await until(
                lambda url=url: not _busy_router(world, url), f"{url} has nothing in flight", blocks=True
            )
        await until(lambda: not self._held(), "no worker holds anything", blocks=True)

    def _held(self):
        held = {}
        for role in ("prefill", "decode"):
            for name, entry in self.world.entries(role, "ready").items():
                for metric in (
                    "vllm:num_requests_running",
                    "vllm:num_requests_waiting",
                    "vllm:kv_cache_usage_perc",
                ):
                    value = sum(self.world.samples(metric, entry["url"]).values())
                    if value:
                        held[name, metric] = value
        return held


def _serves(port):
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
            return True
    except OSError:
        return False


def _busy_router(world, url):
    names = ("penstock_router_worker_inflight_requests", "penstock_router_prefill_queue_requests")
    return {name: found for name in names if any((found := world.samples(name, url)).values())}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(each, id=str(each)) for each in SOON),
        *(pytest.param(each, id=str(each), marks=pytest.mark.nightly) for each in CASES),
    ],
)
async def test_no_begun_stream_is_lost(world, case):
    """Whatever happens together: each is complete, says the same, and its request is served again; the books are empty."""
    graph = Graph(world, case)
    await graph.up()
    undisturbed = graph.streams(PROMPTS)
    await asyncio.gather(*(each.read() for each in undisturbed))
    assert [each.problem for each in undisturbed if each.problem] == [], world.logs()
    streams = graph.streams(case.streams)
    tasks = [asyncio.create_task(each.read()) for each in streams]
    await until(
        lambda: all(each.is_over or len(each.text) > BEGUN_CHARACTERS for each in streams),
        "every stream speaks",
    )
    refused = [each for each in streams if each.is_over and not each.text]
    begun = [each for each in streams if each not in refused]
    # Under rejection or shedding a request may be refused, before its first token.
    assert case.tiers in {"rejection", "shedding"} or not refused
    speaking = [each for each in begun if not each.is_over]
    assert len(speaking) > case.streams / 3, "too many streams ended before the last one began"
    await graph.disturb(begun)
    await asyncio.gather(*tasks)

    lost = [each.problem for each in begun if each.problem]
    wrong = [
        each
        for n, each in enumerate(streams)
        if each in begun and not each.problem and each.text != undisturbed[n % PROMPTS].text
    ]
    if case.is_continued:
        assert lost == [], world.logs()
    else:
        assert [each.problem for each in begun if each.problem and not each.is_broken] == []
    assert wrong == []
    again = graph.streams(PROMPTS)
    for each in again:
        # Lower tiers may be shed for a while after a fault.
        each.tier = each.tier and "premium"
    await asyncio.gather(*(each.read() for each in again))
    assert [each.problem for each in again if each.problem] == [], world.logs()
    await graph.check_books()
    complete = sum(not each.problem for each in speaking)
    print(f"{case}: {complete} of {len(speaking)} begun streams complete")  # noqa: T201 - the table of a night
