"""Kubernetes objects as YAML that a person reads and kubectl accepts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from penstock.api import GraphDeployment
from penstock.kube.objects.names import SERVICE_LABEL
from penstock.operator.resources import BuildContext, adapter, children


def objects_of(graph: GraphDeployment, *, namespace: str, service: str | None) -> list[dict[str, Any]]:
    """Return what the operator would make of a graph that is new to the cluster.

    They have no owner, because there is no graph in a cluster yet that could own them.

    Args:
        graph: A valid graph.
        namespace: Where the objects would live.
        service: Only the objects of this service; None: all.

    Raises:
        InvalidSpecError: a podTemplate cannot be laid over its pod template.
    """
    context = BuildContext(
        owner_uid="", namespace=namespace, has_leader_worker_set=True, has_inference_pool=True
    )
    found = children(graph, context, replicas={}, unavailable={})
    for name, spec in graph.spec.services.items():
        if spec.scaling is not None and spec.role.is_worker:
            found.append(adapter(graph, name, context, replicas=spec.replicas))
    if service is None:
        return found
    return [each for each in found if each["metadata"]["labels"].get(SERVICE_LABEL) == service]


def as_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """Return one YAML document per object, without anchors, texts of several lines as blocks."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=110)


_PLAIN_ELSEWHERE = re.compile(r"[yYnN]|[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?|0o[0-7]+|0b[01]+")
"""Texts that PyYAML leaves bare and kubectl reads as a boolean or a number.

Source: go-yaml v2, resolve.go, which sigs.k8s.io/yaml is built on.
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else "'" if _PLAIN_ELSEWHERE.fullmatch(data) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
