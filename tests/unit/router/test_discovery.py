import json
import os

import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.router.discovery.kubernetes import router_urls
from penstock.router.discovery.statefile import StatefileDiscovery, parse_statefile, parse_static_workers


def _entry(role="decode", state="ready", url="http://127.0.0.1:9", **more):
    return {"service": role, "role": role, "state": state, "url": url, "pid": 7, **more}


def _write(path, entries, *, mtime):
    """Replace the file as its owner does; a stepped mtime stands for time passing."""
    new = path.with_suffix(".new")
    new.write_text(entries if isinstance(entries, str) else json.dumps({"arbiter": {"pid": 1}, **entries}))
    os.utime(new, (mtime, mtime))
    new.replace(path)


@pytest.mark.parametrize(
    ("state", "ready", "draining", "supervised"),
    [
        ("requested", False, False, True),
        ("starting", False, False, True),
        ("ready", True, False, True),
        ("draining", False, True, False),
    ],
)
def test_states_of_the_statefile(state, ready, draining, supervised):
    """Only ready serves; draining takes nothing new and comes back by nobody."""
    (spec,), _ = parse_statefile(json.dumps({"w": _entry(state=state)}).encode())

    assert (spec.ready, spec.draining, spec.supervised) == (ready, draining, supervised)
    assert (spec.name, spec.role, spec.url) == ("w", Role.DECODE, "http://127.0.0.1:9")


def test_a_worker_that_does_not_serve_has_its_supervisors_cause():
    """The live page says the same as `penstock status`; without a cause there is the state."""
    why = "it is stopped by a signal or a debugger"
    for reason, shown in ((why, why), (None, "starting")):
        (spec,), _ = parse_statefile(json.dumps({"w": _entry(state="starting", reason=reason)}).encode())
        assert spec.reason == shown


REPLAYS = '{"endpoint": "tcp://127.0.0.1:5", "replay_endpoint": "tcp://127.0.0.1:{kv_replay_port}"}'
PUBLISHES = ["vllm", "--kv-events-config", '{"endpoint": "ipc:///state/g.{kv_events_port}.kv"}']


@pytest.mark.parametrize(
    ("cmd", "ports", "expected", "replay"),
    [
        (PUBLISHES, {"port": 9, "kv_events_port": 7}, "ipc:///state/g.7.kv", None),
        ([*PUBLISHES[:2], '{"endpoint": "tcp://127.0.0.1:5"}'], {}, "tcp://127.0.0.1:5", None),
        ([*PUBLISHES[:2], REPLAYS], {"kv_replay_port": 8}, "tcp://127.0.0.1:5", "tcp://127.0.0.1:8"),
        *(
            (cmd, ports, None, None)
            for cmd, ports in (
                (["vllm"], {"kv_events_port": 7}),
                ([*PUBLISHES[:2], "{"], {}),
                ([*PUBLISHES[:2], "[1]"], {}),
                (PUBLISHES[:2], {}),
                (PUBLISHES, None),
                ("vllm", {}),
            )
        ),
    ],
)
def test_where_a_worker_publishes_and_answers_is_in_its_command(cmd, ports, expected, replay):
    """As it was told; anything else leaves it to the graph."""
    (spec,), _ = parse_statefile(json.dumps({"w": _entry(cmd=cmd, ports=ports)}).encode())

    assert (spec.kv_events, spec.kv_replay) == (expected, replay)


@pytest.mark.parametrize(
    "entry",
    [
        _entry(state="failed"),
        _entry(state="stopped"),
        _entry(state="unheard-of"),
        _entry(url=None),
        _entry(url="ftp://x"),
        _entry(role="router"),
        _entry(role="planner"),
        _entry(role=["decode"]),
        "text",
        None,
    ],
)
def test_entries_that_are_no_workers_are_left_out(entry):
    """One odd entry hides none of the others."""
    specs, _ = parse_statefile(json.dumps({"bad": entry, "good": _entry()}).encode())

    assert [spec.name for spec in specs] == ["good"]


def test_a_restart_is_another_incarnation():
    """What was learnt about the process before is void."""
    (first,), _ = parse_statefile(json.dumps({"w": _entry(restarts=0)}).encode())
    (second,), _ = parse_statefile(json.dumps({"w": _entry(restarts=1)}).encode())

    assert first.incarnation != second.incarnation


def test_polls_report_changes_only(tmp_path):
    """A poll without a change, or with one that concerns no worker, reports nothing."""
    path = tmp_path / "llama.json"
    _write(path, {"w": _entry()}, mtime=1000)
    discovery = StatefileDiscovery(path)

    assert [spec.name for spec in discovery.poll()] == ["w"]
    assert discovery.poll() is None
    _write(path, {"w": _entry(), "router": _entry(role="router")}, mtime=1001)
    assert discovery.poll() is None
    _write(path, {"w": _entry(), "w_1": _entry(url="http://127.0.0.1:10")}, mtime=1002)
    assert [spec.name for spec in discovery.poll()] == ["w", "w_1"]


@pytest.mark.parametrize("content", ['{"w": {"role"', "", "[]", "null", "\x00\xff", None])
def test_a_useless_file_keeps_the_last_good_view(tmp_path, content):
    """Missing, partial or corrupt: nothing is reported, the problem is told, and a good file heals it."""
    path = tmp_path / "llama.json"
    _write(path, {"w": _entry()}, mtime=1000)
    discovery = StatefileDiscovery(path)
    discovery.poll()
    if content is None:
        path.unlink()
    else:
        _write(path, content, mtime=1001)

    assert discovery.poll() is None
    assert discovery.problem

    _write(path, {"w": _entry(state="draining")}, mtime=1002)
    assert [spec.draining for spec in discovery.poll()] == [True]
    assert discovery.problem is None


def test_a_fixed_fleet_is_named_by_role():
    """Names count up within a role; a trailing slash is dropped."""
    specs = parse_static_workers(["prefill=http://a:1", "decode=http://b:2/", "decode=http://c:3"])

    assert [(spec.name, spec.url) for spec in specs] == [
        ("prefill-0", "http://a:1"),
        ("decode-0", "http://b:2"),
        ("decode-1", "http://c:3"),
    ]


@pytest.mark.parametrize(
    "value", ["decode", "router=http://a:1", "decode=ftp://a:1", "decode=http://", "=http://a"]
)
def test_a_fixed_fleet_is_checked(value):
    """The message names flag, value and form."""
    with pytest.raises(ConfigError, match=r"--worker: .*role=http://host:port"):
        parse_static_workers([value])


def test_routers_are_found_in_slices_and_statefiles():
    """By their role; ready or leaving, as their requests continue."""
    part = {
        "metadata": {"labels": {"penstock.dev/role": "router"}},
        "addressType": "IPv6",
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": [
            {"addresses": ["fd00::2"]},
            {"addresses": ["fd00::1"], "conditions": {"terminating": True}},
            {},
        ],
    }
    decode = {**part, "metadata": {"labels": {"penstock.dev/role": "decode"}}}
    fqdn = {**part, "addressType": "FQDN"}
    assert router_urls([decode, part, fqdn]) == ("http://[fd00::1]:8000", "http://[fd00::2]:8000")
    entries = {
        "f_router_0": {"role": "router", "url": "http://127.0.0.1:8000/"},
        "f_decode_0": {"role": "decode", "url": "http://127.0.0.1:8001"},
        "f_router_1": {"role": "router", "url": None},
        "odd": 3,
    }
    assert parse_statefile(json.dumps(entries).encode())[1] == ("http://127.0.0.1:8000",)
