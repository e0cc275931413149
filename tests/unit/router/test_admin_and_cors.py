"""Who may drain workers and see where they are, and which web pages may call the API."""

import orjson
import pytest

from penstock.api import RouterConfig
from penstock.router.proxy.auth import AdminCheck, is_loopback
from penstock.router.proxy.completion import RequestRefused

DRAIN = "/workers/aggregated-0/drain"
KEY = (b"authorization", b"Bearer root")
LOCAL = {b"host": b"127.0.0.1:8000"}
PAGE = (b"origin", b"https://app.example.com")


async def ask(harness, router, method, path, *headers):
    """Send a request without a body."""
    return await harness.client.request(method, router.url + path, headers=headers)


def code_of(answer):
    """Return the error's code."""
    return orjson.loads(answer.body)["error"]["code"]


async def test_drains_ask_for_the_admin_key(harness):
    """A client's key is none; without the key nothing happens."""
    keys = {"api_keys": frozenset({b"client"}), "admin_keys": frozenset({b"root"})}
    worker, router = await harness.served("aggregated", **keys)

    for headers in ((), ((b"authorization", b"Bearer client"),), ((b"authorization", b"Basic root"),)):
        refused = await ask(harness, router, "POST", DRAIN, *headers)
        assert (refused.status, code_of(refused)) == (401, "invalid_admin_key")
    assert (await router.workers())[worker.name]["state"] == "ready"

    assert (await ask(harness, router, "POST", DRAIN, KEY)).status == 200
    assert (await router.workers())[worker.name]["state"] == "draining"


@pytest.mark.parametrize(
    ("settings", "status"),
    [({}, 200), ({"host": "0.0.0.0"}, 403), ({"api_keys": frozenset({b"client"})}, 403)],
)
async def test_without_an_admin_key_programs_of_this_machine_may_drain(harness, settings, status):
    """As the local backend does; off beyond loopback, or where clients could take workers away."""
    router = await harness.router(await harness.worker("aggregated"), **settings)
    answer = await ask(harness, router, "POST", DRAIN, (b"authorization", b"Bearer client"))
    assert answer.status == status
    if status == 403:
        assert (code_of(answer), b"PENSTOCK_ADMIN_KEYS" in answer.body) == ("admin_off", True)


@pytest.mark.parametrize("keys", [frozenset(), frozenset({b"root"})])
@pytest.mark.parametrize(
    "headers",
    [
        {b"origin": b"http://127.0.0.1:8000"},
        {b"origin": b"null"},
        {b"sec-fetch-site": b"cross-site"},
        {b"sec-fetch-site": b"same-origin"},
    ],
)
def test_web_pages_may_not_administer(keys, headers):
    """Whatever their origin and whatever key they carry: the router has no page of its own."""
    sent = {**LOCAL, b"authorization": b"Bearer root", **headers}

    with pytest.raises(RequestRefused, match="web pages") as caught:
        AdminCheck(keys, is_local=True).check(sent)

    assert (caught.value.status, caught.value.code) == (403, "cross_site")


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ({b"host": b"127.0.0.1:8000"}, True),
        ({b"host": b"localhost"}, True),
        ({b"host": b"[::1]:8000"}, True),
        ({b"host": b"evil.example.com:8000"}, False),
        ({b"host": b"10.0.0.7:8000"}, False),
        ({}, False),
        ({**LOCAL, b"x-forwarded-for": b"10.0.0.7"}, False),
        ({**LOCAL, b"forwarded": b"for=10.0.0.7"}, False),
        ({**LOCAL, b"sec-fetch-site": b"none"}, True),
    ],
)
def test_without_a_key_requests_must_come_from_this_machine(headers, is_allowed):
    """A name that an attacker resolves to loopback is none, and a proxy speaks for others."""
    assert AdminCheck(frozenset(), is_local=True).allows(headers) is is_allowed
    assert not AdminCheck(frozenset(), is_local=False).allows(headers)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("LocalHost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("", False), ("router", False)],
)  # fmt: skip
def test_loopback(host, expected):
    """Addresses and the one name."""
    assert is_loopback(host) is expected


async def test_workers_addresses_need_the_admin_key(harness):
    """The rest of /workers does not: planners and supervisors read it; nothing else shows an address."""
    worker, router = await harness.served("aggregated", admin_keys=frozenset({b"root"}))

    open_page = orjson.loads((await ask(harness, router, "GET", "/workers")).body)
    shown = orjson.loads((await ask(harness, router, "GET", "/workers", KEY)).body)

    assert shown["workers"][0]["url"] == worker.url
    assert "url" not in open_page["workers"][0]
    assert (open_page["speed"], open_page["workers"][0]["state"]) == (1.0, "ready")
    await worker.server.close(grace_s=0)
    await router.post()
    for path in ("/workers", "/metrics", "/ready"):
        assert worker.url.removeprefix("http://").encode() not in (await router.get(path)).body


async def test_workers_of_a_router_with_keys_are_shown_to_those_who_have_one(harness):
    """And to programs of this machine, such as a supervisor, and to the graph's routers; not through a proxy."""
    router = await harness.router(await harness.worker("aggregated"), api_keys=frozenset({b"key"}))
    proxied = (b"x-forwarded-for", b"192.0.2.1")
    assert (await router.get("/workers")).status == 200
    assert (await router.get("/workers", headers=(proxied,))).status == 401
    for known in (harness.as_router, (b"authorization", b"Bearer key")):
        assert (await router.get("/workers", headers=(proxied, known))).status == 200


CORS = {"corsAllowedOrigins": ["https://app.example.com"]}


async def test_pages_of_listed_origins_may_call_the_api(harness):
    """Every answer says so, errors included."""
    router = await harness.router(await harness.worker("aggregated"), config=CORS)
    json_type = (b"content-type", b"application/json")

    answers = [
        await router.post(headers=(json_type, PAGE)),
        await router.post(headers=(json_type, PAGE), raw=b"{"),
        await ask(harness, router, "GET", "/v1/models", PAGE),
    ]

    assert [answer.status for answer in answers] == [200, 400, 200]
    for answer in answers:
        assert answer.headers[b"access-control-allow-origin"] == PAGE[1]
        assert answer.headers[b"access-control-expose-headers"] == b"x-request-id, retry-after"
        assert answer.headers[b"vary"] == b"Origin"


async def test_preflights_are_answered(harness):
    """With the methods and the headers that the page asks for."""
    router = await harness.router(await harness.worker("aggregated"), config=CORS, api_keys=frozenset({b"k"}))
    asked = (b"access-control-request-method", b"POST")
    wanted = (b"access-control-request-headers", b"authorization,content-type,x-stainless-os")

    answer = await ask(harness, router, "OPTIONS", "/v1/chat/completions", PAGE, asked, wanted)

    assert answer.status == 204
    assert answer.headers[b"access-control-allow-origin"] == PAGE[1]
    assert answer.headers[b"access-control-allow-methods"] == b"GET, POST"
    assert answer.headers[b"access-control-allow-headers"] == wanted[1]


@pytest.mark.parametrize(
    ("config", "path", "origin"),
    [
        ({}, "/v1/models", b"https://app.example.com"),
        (CORS, "/v1/models", b"https://evil.example.com"),
        (CORS, "/v1/models", b"http://app.example.com"),
        (CORS, "/workers", b"https://app.example.com"),
        (CORS, "/metrics", b"https://app.example.com"),
        ({"corsAllowedOrigins": ["*"]}, "/workers", b"https://app.example.com"),
    ],
)
async def test_other_pages_and_paths_stay_closed(harness, config, path, origin):
    """Off by default; admin never opens."""
    router = await harness.router(await harness.worker("aggregated"), config=config)
    method = (b"access-control-request-method", b"GET")

    preflight = await ask(harness, router, "OPTIONS", path, (b"origin", origin), method)
    answer = await ask(harness, router, "GET", path, (b"origin", origin))

    assert preflight.status == 405
    assert b"access-control-allow-origin" not in {**preflight.headers, **answer.headers}


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "https://a b", ""])
def test_origins_are_checked(origin):
    """As browsers write them: scheme, host, port, and nothing after."""
    with pytest.raises(ValueError, match="corsAllowedOrigins"):
        RouterConfig.model_validate({"corsAllowedOrigins": [origin]})
