"""Which pod a Lease belongs to."""

import pytest

from penstock.kube.lease import own_pod

POD = {"POD_NAME": "penstock-operator-1", "POD_NAMESPACE": "serving", "POD_UID": "u1"}


def test_a_lease_beside_its_holder_belongs_to_the_holders_pod():
    """Without blocking the pod's deletion."""
    expected = {"apiVersion": "v1", "kind": "Pod", "name": "penstock-operator-1", "uid": "u1"}
    assert own_pod(POD, "serving") == expected


@pytest.mark.parametrize("environment", [{}, {**POD, "POD_UID": ""}, {**POD, "POD_NAMESPACE": "elsewhere"}])
def test_outside_a_pod_or_in_another_namespace_it_belongs_to_none(environment):
    """An owner in another namespace counts as absent, and the Lease would be deleted at once."""
    assert own_pod(environment, "serving") is None
