"""Drift against a real API server: every hand edit is one. What it makes of an object is none: see test_children."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from pathlib import Path

import pytest
import yaml

from penstock.api import GraphDeployment
from penstock.core.errors import ForbiddenError, InvalidObjectError
from penstock.kube.kinds import KINDS
from penstock.kube.objects.names import OPERATOR
from penstock_operator.plan.drift import differences, with_content_digest
from penstock_operator.resources import BuildContext, children

pytestmark = pytest.mark.cluster

SAMPLES = Path(__file__).parents[2] / "manifests/samples"
PERSON = "kubectl-edit"

ANOTHER = {
    "Always": "Never",
    "ClientIP": "None",
    "ClusterIP": "NodePort",
    "ClusterFirst": "Default",
    "Equal": "Exists",
    "Exists": "Equal",
    "HTTP": "HTTPS",
    "IfNotPresent": "Always",
    "Ingress": "Egress",
    "NoSchedule": "NoExecute",
    "RollingUpdate": "Recreate",
    "RuntimeDefault": "Unconfined",
    "TCP": "UDP",
}
"""A valid value instead of one of a closed set; elsewhere text gets a letter more."""


def drifted(want, live):
    """Return the first difference as text, or None."""
    return next(map(str, differences(want, live)), None)


def wanted(manifest, namespace):
    """Return a sample's children as the operator applies them; without an owner, which exists nowhere here."""
    placed = copy.deepcopy(manifest)
    placed["metadata"]["namespace"] = namespace
    graph = GraphDeployment.model_validate(placed)
    context = BuildContext(owner_uid="", namespace=namespace)
    return [with_content_digest(each) for each in children(graph, context, replicas={}, unavailable={})]


def leaves(value, path=()):
    """Yield path and value of every scalar, and of every empty list or map."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from leaves(each, (*path, index))
    elif value is not None:
        yield path, value


def another(value):
    """Return a value that means something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return ANOTHER.get(value, f"{value}1")
    return None


def pointer(path):
    """Return a JSON pointer."""
    return "".join(f"/{str(each).replace('~', '~0').replace('/', '~1')}" for each in path)


def content(obj):
    """Return what of an object a person or an apply can set."""
    metadata = {key: obj["metadata"].get(key) for key in ("labels", "annotations", "finalizers")}
    metadata["annotations"] = {
        key: each for key, each in (metadata["annotations"] or {}).items() if key.startswith("penstock.dev/")
    }
    rest = {key: each for key, each in obj.items() if key not in {"metadata", "status"}}
    return {**rest, "metadata": metadata}


def body(want):
    """Return a wanted object as a merge patch, which replaces lists as a whole."""
    return {key: each for key, each in want.items() if key not in {"apiVersion", "kind", "metadata"}}


async def edits(client, want):
    """Edit every leaf of an applied object by hand, twice; return what became of the edits.

    The API server is the judge: an edit is drift exactly if applying the object again changes it back.
    """
    kind, name = KINDS[want["kind"]], want["metadata"]["name"]
    namespace = want["metadata"]["namespace"]
    found = Counter()
    wrong = []
    for path, value in leaves(want):
        if path[0] in {"apiVersion", "kind"} or path[:2] in {("metadata", "name"), ("metadata", "namespace")}:
            continue
        other = another(value)
        patches = [{"op": "remove", "path": pointer(path)}]
        if other is not None:
            patches.append({"op": "replace", "path": pointer(path), "value": other})
        for patch in patches:
            try:
                edited = await client.patch(kind, name, [patch], namespace=namespace, field_manager=PERSON)
            except (InvalidObjectError, ForbiddenError):
                found["refused"] += 1
                continue
            said = drifted(want, edited)
            try:
                repaired = await client.apply(want, field_manager=OPERATOR)
            except InvalidObjectError:
                # A changed merge key (a Service's port number) makes of the edit another element alongside the
                # wanted one, and both together are invalid: the lists have to be replaced as a whole first.
                found["beyond apply"] += 1
                await client.patch(kind, name, body(want), namespace=namespace, field_manager=PERSON)
                repaired = await client.apply(want, field_manager=OPERATOR)
            truth = content(repaired) != content(edited)
            found["drift" if truth else "same"] += 1
            if (said is not None) is not truth:
                wrong.append((kind.kind, patch, said))
            if drifted(want, repaired) is not None:
                wrong.append((kind.kind, patch, "not repaired", drifted(want, repaired)))
    return found, wrong


@pytest.mark.parametrize(
    ("stem", "only"),
    [
        pytest.param("two-node-pools", "", marks=pytest.mark.nightly),
        ("vllm-disaggregated", "decode"),
    ],
)
async def test_every_hand_edit_is_seen_and_repaired(client, namespace, stem, only):
    """Each leaf of each child, changed and removed: drift exactly where an apply would change it back."""
    manifest = yaml.safe_load((SAMPLES / f"{stem}.yaml").read_text(encoding="utf-8"))
    objects = [each for each in wanted(manifest, namespace) if each["metadata"]["name"].endswith(only)]
    for want in objects:
        await client.apply(want, field_manager=OPERATOR)
    results = await asyncio.gather(*(edits(client, want) for want in objects))
    counts = sum((found for found, _ in results), Counter())
    assert [each for _, wrong in results for each in wrong] == []
    assert counts["drift"] > 80, counts


async def test_what_another_hand_opens_is_closed_again(client, namespace):
    """A pod on its node's network and a Service on every node's port: both are repaired, and leave nothing behind."""
    manifest = yaml.safe_load((SAMPLES / "vllm-disaggregated.yaml").read_text(encoding="utf-8"))
    opened = {
        "Deployment": {"spec": {"template": {"spec": {"hostNetwork": True, "hostPID": True}}}},
        "Service": {"spec": {"type": "NodePort"}},
    }
    objects = [each for each in wanted(manifest, namespace) if each["kind"] in opened]
    assert len(objects) > 4
    for want in objects:
        kind, name = KINDS[want["kind"]], want["metadata"]["name"]
        if want["spec"].get("clusterIP") == "None":
            continue  # the API server refuses a headless one with a port of the node
        before = await client.apply(want, field_manager=OPERATOR)
        edited = await client.patch(
            kind, name, opened[want["kind"]], namespace=namespace, field_manager=PERSON
        )
        assert drifted(want, edited) is not None
        repaired = await client.apply(want, field_manager=OPERATOR)
        assert content(repaired) == content(before)
