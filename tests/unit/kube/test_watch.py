"""What the informer makes of odd streams, against a scripted server."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from penstock.core.errors import ClusterError
from penstock.kube.informer import Informer
from penstock.kube.kinds import CONFIG_MAP


def obj(name, version):
    """Return a small object."""
    return {"metadata": {"namespace": "first", "name": name, "resourceVersion": str(version)}}


def event(what, name, version):
    """Return a watch event."""
    return {"type": what, "object": obj(name, version)}


def listing(version, *objs):
    """Return a list's only page."""
    return 200, {"items": list(objs), "metadata": {"resourceVersion": str(version)}}


@pytest.fixture
async def follow(api, client, monkeypatch):
    """Return a function that runs an informer by a script until a condition holds, without pauses."""
    monkeypatch.setattr("penstock.kube.informer.Backoff.pause_s", lambda self, failures: 0.0)
    tasks, end = [], asyncio.Event()

    async def run(script, condition):
        api.script = [*script, api.stream(then=end)]
        changes = []

        def note(what, each):
            changes.append((what, each["metadata"]["name"]))
            if each["metadata"]["name"] == "bad":
                raise ValueError("cannot handle this")

        informer = Informer(client, CONFIG_MAP, namespace="first", on_change=note)
        task = asyncio.create_task(informer.run())
        tasks.append(task)
        while not condition(informer):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.002)
        return informer, changes

    yield run
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def asked_all(api):
    """Whether the whole script has been used up."""
    return lambda informer: not api.script


async def test_a_bookmark_moves_the_place_to_continue(api, follow):
    """The next watch starts at the bookmark's version; the copy does not change."""
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    informer, changes = await follow([listing(5, obj("a", 4)), api.stream(bookmark)], asked_all(api))
    assert [each.query.get("resourceVersion") for each in api.asked] == [None, "5", "9"]
    assert all(each.query["allowWatchBookmarks"] == "true" for each in api.asked[1:])
    assert all(300 <= int(each.query["timeoutSeconds"]) <= 600 for each in api.asked[1:])
    assert changes == [("ADDED", "a")]
    assert informer.problem is None


@pytest.mark.parametrize("as_event", [True, False])
async def test_gone_lists_again(api, follow, as_event):
    """410 as an event within the stream or as the answer's status: one new list, and only differences told."""
    gone = {"type": "ERROR", "object": api.status(410)}
    answer = api.stream(gone) if as_event else (410, api.status(410))
    script = [listing(5, obj("a", 4), obj("b", 4)), answer, listing(8, obj("a", 4), obj("c", 7))]
    informer, changes = await follow(script, asked_all(api))
    assert changes == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "b"), ("ADDED", "c")]
    assert [each.query.get("watch") for each in api.asked] == [None, "true", None, "true"]
    assert informer.problem is None


@pytest.mark.parametrize(
    "line", [b"<html>\n", b"{}\n", b"[1]\n", b'{"type":"ERROR","object":{"code":500,"message":"odd"}}\n']
)
async def test_garbage_in_a_stream_starts_a_new_one_where_the_last_was_good(api, follow, line):
    """What came before the garbage stays, nothing is listed again."""
    good = event("ADDED", "a", 6)
    _, changes = await follow([listing(5), api.stream(good, line)], asked_all(api))
    assert changes == [("ADDED", "a")]
    assert [each.query.get("resourceVersion") for each in api.asked] == [None, "5", "6"]


async def test_a_broken_stream_continues_where_it_broke(api, follow):
    """The connection is cut in the middle of an event: it comes again with the next watch."""

    async def cut(responder):
        responder.start(200)
        responder.write(b'{"type":"ADDED","object":{"metadata":{"na')
        responder.abort()

    _, changes = await follow(
        [listing(5), cut, api.stream(event("ADDED", "a", 6), event("DELETED", "a", 7))], asked_all(api)
    )
    assert changes == [("ADDED", "a"), ("DELETED", "a")]


async def test_a_silent_stream_is_taken_for_dead(api, follow, monkeypatch):
    """No byte for longer than two bookmarks would take: a new connection, the copy stays."""
    monkeypatch.setattr("penstock.kube.transport.SILENCE_S", 0.05)
    silence = asyncio.Event()
    informer, _ = await follow([listing(5, obj("a", 4)), api.stream(then=silence)], asked_all(api))
    assert [name for _, name in informer.objects] == ["a"]
    assert api.asked[-1].query["resourceVersion"] == "5"


async def test_a_refused_watch_is_a_problem_until_it_works(api, follow, caplog):
    """403 is told in the server's words, tried again, and forgotten when it works."""
    refused = (403, api.status(403, "cannot watch"))
    told = lambda: [each.keys["problem"] for each in caplog.records if "out of date" in each.message]  # noqa: E731
    informer, _ = await follow(
        [listing(5), refused], lambda informer: bool(told()) and informer.problem is None
    )
    assert "cannot watch" in told()[0]
    assert informer.synced.is_set()


async def test_a_callback_that_fails_ends_nothing(api, follow, caplog):
    """One object that cannot be handled is logged; the others still arrive."""
    _, changes = await follow([listing(5, obj("bad", 3), obj("good", 4))], asked_all(api))
    assert changes == [("ADDED", "bad"), ("ADDED", "good")]
    assert "change not handled" in caplog.text


async def test_informers_of_many_processes_do_not_come_back_at_once(monkeypatch):
    """Each pause is in the upper half of a range that doubles from 0.2 to 10 s."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 10:
            raise asyncio.CancelledError

    async def refuse(*_, **__):
        raise ClusterError("away")

    monkeypatch.setattr("penstock.kube.informer.asyncio.sleep", sleep)
    client = SimpleNamespace(rng=random.Random(3), read_pages=refuse)
    with pytest.raises(asyncio.CancelledError):
        await Informer(client, CONFIG_MAP, namespace="first").run()

    tops = [min(0.2 * 2**number, 10.0) for number in range(10)]
    assert all(top / 2 <= pause <= top for pause, top in zip(pauses, tops, strict=True))
    assert len({pause / top for pause, top in zip(pauses, tops, strict=True)}) == 10
