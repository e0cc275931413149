from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidSpecError
from penstock.operator.resources.overlay import overlay

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


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({}, BASE),
        ({"metadata": {"labels": {"b": "2"}}}, changed(("metadata", "labels"), {"a": "1", "b": "2"})),
        ({"metadata": {"labels": {"a": None}}}, changed(("metadata", "labels"), {})),
        (
            {"metadata": {"labels": {"$patch": "replace", "b": "2"}}},
            changed(("metadata", "labels"), {"b": "2"}),
        ),
        ({"metadata": {"labels": {"$patch": "delete"}}}, changed(("metadata", "labels"), {})),
        (
            {"metadata": {"annotations": {"n": None, "m": "1"}}},
            changed(("metadata", "annotations"), {"m": "1"}),
        ),
        (main(args=["y", "z"]), changed((*MAIN, "args"), ["y", "z"])),
        (
            main(env=[{"name": "B", "value": "2"}, {"name": "C", "value": "3"}]),
            changed(
                (*MAIN, "env"),
                [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}],
            ),
        ),
        (
            main(env=[{"name": "A", "$patch": "delete"}]),
            changed((*MAIN, "env"), [{"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "p"}}}]),
        ),
        (
            main(env=[{"$patch": "replace"}, {"name": "Z", "value": "9"}]),
            changed((*MAIN, "env"), [{"name": "Z", "value": "9"}]),
        ),
        (
            main(volumeMounts=[{"mountPath": "/dev/shm", "name": "big"}, {"mountPath": "/x", "name": "x"}]),
            changed(
                (*MAIN, "volumeMounts"),
                [{"name": "big", "mountPath": "/dev/shm"}, {"mountPath": "/x", "name": "x"}],
            ),
        ),
        (
            main(ports=[{"containerPort": 8000, "name": "web"}, {"containerPort": 9}]),
            changed((*MAIN, "ports"), [{"name": "web", "containerPort": 8000}, {"containerPort": 9}]),
        ),
        (
            {"spec": {"volumes": [{"name": "shm", "persistentVolumeClaim": {"claimName": "c"}}]}},
            changed(("spec", "volumes"), [{"name": "shm", "persistentVolumeClaim": {"claimName": "c"}}]),
        ),
        (
            {"spec": {"tolerations": [{"key": "spot"}, {"key": "gpu", "operator": "Exists"}]}},
            changed(("spec", "tolerations"), [{"key": "gpu", "operator": "Exists"}, {"key": "spot"}]),
        ),
        (
            {"spec": {"tolerations": [{"$patch": "replace"}, {"key": "spot"}]}},
            changed(("spec", "tolerations"), [{"key": "spot"}]),
        ),
        (
            {"spec": {"terminationGracePeriodSeconds": 5}},
            changed(("spec", "terminationGracePeriodSeconds"), 5),
        ),
        (
            {"spec": {"hostAliases": [{"ip": "1.1.1.1", "hostnames": ["a"]}]}},
            changed(("spec", "hostAliases"), [{"ip": "1.1.1.1", "hostnames": ["a"]}]),
        ),
    ],
    ids=range(17),
)
def test_overlay(patch, expected):
    """Maps and named lists merge, null and $patch delete, tolerations add up, the rest is replaced."""
    before = copy.deepcopy((BASE, patch))
    assert overlay(BASE, patch, "p") == expected
    assert (BASE, patch) == before


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"metadata": []}, "p.metadata: is no map where the pod has one"),
        ({"metadata": {"labels": {"a": {}}}}, "p.metadata.labels.a: is a map where the pod has none"),
        ({"spec": {"containers": "x"}}, "p.spec.containers: is no list where the pod has one"),
        ({"spec": {"containers": {}}}, "p.spec.containers: is a map where the pod has none"),
        ({"spec": {"containers": ["x"]}}, r"p.spec.containers\[0\]: is no map"),
        ({"spec": {"containers": [{"image": "x"}]}}, r"p.spec.containers\[0\]: has no name; give it one"),
        ({"spec": {"containers": [{"name": []}]}}, r"p.spec.containers\[0\]: has no name; give it one"),
        ({"spec": {"volumes": [{"name": "a", "$patch": "retain"}]}}, "'retain' is none of delete"),
        ({"spec": {"$retainKeys": ["a"]}}, r"p.spec: \$retainKeys is not supported"),
        ({"spec": {"tolerations": [{"key": "a", "$patch": "delete"}]}}, r"p.spec.tolerations: has \$patch"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(patch, message):
    """With the path in the manifest and what to write instead."""
    with pytest.raises(InvalidSpecError, match=message):
        overlay(BASE, patch, "p")


_keys = st.sampled_from(
    [
        "metadata",
        "spec",
        "containers",
        "env",
        "volumes",
        "tolerations",
        "labels",
        "args",
        "name",
        "$patch",
        "x",
    ]
)
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
