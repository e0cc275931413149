"""Every runtime behind Penstock's router: transfer, cancel and kill, with workers that write pages as the engines do."""

import asyncio
import sys
from pathlib import Path

import orjson
import pytest
from runtime_pages import JOINS, graph_of, page

from penstock.api.runtimes import traits_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "router"))

from fake_workers import Answers, FakeWorker  # noqa: E402 - the router's tests bring them
from router_harness import Harness  # noqa: E402 - likewise

pytestmark = pytest.mark.usefixtures("acme")


@pytest.fixture(params=sorted(JOINS))
def routed(request):
    """The name of each runtime behind Penstock's router."""
    return request.param


class OwnPages(FakeWorker):
    """A worker with the page of its runtime."""

    runtime = "vllm"

    async def complete(self, request, responder):
        """Answer, as a context server of TensorRT-LLM where it is one."""
        params = orjson.loads(request.body).get("disaggregated_params") or {}
        if params.get("request_type") != "context_only":
            await super().complete(request, responder)
            return
        said = {**params, "ctx_request_id": 7, "first_gen_tokens": [5], "encoded_opaque_state": "b3BhcXVl"}
        choice = {"index": 0, "text": "x", "finish_reason": "not_finished", "disaggregated_params": said}
        responder.send(200, orjson.dumps({"choices": [choice], "usage": self.usage(1)}))

    async def _handle(self, request, responder):
        if request.path == traits_of(self.runtime).metrics_path:
            responder.send(200, page(self.runtime).encode(), content_type="text/plain")
        else:
            await super()._handle(request, responder)


class RuntimeHarness(Harness):
    """Workers of one runtime."""

    def __init__(self, statefile, runtime):
        super().__init__(statefile)
        self.runtime = runtime

    async def worker(self, role):
        """Start a worker."""
        worker = OwnPages(role, next(self._numbers[role]))
        worker.runtime = self.runtime
        await worker.server.start("127.0.0.1", 0)
        self._closers.append(lambda: worker.server.close(grace_s=0))
        return worker

    async def serving(self, *roles, **settings):
        """Start workers and a router of this runtime's graph."""
        return await self.served(*roles, graph=graph_of(self.runtime).spec, **settings)


@pytest.fixture
async def harness(routed, tmp_path):
    """Of one runtime."""
    harness = RuntimeHarness(tmp_path / "state.json", routed)
    yield harness
    await harness.close()


async def test_both_workers_of_a_prompt_get_what_joins_them(harness, routed):
    """Prefill one token and no stream, decode the client's own; usage has the prefill worker's cached tokens."""
    prefill, decode, router = await harness.serving("prefill", "decode")

    answer = await router.post(max_tokens=3)

    assert answer.status == 200
    (first,), (second,) = prefill.seen, decode.seen
    assert set(JOINS[routed]) <= first.body.keys() & second.body.keys()
    asked = 3 if routed == "trtllm" else 1  # a context-only request makes one token by itself
    assert (first.body["max_tokens"], first.body["stream"], second.body["max_tokens"]) == (asked, False, 3)
    details = orjson.loads(answer.body)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == prefill.cached_tokens
    assert await router.metric("penstock_router_kv_transfers_total", result="done") == 1


async def test_a_client_cannot_choose_where_the_kv_comes_from(harness, routed):
    """It would choose which hosts a worker connects to; whatever runtime the key is of."""
    prefill, decode, router = await harness.serving("prefill", "decode")

    for key in JOINS[routed]:
        answer = await router.post(**{key: "evil"})

        assert answer.status == 400
        assert f"{key}: set by the router alone" in orjson.loads(answer.body)["error"]["message"]
    assert not prefill.seen + decode.seen


async def test_a_client_that_leaves_ends_its_request_everywhere(harness):
    """At each worker that has it, and the router holds nothing more."""
    _, decode, router = await harness.serving("prefill", "decode")
    decode.script = [Answers.hang()]

    request = asyncio.create_task(router.post(max_tokens=2))
    await router.until(lambda: decode.seen)
    request.cancel()

    await router.until(lambda: decode.disconnects == 1)
    await router.assert_idle()


@pytest.mark.parametrize("killed", ["prefill", "decode"])
async def test_a_worker_that_dies_before_a_token_costs_no_request(harness, killed):
    """Another one serves it."""
    *workers, router = await harness.serving("prefill", "prefill", "decode", "decode")
    for each in workers:
        if each.role == killed:
            each.script = [Answers.drop()]

    answers = [await router.post(max_tokens=2) for _ in range(4)]

    assert [each.status for each in answers] == [200] * 4


async def test_a_stream_that_breaks_does_not_look_complete(harness):
    """Where it may not continue elsewhere, the client sees the break."""
    _, decode, router = await harness.serving(
        "prefill", "decode", config={"retries": {"maxContinuations": 0}}
    )
    decode.script = [Answers.stream(harness.token_event(0), broken=True)]

    stream = await router.begun_stream(max_tokens=4)

    assert b"[DONE]" not in await router.broken(stream)
