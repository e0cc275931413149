"""Pods that the API server refuses: said by the workload's condition alone, in stable words, with a remedy."""

import pytest

from penstock.operator.plan.diagnose import Category, refusal


def workload(message="", *, status="True", kind="ReplicaFailure", reason="FailedCreate"):
    """Return a Deployment with one condition."""
    condition = {"type": kind, "status": status, "reason": reason, "message": message}
    return {"metadata": {"name": "g-decode"}, "status": {"conditions": [condition]}}


@pytest.mark.parametrize(
    "found",
    [
        {"metadata": {"name": "g-decode"}},
        {"metadata": {"name": "g-decode"}, "status": {"conditions": None}},
        workload("exceeded quota: q", status="False"),
        workload("exceeded quota: q", kind="Progressing"),
    ],
)
def test_a_workload_whose_pods_are_made_is_in_no_trouble(found):
    """No status yet, no condition, or one that does not hold."""
    assert refusal("decode", found) is None


@pytest.mark.parametrize(
    ("said", "message", "remedy"),
    [
        (
            'pods "g-decode-7f9-x2b" is forbidden: exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4',
            "exceeded quota: q, requested: pods=1, used: pods=4, limited: pods=4",
            "raise ResourceQuota q of the namespace, or lower replicas",
        ),
        (
            'pods "g-decode-7f9-x2b" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "m")',
            'violates PodSecurity "baseline:latest": hostPath volumes (volume "m")',
            "change podTemplate or cacheMount to what the namespace's pod security level allows",
        ),
        (
            'pods "a" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
            "maximum memory usage per Container is 1Gi, but limit is 2Gi",
            "set resources in podTemplate within the namespace's LimitRange",
        ),
        (
            'admission webhook "images.example.com" denied the request: unsigned\n image',
            'admission webhook "images.example.com" denied the request: unsigned image',
            "ask who runs admission webhook images.example.com, or change podTemplate",
        ),
        (
            "",
            "FailedCreate",
            "see kubectl describe replicaset, and the quotas, limit ranges and webhooks of the namespace",
        ),
    ],
)
def test_the_servers_words_are_given_without_the_pods_generated_name(said, message, remedy):
    """The name differs from try to try; a status that carried it would be written again and again."""
    found = refusal("decode", workload(said))
    assert (found.category, found.service, found.pod) == (Category.REFUSED, "decode", "g-decode")
    assert (found.message, found.remedy) == (f"the API server refuses its pods: {message}", remedy)
