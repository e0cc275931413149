"""Which tier a request has, and what workers and metrics are told of it."""

import orjson
import pytest

from penstock.api import Tier, TiersConfig
from penstock.core.errors import ConfigError
from penstock.router.proxy.auth import TierIdentity, TierKeys, read_tier_keys
from penstock.router.proxy.completion import RequestRefused, parse_completion
from penstock.router.proxy.tiers import LiveTiers

KEYS = TierKeys(
    {
        b"gold": TierIdentity(Tier.PREMIUM, "acme"),
        b"plain": TierIdentity(Tier.STANDARD, "bolt"),
        b"root": TierIdentity(Tier.SYSTEM, "ops"),
    }
)
JSON = (b"content-type", b"application/json")


def frontend(keys=KEYS, **config):
    """Return a frontend with two aliases of the model."""
    config = {"enabled": True, "models": {"llama-fast": "premium", "llama-batch": "background"}, **config}
    return LiveTiers(TiersConfig.model_validate(config), keys, None, model="llama")


def headers(tier=None, key=None):
    """Return a request's headers."""
    found = {} if tier is None else {b"x-penstock-tier": tier}
    return found if key is None else {**found, b"authorization": b"Bearer " + key}


@pytest.mark.parametrize(
    ("tier", "key", "model", "expected", "downgraded"),
    [
        (None, None, "llama", TierIdentity(Tier.STANDARD), 0),
        (b"background", None, "llama", TierIdentity(Tier.BACKGROUND), 0),
        (b"premium", None, "llama", TierIdentity(Tier.STANDARD), 1),
        (b"premium", b"wrong", "llama", TierIdentity(Tier.STANDARD), 1),
        (b"premium", b"plain", "llama", TierIdentity(Tier.STANDARD, "bolt"), 1),
        (b" Premium ", b"gold", "llama", TierIdentity(Tier.PREMIUM, "acme"), 0),
        (None, b"gold", "llama", TierIdentity(Tier.PREMIUM, "acme"), 0),
        (b"background", b"gold", "llama", TierIdentity(Tier.BACKGROUND, "acme"), 0),
        (b"system", b"gold", "llama", TierIdentity(Tier.PREMIUM, "acme"), 1),
        (b"system", b"root", "llama", TierIdentity(Tier.SYSTEM, "ops"), 0),
        (None, None, "llama-batch", TierIdentity(Tier.BACKGROUND), 0),
        (None, None, "llama-fast", TierIdentity(Tier.STANDARD), 1),
        (None, b"gold", "llama-fast", TierIdentity(Tier.PREMIUM, "acme"), 0),
        (b"background", b"gold", "llama-fast", TierIdentity(Tier.BACKGROUND, "acme"), 0),
    ],
)
def test_a_key_allows_a_tier_and_those_below(tier, key, model, expected, downgraded):
    """Who asks for more than the key allows gets the key's tier, or the default one, and is counted."""
    found = frontend()
    assert found.identify(headers(tier, key), model) == expected
    assert sum(found.downgraded.values()) == downgraded


def test_without_keys_the_header_is_believed_for_all_tiers_but_system():
    """An ingress has checked who may send it; nobody comes from outside as the cluster itself."""
    open_frontend = frontend(TierKeys({}))
    assert open_frontend.identify(headers(b"premium"), "llama").tier is Tier.PREMIUM
    assert open_frontend.identify(headers(b"system"), "llama") == TierIdentity(Tier.STANDARD)


def test_an_unknown_tier_is_answered_with_the_known_ones():
    """400, and the remedy."""
    with pytest.raises(RequestRefused, match="'gold' is not a tier; send one of system, premium") as refused:
        frontend().identify(headers(b"gold"), "llama")
    assert (refused.value.status, refused.value.code) == (400, "unknown_tier")


@pytest.mark.parametrize(
    ("sent", "tier", "expected"),
    [
        ({"model": "llama", "prompt": "a"}, Tier.PREMIUM, {"model": "llama", "prompt": "a"}),
        ({"model": "llama", "prompt": "a"}, Tier.STANDARD, {"model": "llama", "prompt": "a", "priority": 1}),
        ({"model": "llama-fast", "prompt": "a"}, Tier.PREMIUM, {"model": "llama", "prompt": "a"}),
        (
            {"priority": -99, "model": "llama", "prompt": "a"},
            Tier.BACKGROUND,
            {"model": "llama", "prompt": "a", "priority": 2},
        ),
        (
            {"priority": -99, "model": "llama", "prompt": "a"},
            Tier.PREMIUM,
            {"model": "llama", "prompt": "a", "priority": 0},
        ),
        (
            {"priority": False, "model": "llama", "prompt": "a"},
            Tier.PREMIUM,
            {"model": "llama", "prompt": "a", "priority": 0},
        ),
        ({"model": "llama", "prompt": "a"}, Tier.SYSTEM, {"model": "llama", "prompt": "a", "priority": -1}),
    ],
)
def test_workers_get_the_tiers_priority_and_the_models_own_name(sent, tier, expected):
    """Nobody raises their own priority, and an alias is the router's own affair; no key comes twice."""
    raw = orjson.dumps(sent) + b" \n"
    request = parse_completion(
        "/v1/completions", b"application/json", raw, model="llama", aliases=("llama-fast",)
    )
    got = frontend().for_worker(request, tier)
    assert orjson.loads(got.raw) == got.body == expected
    assert got.raw.count(b'"priority"') == ("priority" in expected)


def test_keys_are_read_from_lines_and_variable(tmp_path):
    """KEY TIER TENANT; a key without a tenant is one by itself."""
    (tmp_path / "keys").write_text("# ours\ngold premium acme\n\nlone background\n")
    keys = read_tier_keys(tmp_path / "keys", "root system ops, plain standard bolt")
    assert keys.of(b"Bearer gold") == TierIdentity(Tier.PREMIUM, "acme")
    assert keys.of(b"bearer  plain ") == TierIdentity(Tier.STANDARD, "bolt")
    assert keys.of(b"Bearer lone").tenant.startswith("key-")
    assert keys.of(b"Basic gold") is keys.of(b"Bearer other") is keys.of(None) is None


@pytest.mark.parametrize("line", ["secret", "secret gold", "secret premium acme more"])
def test_a_malformed_line_is_refused_without_naming_the_key(line):
    """Errors go to logs."""
    with pytest.raises(
        ConfigError, match="must be KEY TIER, or KEY TIER TENANT; tiers are system"
    ) as refused:
        read_tier_keys(None, line)
    assert "secret" not in str(refused.value)


def test_a_key_of_two_tiers_is_refused():
    """Which one counts would be chance."""
    with pytest.raises(ConfigError, match="given twice, as premium and standard"):
        read_tier_keys(None, "k premium a,k standard a")


async def test_a_request_keeps_its_tier_on_its_way_through_the_router(harness):
    """The worker sees the priority, the page counts the tier, and a forged header is counted."""
    worker = await harness.worker("aggregated")
    keys = TierKeys({b"gold": TierIdentity(Tier.PREMIUM, "acme")})
    router = await harness.router(
        worker, config={"tiers": {"enabled": True, "models": {"llama-batch": "background"}}}, tier_keys=keys
    )
    gold = (JSON, (b"authorization", b"Bearer gold"))
    forged = (JSON, (b"x-penstock-tier", b"premium"))
    body = orjson.dumps({"model": "llama-batch", "prompt": "hello"})
    answers = [
        await router.post(headers=gold),
        await router.post(headers=forged),
        await router.post(raw=body),
        await router.post(headers=(JSON, (b"x-penstock-tier", b"gold"))),
    ]
    assert [answer.status for answer in answers] == [200, 200, 200, 400]
    assert [seen.body.get("priority") for seen in worker.seen] == [None, 1, 2]
    assert [seen.body["model"] for seen in worker.seen] == ["llama"] * 3
    assert all(b"authorization" not in seen.headers for seen in worker.seen)
    arrivals = [await router.metric("penstock_router_tier_arrivals_total", tier=tier) for tier in Tier]
    assert arrivals == [0, 1, 1, 1]
    assert await router.metric("penstock_router_tier_downgraded_requests_total", tier="premium") == 1
    assert await router.metric("penstock_router_tier_slo_compliance_fraction", tier="premium") == 1
    deviation = "penstock_router_tier_share_deviation_fraction"
    assert 0 < await router.metric(deviation, tier="background") + 0.15 < 1
    assert (
        await router.metric("penstock_router_tier_e2e_request_latency_seconds_count", tier="background") == 1
    )


@pytest.mark.parametrize(("roles", "prompt"), [(["aggregated"], "a"), (["prefill", "decode"], ["a", "b"])])
async def test_a_shed_request_is_answered_503_and_counts_as_an_arrival(harness, roles, prompt):
    """The planner scales by arrivals, so that protection never hides the need; several prompts skip prefill alone."""
    *_, worker, router = await harness.served(*roles, config={"tiers": {"enabled": True}})
    router.server._tasks[0].cancel()
    for now_s in (0.0, 10.0):
        router.server.core.tiers.monitor.evaluate(now_s, {Tier.PREMIUM: [9.0] * 30})
    answer = await router.post(headers=(JSON, (b"x-penstock-tier", b"background")), prompt=prompt)
    assert answer.status == 503
    assert int(answer.headers[b"retry-after"]) >= 1
    error = orjson.loads(answer.body)["error"]
    assert error["code"] == "shed"
    assert "tier background are shed" in error["message"]
    assert (await router.post(prompt=prompt)).status == 200
    assert worker.seen[-1].body["priority"] == 1
    assert await router.metric("penstock_router_tier_arrivals_total", tier="standard") == 1
    assert await router.metric("penstock_router_tier_shed_requests_total", tier="background") == 1
    assert await router.metric("penstock_router_tier_shed_fraction", tier="background") == 1
    assert await router.metric("penstock_router_arrivals_total", model_name="llama") == 2
    assert await router.metric("penstock_router_refused_requests_total", model_name="llama") == 1


async def test_without_tiers_nothing_of_a_request_changes(harness):
    """Body and priority go as they came, and no series has a tier."""
    worker, router = await harness.served("aggregated")
    raw = b'{"model":"llama",  "prompt":"a","priority":3}'
    assert (await router.post(raw=raw, headers=(JSON, (b"x-penstock-tier", b"nonsense")))).status == 200
    assert worker.seen[0].raw == raw
    assert b"penstock_router_tier" not in (await router.get("/metrics")).body


async def test_tier_keys_without_tiers_are_refused(harness):
    """An option without effect is an error."""
    worker = await harness.worker("aggregated")
    with pytest.raises(ConfigError, match=r"spec.router.tiers.enabled is false"):
        await harness.router(worker, tier_keys=KEYS)
