"""Keys of a podTemplate that Kubernetes does not have are refused by name, wherever they stand."""

import pytest

from penstock.kube.objects.pod_template import unknown_fields


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"specs": {}}, ("specs",)),
        ({"spec": {"tolerationSeconds": 3}}, ("spec", "tolerationSeconds")),
        ({"spec": {"volumes": [{"name": "a", "emptydir": {}}]}}, ("spec", "volumes", 0, "emptydir")),
        (
            {"spec": {"affinity": {"podAffinity": {"required": []}}}},
            ("spec", "affinity", "podAffinity", "required"),
        ),
        (
            {"spec": {"containers": [{"livenessProbe": {"httpGet": {"url": "/"}}}]}},
            ("spec", "containers", 0, "livenessProbe", "httpGet", "url"),
        ),
    ],
)
def test_unknown_keys_are_found_at_any_depth(template, path):
    """One violation at the key itself."""
    assert [each.path for each in unknown_fields(template)] == [path]


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"metadata": {"labels": {"any": "thing"}, "annotations": {"x/y": "z"}}},
        {"spec": {"nodeSelector": {"any": "label"}, "$patch": "replace", "hostname": None}},
        {"spec": {"containers": [{"name": "main", "resources": {"limits": {"example.com/device": 1}}}]}},
        {"spec": {"volumes": [{"$patch": "replace"}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]}},
        {"spec": {"containers": "no list", "securityContext": [1]}},
    ],
)
def test_free_keys_directives_and_wrong_shapes_are_not_its_business(template):
    """Labels and resources have keys of their own; the overlay judges directives and shapes."""
    assert list(unknown_fields(template)) == []
