import pytest

from penstock.core.errors import InvalidObjectError
from penstock.kube.kinds import CRD, DEPLOYMENT, NODE, POD, kind_of


@pytest.mark.parametrize(
    ("kind", "arguments", "path"),
    [
        (POD, (), "/api/v1/pods"),
        (POD, ("ns",), "/api/v1/namespaces/ns/pods"),
        (POD, ("ns", "a"), "/api/v1/namespaces/ns/pods/a"),
        (DEPLOYMENT, ("ns", "a"), "/apis/apps/v1/namespaces/ns/deployments/a"),
        (NODE, ("ns", "a"), "/api/v1/nodes/a"),
        (CRD, (), "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"),
    ],
)
def test_paths(kind, arguments, path):
    """Core and named groups; kinds without namespaces ignore one."""
    assert kind.path(*arguments) == path


@pytest.mark.parametrize(
    "obj", [{}, {"kind": "Pod"}, {"apiVersion": "v1"}, {"apiVersion": "v1", "kind": "Teapot"}]
)
def test_an_object_of_no_kind_is_refused(obj):
    """The message names what was given."""
    with pytest.raises(InvalidObjectError, match="not a kind that Penstock handles"):
        kind_of(obj)
