"""The statefile's naming, as the planner document shows it, and its JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.local_state import EntryState
from penstock.local.statefile import (
    ArbiterInfo,
    ProcessEntry,
    StateFile,
    entry_to_json,
    free_name,
    from_json,
    request_replica,
    retire,
    template,
    to_json,
)


def add(state):
    """Return the file with one more decode worker."""
    return request_replica(state, template(state, "decode"))[0]


@pytest.fixture
def one_decode(state_of, entry_of):
    """Return the file when one decode worker is spun up."""
    base = state_of("dynamo").with_entry("dynamo_VllmWorker", entry_of(state=EntryState.STOPPED))
    return add(base)


def test_the_documents_example_add_another_remove_one_remove_the_last(one_decode):
    """The entries read as in the document after every step; the base entry stays without resources."""
    assert list(one_decode.entries) == ["dynamo_VllmWorker"]
    two = add(one_decode)
    assert list(two.entries) == ["dynamo_VllmWorker", "dynamo_VllmWorker_1"]
    assert all("resources" in entry_to_json(entry) for entry in two.entries.values())
    one = retire(two, "dynamo_VllmWorker_1")
    assert list(one.entries) == ["dynamo_VllmWorker"]
    assert entry_to_json(one.entries["dynamo_VllmWorker"])["resources"] == {"gpus": [0]}
    none = retire(one, "dynamo_VllmWorker")
    assert list(none.entries) == ["dynamo_VllmWorker"]
    kept = entry_to_json(none.entries["dynamo_VllmWorker"])
    assert "resources" not in kept
    assert kept["state"] == "stopped"
    assert kept["cmd"] == ["worker", "--port", "{port}"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({}, "ns_svc"),
        ({"ns_svc": "ready"}, "ns_svc_1"),
        ({"ns_svc": "stopped"}, "ns_svc"),
        ({"ns_svc": "stopped", "ns_svc_1": "ready"}, "ns_svc"),
        ({"ns_svc": "ready", "ns_svc_1": "ready"}, "ns_svc_2"),
        ({"ns_svc": "ready", "ns_svc_2": "ready"}, "ns_svc_1"),
        ({"ns_svc": "draining"}, "ns_svc_1"),
        ({"ns_svc": "ready", "ns_svc_1": "failed", "ns_svc_2": "ready"}, "ns_svc_1"),
    ],
)
def test_the_lowest_free_suffix_is_taken(state_of, entry_of, states, expected):
    """Names without a process are free, the base name first; a draining worker's name is not."""
    state = state_of("ns")
    for name, value in states.items():
        state = state.with_entry(name, entry_of("svc", state=EntryState(value)))
    assert free_name(state, "svc") == expected


def test_unknown_keys_are_ignored_and_missing_ones_get_defaults():
    """A file of another version is read as far as it is understood."""
    data = {
        "arbiter": {"pid": 7, "gpus": 4, "colour": "red"},
        "a_b": {"service": "b", "role": "decode", "ports": {"port": 21000}, "shape": "round"},
    }
    state = from_json(data, source="/x/a.json")
    assert (state.arbiter.pid, state.arbiter.budget, state.arbiter.namespace) == (7, 4, "a")
    assert state.entries["a_b"].port == 21000
    assert state.entries["a_b"].state is EntryState.REQUESTED


GOOD = {"service": "b", "role": "decode"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a statefile"),
        ({}, "'arbiter' is missing"),
        ({"arbiter": {"speed": -1}}, "arbiter.speed: -1"),
        ({"arbiter": {}, "a_b": 3}, "a_b: must be an object"),
        ({"arbiter": {}, "a_b": {"role": "decode"}}, "a_b.service: Field required"),
        (
            {"arbiter": {}, "a_b": {"service": "b", "role": "r", "state": "odd"}},
            "a_b.state: 'odd': .*'requested'",
        ),
        ({"arbiter": {"pid": []}}, "arbiter.pid: "),
        ({"arbiter": {"speed": "fast"}}, "arbiter.speed: 'fast'"),
        ({"arbiter": {"speed": float("nan")}}, "arbiter.speed: nan"),
        ({"arbiter": {"namespace": 7}}, "arbiter.namespace: 7"),
        ({"arbiter": {}, "a_b": {**GOOD, "cmd": 5}}, "a_b.cmd: 5"),
        ({"arbiter": {}, "a_b": {**GOOD, "env": ["A"]}}, "a_b.env: "),
        ({"arbiter": {}, "a_b": {**GOOD, "pid": -1}}, "a_b.pid: -1: .* greater than or equal to 1"),
        ({"arbiter": {}, "a_b": {**GOOD, "pid": "one"}}, "a_b.pid: 'one'"),
        (
            {"arbiter": {}, "a_b": {**GOOD, "ports": {"port": 70000}}},
            "ports.port: 70000: .* less than or equal to 65535",
        ),
        ({"arbiter": {}, "a_b": {**GOOD, "ports": {"port": "x"}}}, "ports.port: 'x'"),
        ({"arbiter": {}, "a_b": {**GOOD, "resources": {"gpus": 3}}}, "a_b.gpus: 3"),
        ({"arbiter": {}, "a_b": {**GOOD, "grace_s": None}}, "a_b.grace_s: None"),
        ({"arbiter": {}, "a_b": {**GOOD, "grace_s": float("inf")}}, "a_b.grace_s: inf: .* finite"),
    ],
)
def test_what_is_not_a_statefile_is_named(data, words):
    """Each fault is one ConfigError with the key and a remedy."""
    with pytest.raises(ConfigError, match=words):
        from_json(data, source="f.json")


@given(steps=st.lists(st.integers(min_value=0, max_value=9), max_size=30))
def test_names_never_collide_and_the_base_entry_stays(steps):
    """Whatever is added and removed, the base entry exists and live names are distinct workers."""
    arbiter = ArbiterInfo("n", gpus=8, budget=8)
    base = ProcessEntry("s", "decode", ("c",), state=EntryState.STOPPED, gpus_per_replica=1)
    state = StateFile(arbiter, {"n_s": base})
    for step in steps:
        live = [name for name, entry in state.entries.items() if entry.state is not EntryState.STOPPED]
        if step < 6 and len(live) < 8:
            state = add(state)
            assert len(state.gpus_in_use()) == len(live) + 1
        elif live:
            state = retire(state, live[step % len(live)])
        assert "n_s" in state.entries


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from([*ProcessEntry.__dataclass_fields__, *ArbiterInfo.__dataclass_fields__, "resources"])


@given(arbiter=st.dictionaries(FIELDS, JSON_VALUES), entry=st.dictionaries(FIELDS, JSON_VALUES) | JSON_VALUES)
def test_whatever_stands_in_the_file_is_read_or_refused_by_one_kind_of_error(arbiter, entry):
    """A value of a wrong type never ends in another exception, wherever it stands."""
    data = {"arbiter": arbiter, "a_b": {**GOOD, **entry} if isinstance(entry, dict) else entry}
    try:
        state = from_json(data, source="f.json")
    except ConfigError:
        return
    assert from_json(to_json(state), source="f.json") == state
