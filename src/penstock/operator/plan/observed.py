"""Services as their pods alone show them, for a graph whose specification cannot be acted on.

Pure. An invalid edit leaves what runs as it is, so the status must go on telling the truth about that; and
so it must while a graph is being deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.api import Role
from penstock.kube.objects.names import GRAPH_LABEL, SERVICE_LABEL
from penstock.operator.plan.conditions import ServiceFacts
from penstock.operator.plan.pods import PodView
from penstock.operator.plan.replicas import count


def observed_services(pods: Iterable[PodView]) -> dict[str, ServiceFacts]:
    """Return the services that ``pods`` of one graph belong to, wanted as they are; by name.

    Pods without a service's name or with an unknown role belong to none. How many replicas are of the newest
    revision is not known then; 0 is told.
    """
    by_service: dict[str, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.service and pod.role in set(Role):
            by_service[pod.service].append(pod)
    found: dict[str, ServiceFacts] = {}
    for name, members in sorted(by_service.items()):
        replicas = count(members)
        found[name] = ServiceFacts(
            role=Role(members[0].role),
            replicas=replicas,
            desired=replicas.existing,
            target=replicas.existing,
            updated=0,
            selector=f"{GRAPH_LABEL}={members[0].graph},{SERVICE_LABEL}={name}",
        )
    return found
