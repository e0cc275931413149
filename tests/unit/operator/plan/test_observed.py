"""Services seen through their pods."""

from penstock.api import Role
from penstock.kube.objects.names import SERVING
from penstock.operator.plan.conditions import Replicas, ServiceFacts, observed_services
from penstock.operator.plan.pods import PodView


def pod(name, role, service, **more):
    """Return a ready pod that serves."""
    return PodView(name, graph="g", role=role, service=service, ready=True, serving=SERVING, gpus=1, **more)


def test_services_are_found_by_their_pods():
    """Role and number from the pods; what carries no name or role is left out."""
    pods = [
        pod("b", "decode", "decode"),
        pod("a", "decode", "decode", terminating=True),
        pod("r", "router", "frontend"),
        pod("x", "", "frontend"),
        pod("y", "decode", ""),
        pod("z", "juggler", "circus"),
    ]
    assert observed_services(pods) == {
        "decode": ServiceFacts(
            Role.DECODE, Replicas(1, 1, 1, 1, 2), 1, 1, 0, "penstock.dev/graph=g,penstock.dev/service=decode"
        ),
        "frontend": ServiceFacts(
            Role.ROUTER,
            Replicas(1, 1, 1, 0, 1),
            1,
            1,
            0,
            "penstock.dev/graph=g,penstock.dev/service=frontend",
        ),
    }
    assert observed_services([]) == {}
