import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidObjectError
from penstock.kube.informer import Backoff
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


@given(st.integers(), st.integers(1, 20))
def test_pauses_double_up_to_the_limit(seed, count):
    """Each lies in the upper half of a range that doubles from 0.2 to 10 s."""
    backoff = Backoff(random.Random(seed), first_s=0.2, limit_s=10.0)
    for number in range(count):
        top_s = min(0.2 * 2**number, 10.0)
        assert top_s / 2 <= backoff.pause_s() <= top_s
    backoff.reset()
    assert backoff.pause_s() <= 0.2
