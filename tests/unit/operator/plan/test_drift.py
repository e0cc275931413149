"""What drifts and what does not, as the API server stores and spells it."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kube.objects.names import APPLIED_ANNOTATION
from penstock.kube.objects.quantity import quantity
from penstock_operator.plan.drift import differences, with_content_digest


def drifted(desired, live):
    """Return the first difference as text, or None."""
    return next(map(str, differences(desired, live)), None)


DESIRED = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "llama-decode", "namespace": "serving", "labels": {"penstock.dev/graph": "llama"}},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {"creationTimestamp": None},
            "spec": {
                "automountServiceAccountToken": False,
                "hostNetwork": False,
                "containers": [
                    {
                        "name": "worker",
                        "image": "vllm:1",
                        "args": ["serve", "--port", "8000"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": ""}],
                        "ports": [{"containerPort": 8000, "name": "http"}],
                        "resources": {"limits": {"cpu": "0.5", "memory": "0.5Gi", "nvidia.com/gpu": 1}},
                        "readinessProbe": {"initialDelaySeconds": 0, "periodSeconds": 5, "timeoutSeconds": 0},
                    },
                    {"name": "proxy", "image": "proxy:1"},
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
                "nodeSelector": {},
                "tolerations": [],
            },
        },
    },
}
LIVE = {
    "metadata": {
        "name": "llama-decode",
        "namespace": "serving",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {"penstock.dev/graph": "llama", "team": "x"},
        "annotations": {"deployment.kubernetes.io/revision": "1"},
    },
    "spec": {
        "replicas": 2,
        "progressDeadlineSeconds": 600,
        "selector": {"matchLabels": {"a": "b"}},
        "template": {
            "metadata": {},
            "spec": {
                "automountServiceAccountToken": False,
                "dnsPolicy": "ClusterFirst",
                "containers": [
                    {"name": "injected", "image": "sidecar:1"},
                    {"name": "proxy", "image": "proxy:1", "imagePullPolicy": "IfNotPresent"},
                    {
                        "name": "worker",
                        "image": "vllm:1",
                        "args": ["serve", "--port", "8000"],
                        "env": [{"name": "B"}, {"name": "A", "value": "1"}, {"name": "C", "value": "2"}],
                        "ports": [{"containerPort": 8000, "name": "http", "protocol": "TCP"}],
                        "resources": {
                            "limits": {"cpu": "500m", "memory": "512Mi", "nvidia.com/gpu": "1"},
                            "requests": {"nvidia.com/gpu": "1"},
                        },
                        "readinessProbe": {"periodSeconds": 5, "timeoutSeconds": 1},
                    },
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        },
    },
    "status": {"replicas": 2},
}


def edited(path, value):
    """Return LIVE with one value replaced, or removed if the value is ``...``."""
    live = copy.deepcopy(LIVE)
    *parents, last = path
    place = live
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return live


def test_what_the_server_adds_and_rewrites_is_no_drift():
    """Defaults, canonical quantities, another order, others' entries, dropped empties."""
    assert drifted(DESIRED, LIVE) is None


POD = ("spec", "template", "spec")
WORKER = (*POD, "containers", 2)
CPU = (*WORKER, "resources", "limits", "cpu")
PROBE = (*WORKER, "readinessProbe")
MATCH = ("spec", "selector", "matchLabels")
ON_HOST = {"name": "tmp", "hostPath": {"path": "/"}}
TEXT = "spec.template.spec.containers[name=worker]"
TOKEN = "spec.template.spec.automountServiceAccountToken"
VOLUMES = "spec.template.spec.volumes"
TOLERATIONS = "spec.template.spec.tolerations"
NO_PORT = f'{TEXT}.ports[containerPort=8000,protocol=TCP]: expected {{"containerPort": 8000, "name": "http"}}, absent'


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("spec", "replicas"), 3, "spec.replicas: expected 2, found 3"),
        (("spec", "replicas"), ..., "spec.replicas: expected 2, absent"),
        (("metadata", "labels"), {}, 'metadata.labels.[penstock.dev/graph]: expected "llama", absent'),
        ((*WORKER, "image"), "vllm:2", f'{TEXT}.image: expected "vllm:1", found "vllm:2"'),
        ((*WORKER, "args", 2), "9", f'{TEXT}.args[2]: expected "8000", found "9"'),
        ((*WORKER, "args"), ["serve"], f'{TEXT}.args: expected ["serve", "--port", "8000"], found ["serve"]'),
        ((*WORKER, "args"), "serve", f'{TEXT}.args: expected ["serve", "--port", "8000"], found "serve"'),
        ((*WORKER, "env", 1, "value"), "2", f'{TEXT}.env[name=A].value: expected "1", found "2"'),
        ((*WORKER, "env", 0, "value"), "x", f'{TEXT}.env[name=B].value: expected "", found "x"'),
        ((*WORKER, "env", 1), "A=1", f'{TEXT}.env[name=A]: expected {{"name": "A", "value": "1"}}, absent'),
        ((*WORKER, "ports", 0, "protocol"), "UDP", NO_PORT),
        (CPU, "501m", f'{TEXT}.resources.limits.cpu: expected "0.5", found "501m"'),
        (CPU, ..., f'{TEXT}.resources.limits.cpu: expected "0.5", absent'),
        (
            (*PROBE, "initialDelaySeconds"),
            5,
            f"{TEXT}.readinessProbe.initialDelaySeconds: expected 0, found 5",
        ),
        ((*POD, "hostNetwork"), True, "spec.template.spec.hostNetwork: expected false, found true"),
        ((*POD, "automountServiceAccountToken"), ..., f"{TOKEN}: expected false, absent"),
        ((*POD, "automountServiceAccountToken"), 0, f"{TOKEN}: expected false, found 0"),
        ((*POD, "volumes", 0), ON_HOST, f"{VOLUMES}[name=tmp].emptyDir: expected {{}}, absent"),
        ((*POD, "tolerations"), [{"key": "k"}], f'{TOLERATIONS}: expected [], found [{{"key": "k"}}]'),
        (
            (*POD, "nodeSelector"),
            {"a": "b"},
            'spec.template.spec.nodeSelector: expected {}, found {"a": "b"}',
        ),
        (
            MATCH,
            {"a": "b", "c": "d"},
            'spec.selector.matchLabels: expected {"a": "b"}, found {"a": "b", "c": "d"}',
        ),
        (("spec", "template"), "none", None),
    ],
)
def test_a_hand_edit_is_named(path, value, words):
    """Every wanted value that changed is seen, and named with both values."""
    found = drifted(DESIRED, edited(path, value))
    assert found is not None
    if words is not None:
        assert found == words


@pytest.mark.parametrize(
    ("want", "found", "is_drift"),
    [
        ({"spec": {"targetPort": 8000}}, {"spec": {"targetPort": "8000"}}, False),
        ({"spec": {"a": 1}}, {"spec": {"a": 1.0}}, False),
        ({"spec": {"a": None}}, {"spec": {"a": 5}}, False),
        ({"spec": {"a": {}}}, {"spec": {}}, False),
        ({"spec": {"podSelector": {}}}, {"spec": {}}, True),
        ({"spec": {"env": []}}, {"spec": {"env": [{"name": "others"}]}}, False),
        ({"spec": {"rules": []}}, {"spec": {"rules": [1]}}, True),
        ({"spec": {"a": [None]}}, {"spec": {"a": [None]}}, False),
        ({"kind": "Role"}, {"kind": "ClusterRole"}, True),
        ({"spec": {"sizeLimit": "1Gi"}}, {"spec": {"sizeLimit": "1024Mi"}}, False),
        ({"spec": {"limits": {"cpu": "lots"}}}, {"spec": {"limits": {"cpu": "lots"}}}, False),
        (
            {"spec": {"ingress": [{"ports": [{"port": 8000}]}]}},
            {"spec": {"ingress": [{"ports": [{"port": 8000, "protocol": "TCP"}, {"port": 22}]}]}},
            True,
        ),
        (
            {"spec": {"ports": [{"port": 80, "name": "a"}]}},
            {"spec": {"ports": [{"port": 80, "name": "a", "protocol": "TCP"}, {"port": 22}]}},
            False,
        ),
    ],
)
def test_corner_cases(want, found, is_drift):
    """Int-or-string, null, empties with and without meaning, sets, atomic and keyed lists."""
    assert (drifted(want, found) is not None) is is_drift


def test_the_stamp_changes_with_what_is_no_longer_wanted():
    """Dropping a value is seen though the live object still holds all that is wanted."""
    before = with_content_digest(
        {"metadata": {"name": "a", "annotations": {"k": "v"}}, "data": {"x": "1", "y": "2"}}
    )
    after = with_content_digest({"metadata": {"name": "a", "annotations": {"k": "v"}}, "data": {"x": "1"}})
    assert before["metadata"]["annotations"]["k"] == "v"
    found = drifted(after, before)
    assert found is not None
    assert found.startswith(f"metadata.annotations.[{APPLIED_ANNOTATION}]")
    assert drifted(before, before) is None


LEAVES = st.integers(1, 9) | st.text("abc", min_size=1, max_size=3) | st.just(value=True)
NAMED = st.dictionaries(st.sampled_from("uvw"), LEAVES, max_size=2)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.sampled_from("pqrs"), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
        | st.lists(NAMED, min_size=1, max_size=3).map(
            lambda each: {"env": [{"name": f"n{i}", **m} for i, m in enumerate(each)]}
        )
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["spec", "data"]), TREES, min_size=1)


def leaves(value, path=()):
    """Yield the paths of all scalars."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    else:
        yield path


@given(OBJECTS)
def test_an_object_holds_itself(obj):
    """Nothing is written when the server has just what is wanted."""
    assert drifted(obj, obj) is None


@given(OBJECTS, st.data())
def test_every_leaf_is_watched(obj, data):
    """Any scalar of the desired object that changes is drift, wherever it is."""
    path = data.draw(st.sampled_from(sorted(leaves(obj), key=str)))
    live = copy.deepcopy(obj)
    place = live
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "other"
    assert drifted(obj, live) is not None


@given(OBJECTS, NAMED)
def test_additions_are_tolerated(obj, more):
    """What others add to maps is theirs."""
    live = {**copy.deepcopy(obj), "more": more}
    for value in live.values():
        if isinstance(value, dict):
            value["added"] = "by others"
    assert drifted(obj, live) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1000m", "1"),
        (1, "1"),
        (0.5, "500m"),
        ("0.5Gi", "512Mi"),
        ("1024Ki", "1Mi"),
        ("1e3", "1k"),
        ("1E3", "1000"),
        ("1E", "1000P"),
        ("+2", "2"),
        (".5", "500m"),
        ("5.", "5"),
        ("0.0000000001", "1n"),
    ],
)
def test_equal_quantities_are_equal(one, other):
    """Different spellings of an amount are the same amount; below nano is rounded up."""
    assert quantity(one) == quantity(other)
    assert quantity(one) is not None


@pytest.mark.parametrize("value", ["", "GB", "1 Gi", "1KB", "one", None, True, [], "1ki", "--1", "1e9999"])
def test_other_things_are_no_quantity(value):
    """What the API server would refuse is None."""
    assert quantity(value) is None
