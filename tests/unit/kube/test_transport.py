"""Retries, credentials and bounds of single calls, against a scripted server."""

import asyncio

import orjson
import pytest

from penstock.core.errors import (
    ClusterError,
    ConfigError,
    UnavailableError,
)
from penstock.kube.client import KubeClient
from penstock.kube.kinds import CONFIG_MAP, SCALING_ADAPTER
from penstock.kube.transport import MAX_CALLS

OBJECT = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
ME = "penstock-test"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_reads_and_applies_are_tried_again(api, client, no_pause, status):
    """A busy or failing server is asked again, the third answer counts."""
    api.script = [(status, api.status(status))] * 2 + [(200, OBJECT)]
    assert await client.get(CONFIG_MAP, "a") == OBJECT
    api.script = [(status, api.status(status)), (200, OBJECT)]
    assert await client.apply(OBJECT, field_manager=ME) == OBJECT
    assert [each.method for each in api.asked] == ["GET"] * 3 + ["PATCH"] * 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 422])
async def test_refusals_are_not_tried_again(api, client, no_pause, status):
    """What the server refused it would refuse again; only 401 is worth one more try, with fresh credentials."""
    api.script = [(status, api.status(status))] * 5
    with pytest.raises(ClusterError, match=f"{status}: no"):
        await client.get(CONFIG_MAP, "a")
    assert len(api.asked) == (2 if status == 401 else 1)
    assert no_pause == []


async def test_the_servers_pause_is_kept(api, client, no_pause):
    """Retry-After beats the own pause, a shorter one and one that has grown; it is spread, so that clients come apart."""
    busy = (429, api.status(429), [(b"retry-after", b"3")])
    api.script = [*[busy] * 6, (200, OBJECT)]
    await client.get(CONFIG_MAP, "a")
    assert len(no_pause) == 6
    assert all(3.0 <= each <= 4.5 for each in no_pause)


async def test_an_urgent_call_is_sent_once(api, client, no_pause):
    """Its caller has a deadline of its own."""
    api.script = [(429, api.status(429), [(b"retry-after", b"1")]), (200, OBJECT)]
    with pytest.raises(UnavailableError) as caught:
        await client.urgent().get(CONFIG_MAP, "a")
    assert caught.value.retry_after_s == 1.0
    assert len(api.asked) == 1
    assert no_pause == []


async def test_a_pause_beyond_the_budget_ends_the_tries(api, client, no_pause):
    """A server that wants an hour of peace gets it: the error carries the time."""
    api.script = [(503, api.status(503), [(b"retry-after", b"3600")])]
    with pytest.raises(UnavailableError) as caught:
        await client.get(CONFIG_MAP, "a")
    assert caught.value.retry_after_s == 3600
    assert no_pause == []


async def test_what_may_have_happened_is_not_repeated(api, client, no_pause):
    """A create and a JSON patch are sent once when the answer is lost; after a 429 nothing had happened."""
    steps = [{"op": "add", "path": "/data/a", "value": "1"}]
    for call in (
        lambda: client.create(OBJECT, field_manager=ME),
        lambda: client.patch(CONFIG_MAP, "a", steps, namespace=None, field_manager=ME),
    ):
        api.asked.clear()
        api.script = [(500, api.status(500))]
        with pytest.raises(UnavailableError):
            await call()
        assert len(api.asked) == 1
        api.script = [(429, api.status(429)), (200, OBJECT)]
        assert await call() == OBJECT


async def test_a_connection_that_breaks_is_tried_again_where_that_is_harmless(api, client, no_pause):
    """The server closes without an answer: a read is repeated, a create is not."""

    async def drop(responder):
        responder.abort()

    api.script = [drop, (200, OBJECT)]
    assert await client.get(CONFIG_MAP, "a") == OBJECT
    api.script = [drop]
    with pytest.raises(UnavailableError, match="does not answer"):
        await client.create(OBJECT, field_manager=ME)


async def test_an_urgent_call_does_not_wait_for_slow_ones(api, client):
    """With as many calls hanging as may be under way, another one waits and an urgent one is answered."""
    release = asyncio.Event()

    async def slow(responder):
        await release.wait()
        responder.send(200, b"{}")

    api.script = [slow] * MAX_CALLS + [(200, OBJECT), (200, {})]
    hanging = [asyncio.create_task(client.raw_get(f"/{number}")) for number in range(MAX_CALLS)]
    while len(api.asked) < MAX_CALLS:  # noqa: ASYNC110 - sockets decide when
        await asyncio.sleep(0.002)
    waiting = asyncio.create_task(client.raw_get("/waiting"))
    assert await client.urgent().get(CONFIG_MAP, "a") == OBJECT
    assert not waiting.done()
    release.set()
    await asyncio.gather(*hanging, waiting)
    assert api.asked[-1].path == "/waiting"


async def test_a_librarys_own_calls_are_as_few_at_once(api, client):
    """Of three times as many calls the rest waits without a connection; a watch that has begun counts no more."""
    release = asyncio.Event()

    async def slow(responder):
        await release.wait()
        responder.send(200, b"{}")

    api.script = [api.stream({}, then=release), *[slow] * (3 * MAX_CALLS)]
    async with client.transport.session() as session:
        watch = await session.get(f"{client.server}/watch")

        async def call(number):
            async with session.get(f"{client.server}/{number}") as answer:
                return answer.status

        calls = [asyncio.create_task(call(number)) for number in range(3 * MAX_CALLS)]
        while len(api.asked) < 1 + MAX_CALLS:  # noqa: ASYNC110 - sockets decide when
            await asyncio.sleep(0.002)
        assert len(api.asked) == 1 + MAX_CALLS
        release.set()
        assert await asyncio.gather(*calls) == [200] * (3 * MAX_CALLS)
        watch.close()


async def test_what_is_sent(api, client):
    """Paths, parameters, content types and bodies of the writes."""
    api.script = [(200, OBJECT)] * 5
    await client.apply(OBJECT, field_manager=ME, subresource="status")
    await client.create(OBJECT, field_manager=ME)
    await client.patch(
        SCALING_ADAPTER, "a", {"spec": {}}, namespace="x", subresource="scale", field_manager=ME
    )
    await client.patch(CONFIG_MAP, "a", [], namespace=None, field_manager=ME)
    await client.delete(CONFIG_MAP, "a", namespace="x", uid="u", grace_s=3)
    applied, created, merged, patched, deleted = api.asked
    assert applied.path == "/api/v1/namespaces/first/configmaps/a/status"
    assert applied.query == {"fieldManager": ME, "force": "true"}
    assert applied.headers["content-type"] == "application/apply-patch+yaml"
    assert applied.headers["authorization"] == "Bearer t"
    assert (created.method, created.path) == ("POST", "/api/v1/namespaces/first/configmaps")
    assert merged.path.endswith("/namespaces/x/scalingadapters/a/scale")
    assert merged.headers["content-type"] == "application/merge-patch+json"
    assert patched.headers["content-type"] == "application/json-patch+json"
    options = orjson.loads(deleted.body)
    assert options["preconditions"] == {"uid": "u"}
    assert options["gracePeriodSeconds"] == 3
    assert options["propagationPolicy"] == "Background"


async def test_an_expired_page_starts_the_list_again(api, client):
    """410 for a next page: all pages are read again and nothing is there twice."""
    page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "c", "resourceVersion": "1"}}
    last = {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "2"}}
    api.script = [(200, page), (410, api.status(410)), (200, page), (200, last)]
    listing = await client.list(CONFIG_MAP, namespace=None)
    assert [each["metadata"]["name"] for each in listing.items] == ["a", "b"]
    assert listing.resource_version == "2"
    assert [each.query.get("continue") for each in api.asked] == [None, "c", None, "c"]


async def test_the_servers_warnings_are_logged_once(api, client, caplog):
    """A misspelt field is warned of by the server; the log says it, but not with every apply."""
    warning = [(b"warning", b'299 - "unknown field spec.replicsa"')]
    api.script = [(200, OBJECT, warning)] * 3
    for _ in range(3):
        await client.apply(OBJECT, field_manager=ME)
    assert caplog.text.count("the API server warns") == 1


@pytest.mark.parametrize(("context", "namespace"), [(None, "first"), ("two", "second"), ("bare", "default")])
async def test_the_namespace_is_the_chosen_contexts(write_kubeconfig, context, namespace):
    """Not the current context's when another one is asked for."""
    client = await KubeClient.connect(kubeconfig=write_kubeconfig(), context=context)
    assert client.namespace == namespace
    await client.close()


async def test_no_credentials_say_what_to_do(tmp_path, monkeypatch, write_kubeconfig):
    """Missing file, unknown context, malformed file, nothing at all: each a configuration error with a remedy."""
    with pytest.raises(ConfigError, match="no such file"):
        await KubeClient.connect(kubeconfig=tmp_path / "absent")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no such file; give --kubeconfig or KUBECONFIG"):
        await KubeClient.connect()
    with pytest.raises(ConfigError, match=r"object with name absent in .*contexts"):
        await KubeClient.connect(kubeconfig=write_kubeconfig(), context="absent")
    for content in ("", "[]", "a: [", "clusters: 3"):
        path = tmp_path / "broken"
        path.write_text(content)
        with pytest.raises(ConfigError, match="--kubeconfig or KUBECONFIG"):
            await KubeClient.connect(kubeconfig=path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="service account"):
        await KubeClient.connect()


async def test_a_write_that_waited_is_not_sent_once_leadership_is_over(api, client, no_pause):
    """The first try was allowed and failed for the moment; the second is not sent, whoever paused the process."""
    leads = True

    async def busy(responder):
        nonlocal leads
        leads = False
        responder.send(429, b"{}")

    api.script = [busy, (200, OBJECT)]
    fenced = client.fenced(lambda: leads)
    with pytest.raises(ClusterError, match="not sent: this process is no longer the leader"):
        await fenced.apply(OBJECT, field_manager=ME)
    assert len(api.asked) == 1
    assert await fenced.get(CONFIG_MAP, "a") == OBJECT


async def test_a_write_whose_connection_took_too_long_is_not_carried_out(api, client, no_pause):
    """Leadership ends after the request is begun and before its body is sent: the server never has the whole."""
    answers = iter([None, None])
    fenced = client.fenced(lambda: next(answers, "over") is None)
    api.script = [(200, OBJECT)] * 2
    with pytest.raises(ClusterError, match=r"not sent|no answer"):
        await fenced.apply(OBJECT, field_manager=ME)
    assert api.asked == []
