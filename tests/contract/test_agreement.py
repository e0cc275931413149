"""Every field of the manifest that both routers and workers read has its class: an order, an Event, or a reason to need none."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path

from penstock.api import GraphDeployment
from penstock_operator.resources import BuildContext, children

sys.path.append(str(Path(__file__).parent))
from manifest_fields import GIVEN, candidates, leaves

CONTEXT = BuildContext(owner_uid="u", namespace="n")
ROUTERS, WORKERS = "g-frontend", {"g-prefill", "g-decode"}

ORDERED = {"lease.durationSeconds", "model.adapters", "model.aliases", "router.tiers.enabled"}
"""`plan.agreement` holds one side back."""
TOLD = {"model.servedName"}
"""No order loses no request: an Event says so beforehand."""
REFUSED = {"model.name", "runtime"}
"""Prefill and decode of both could not use each other's KV: the API server refuses the change."""
FREE = {
    "engine.maxBatchTokens": "by it a router only weighs how long a prompt takes",
    "engine.requestLimit": "what a worker refuses beyond it is tried at each other one",
    "image": "of routers and simulated workers; those of two releases understand each other, as in any upgrade",
    "model.contextTokens": "a prompt that both settings allow is taken by either side",
    "router.kvEventsPort": "a router without a worker's events counts what it sent there itself",
}
"""Any order does."""


def base(*, runtime, tiers):
    """A graph whose every part can be changed by itself."""
    return {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g"},
        "spec": {
            "model": {"name": "m", "servedName": "s", "contextTokens": 8192},
            "runtime": runtime,
            "services": {
                "frontend": {"role": "router"},
                "prefill": {"role": "prefill", "scaling": {}},
                "decode": {"role": "decode", "scaling": {}},
            },
            "router": {"tiers": {"enabled": tiers}},
            "planner": {"maxGpuBudget": 8},
        },
    }


def build(raw):
    """Return what routers and workers know, by object."""
    found = {}
    for each in children(GraphDeployment.model_validate(raw), CONTEXT, replicas={}, unavailable={}):
        name = each["metadata"]["name"]
        if each["kind"] == "ConfigMap":
            found["file"] = each["data"]
        elif each["kind"] == "Deployment":
            found[name] = each["spec"]["template"]
    return found


def changes(raw):
    """Yield each field that can be changed by itself, and the objects that follow."""
    before = build(raw)
    for path, kind, value in leaves(GraphDeployment.model_validate(raw).spec):
        given = [GIVEN[path[-1]]] if path[-1] in GIVEN else candidates(kind, value)
        for each in given:
            changed = copy.deepcopy(raw)
            at = changed["spec"]
            for key in path[:-1]:
                at = at.setdefault(key, {})
            at[path[-1]] = each
            try:
                after = build(changed)
            except ValueError:
                continue
            yield ".".join(path), {key for key in before if before[key] != after.get(key)}
            break


def test_each_field_that_both_sides_read_is_classed():
    """A new one fails here until it has an order, an Event or a reason."""
    both, seen = set(), 0
    for runtime, tiers in itertools.product(("vllm", "simulated"), (False, True)):
        for path, found in changes(base(runtime=runtime, tiers=tiers)):
            seen += 1
            if found & {"file", ROUTERS} and found & WORKERS:
                both.add(path)
    assert seen > 500
    assert both == ORDERED | TOLD | REFUSED | set(FREE)


def test_the_docs_name_each_order_and_event():
    """In the table of what routers and workers must agree on."""
    text = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
    table = text.partition("What routers and workers must agree on")[2].partition("\n## ")[0]
    assert [each for each in sorted(ORDERED | TOLD | REFUSED) if f"`{each}" not in table] == []
