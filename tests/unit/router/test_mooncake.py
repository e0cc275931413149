"""Mooncake's KV transfer: a number that the router gives, and the engine that a bootstrap server names."""

import orjson
import pytest
from fake_workers import FakeWorker

from penstock.api import GraphSpec
from penstock.runtimes.kv_transfer import KvSource
from penstock.runtimes.mooncake import MOONCAKE

GRAPH = GraphSpec.model_validate(
    {
        "model": {"name": "llama"},
        "runtime": "vllm",
        "services": {role: {"role": role} for role in ("router", "prefill", "decode")},
        "engine": {"kvConnector": "mooncake"},
        "planner": {"enabled": False},
    }
)
SOURCE = KvSource("10.0.0.1", 8998, 255, "engine-7")
LIMITED = {"choices": [{"finish_reason": "length"}]}


def test_a_prefill_worker_keeps_kv_only_where_its_engine_is_known():
    """The number is what its decode worker asks for; of an unknown engine none could."""
    asked = MOONCAKE.prefill_fields(SOURCE)["kv_transfer_params"]
    fetched = MOONCAKE.decode_fields(SOURCE, LIMITED)["kv_transfer_params"]
    assert asked["transfer_id"] == fetched["transfer_id"]
    assert (asked["do_remote_decode"], fetched["do_remote_prefill"]) == (True, True)
    assert MOONCAKE.prefill_fields(KvSource("10.0.0.1", 8998, 255, None)) == {}


class Introduced(FakeWorker):
    """A prefill worker whose bootstrap server is its own port."""

    engine = "engine-7"
    asked = 0

    async def _handle(self, request, responder):
        if request.path == "/query":
            self.asked += 1
            said = {"0": {"engine_id": self.engine, "worker_addr": {"0": {"0": "tcp://a:1"}}}}
            responder.send(200 if self.engine else 503, orjson.dumps(said))
        else:
            await super()._handle(request, responder)


async def _served(harness, *, engine="engine-7"):
    prefill = Introduced("prefill", 0)
    prefill.engine, prefill.expired_leases = engine, None  # its page counts no leases
    await prefill.server.start("127.0.0.1", 0)
    harness._closers.append(lambda: prefill.server.close(grace_s=0))
    decode = await harness.worker("decode")
    path = harness.write_state([prefill, decode])
    state = orjson.loads(path.read_bytes())
    state[prefill.name]["ports"] = {"port": prefill.server.port, "side_channel_port": prefill.server.port}
    path.write_bytes(orjson.dumps(state))
    router = await harness.router(statefile=path, disaggregated=True, graph=GRAPH)
    await router.until(lambda: prefill.asked)
    await router.until(lambda: not engine or any(each.kv_engine for each in router.server.core.pool))
    return prefill, decode, router


async def test_both_requests_carry_one_number(harness):
    """Decode gets the prefill worker's bootstrap server and engine alongside it."""
    prefill, decode, router = await _served(harness)

    answer = await router.post(max_tokens=3)

    assert answer.status == 200
    first, second = (each.seen[0].body["kv_transfer_params"] for each in (prefill, decode))
    number = first["transfer_id"]
    assert first == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": number}
    assert second == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": prefill.url,
        "remote_engine_id": "engine-7",
        "transfer_id": number,
    }
    assert "cache_salt" not in decode.seen[0].body
    assert await router.metric("penstock_router_kv_transfers_total", result="done") == 1
    assert prefill.asked == 1


async def test_nothing_is_kept_by_an_engine_that_is_not_known(harness):
    """Decode computes the prompt, and no KV waits for minutes."""
    prefill, decode, router = await _served(harness, engine=None)

    assert (await router.post(max_tokens=3)).status == 200
    assert "kv_transfer_params" not in prefill.seen[0].body
    assert "kv_transfer_params" not in decode.seen[0].body


async def test_a_new_process_introduces_itself_again(harness):
    """Its engine has another name, and decode would wait for the old one's KV."""
    prefill, _, router = await _served(harness)
    (worker,) = (each for each in router.server.core.pool if each.spec.role == "prefill")
    prefill.health_status = 503
    await router.until(lambda: worker.kv_engine is None)
    prefill.engine = "engine-8"
    prefill.health_status = 200

    await router.until(lambda: worker.kv_engine == "engine-8")


@pytest.mark.parametrize(
    ("source", "answer", "given"),
    [
        (SOURCE, LIMITED, True),
        (SOURCE, {"stop_reason": "max_tokens"}, True),
        (SOURCE, {"choices": [{"finish_reason": "stop"}]}, False),
        (SOURCE, {"choices": []}, False),
        (SOURCE, {"choices": ["x"]}, False),
        (SOURCE, None, False),
        (KvSource("10.0.0.1", 8998, 255), LIMITED, False),
    ],
)
def test_decode_fetches_what_was_kept(source, answer, given):
    """A prompt whose one token ended the text was freed; vLLM keeps those that the limit ended."""
    fields = MOONCAKE.decode_fields(source, answer)

    assert (fields is not None) is given
    if fields is not None:
        params = fields["kv_transfer_params"]
        assert params["transfer_id"] == "xfer-00000000000000ff"
        assert params["remote_bootstrap_addr"] == "http://10.0.0.1:8998"


@pytest.mark.parametrize(
    ("said", "engine"),
    [
        ({"0": {"engine_id": "e"}}, "e"),
        ({"1": {"engine_id": "e"}}, None),
        ({"0": 5}, None),
        ({"0": {}}, None),
        ([], None),
    ],
)
def test_the_first_rank_names_the_engine(said, engine):
    """One that has not registered yet has none."""
    assert MOONCAKE.engine_of(said) == engine


def test_an_address_of_six_has_brackets():
    """As in any URL."""
    assert (KvSource("fd00::1", 8998, 1).address, KvSource("h", None, 1).address) == ("[fd00::1]:8998", "h")
