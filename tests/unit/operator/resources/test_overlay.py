from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidSpecError
from penstock_operator.resources.overlay import overlay

BASE = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "args": ["x"],
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "p"}}},
                ],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "a"},
        "terminationGracePeriodSeconds": 900,
    },
}


def changed(path, value):
    """The base with one value set."""
    result = copy.deepcopy(BASE)
    target = result
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return result


MAIN = ("spec", "containers", 0)


def main(**patch):
    """An overlay on the main container."""
    return {"spec": {"containers": [{"name": "main", **patch}]}}


def labels(**changes):
    """An overlay on the labels."""
    return {"metadata": {"labels": changes}}


LABELS = ("metadata", "labels")
FIRST, SECOND = BASE["spec"]["containers"][0]["env"]
GPU = {"key": "gpu", "operator": "Exists"}
SPOT = {"key": "spot"}
SHARED = {"name": "big", "mountPath": "/dev/shm"}
MORE = {"name": "x", "mountPath": "/x"}
CLAIM = {"name": "shm", "persistentVolumeClaim": {"claimName": "c"}}
HOST = {"ip": "1.1.1.1", "hostnames": ["a"]}
OTHER_B = {"name": "B", "value": "2"}
ONE_MORE = {"name": "C", "value": "3"}
REPLACE = {"$patch": "replace"}


@pytest.mark.parametrize(
    ("patch", "path", "value"),
    [
        ({}, LABELS, {"a": "1"}),
        (labels(b="2"), LABELS, {"a": "1", "b": "2"}),
        (labels(a=None), LABELS, {}),
        (labels(**REPLACE, b="2"), LABELS, {"b": "2"}),
        (labels(**{"$patch": "delete"}), LABELS, {}),
        ({"metadata": {"annotations": {"n": None, "m": "1"}}}, ("metadata", "annotations"), {"m": "1"}),
        (main(args=["y", "z"]), (*MAIN, "args"), ["y", "z"]),
        (main(env=[OTHER_B, ONE_MORE]), (*MAIN, "env"), [FIRST, OTHER_B, ONE_MORE]),
        (main(env=[{"name": "A", "$patch": "delete"}]), (*MAIN, "env"), [SECOND]),
        (main(env=[REPLACE, ONE_MORE]), (*MAIN, "env"), [ONE_MORE]),
        (main(volumeMounts=[SHARED, MORE]), (*MAIN, "volumeMounts"), [SHARED, MORE]),
        (
            main(ports=[{"containerPort": 8000, "name": "web"}, {"containerPort": 9}]),
            (*MAIN, "ports"),
            [{"name": "web", "containerPort": 8000}, {"containerPort": 9}],
        ),
        ({"spec": {"volumes": [CLAIM]}}, ("spec", "volumes"), [CLAIM]),
        ({"spec": {"tolerations": [SPOT, GPU]}}, ("spec", "tolerations"), [GPU, SPOT]),
        ({"spec": {"tolerations": [REPLACE, SPOT]}}, ("spec", "tolerations"), [SPOT]),
        ({"spec": {"terminationGracePeriodSeconds": 5}}, ("spec", "terminationGracePeriodSeconds"), 5),
        ({"spec": {"hostAliases": [HOST]}}, ("spec", "hostAliases"), [HOST]),
    ],
    ids=range(17),
)
def test_overlay(patch, path, value):
    """Maps and named lists merge, null and $patch delete, tolerations add up, the rest is replaced."""
    before = copy.deepcopy((BASE, patch))
    assert overlay(BASE, patch, "p") == changed(path, value)
    assert (BASE, patch) == before


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"metadata": []}, "p.metadata: is not a map where the pod has one"),
        ({"metadata": {"labels": {"a": {}}}}, "p.metadata.labels.a: is a map where the pod has none"),
        ({"spec": {"containers": "x"}}, "p.spec.containers: is not a list where the pod has one"),
        ({"spec": {"containers": {}}}, "p.spec.containers: is a map where the pod has none"),
        ({"spec": {"containers": ["x"]}}, r"p.spec.containers\[0\]: is not a map"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"p.spec.containers\[0\]: has no name; give it one"),
        ({"spec": {"containers": [{"name": []}]}}, r"p.spec.containers\[0\]: has no name; give it one"),
        ({"spec": {"volumes": [{"name": "a", "$patch": "retain"}]}}, "'retain' must be one of delete"),
        ({"spec": {"$retainKeys": ["a"]}}, r"p.spec: \$retainKeys is not supported"),
        ({"spec": {"tolerations": [{"key": "a", "$patch": "delete"}]}}, r"p.spec.tolerations: has \$patch"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(patch, message):
    """With the path in the manifest and what to write instead."""
    with pytest.raises(InvalidSpecError, match=message):
        overlay(BASE, patch, "p")


_PARTS = ("metadata", "spec", "containers", "env", "volumes", "tolerations")
_keys = st.sampled_from([*_PARTS, "labels", "args", "name", "$patch", "x"])
_scalars = (
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["main", "A", "shm", "delete", "replace"])
)
_patches = st.dictionaries(
    _keys,
    st.recursive(
        _scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(max_examples=300)
@given(patch=_patches)
def test_any_patch_is_laid_over_or_refused_and_twice_is_once(patch):
    """No patch crashes, none changes its arguments, and laying it over again changes nothing."""
    before = copy.deepcopy(patch)
    try:
        once = overlay(BASE, patch, "p")
    except InvalidSpecError:
        return
    assert patch == before
    assert overlay(once, patch, "p") == once
